"""`substitute_hf_flash_attn`: models of transformers with attn_implementation="flash_attention_2" run on the ring.

    substitute_hf_flash_attn(group, heads_k_stride=1)                        once, before the model is loaded
    update_ring_flash_attn_params(cu_seqlens, group)                         for each batch, with the whole packed sequence
    model(input_ids=ids.chunk(P, 1)[r], position_ids=positions.chunk(P, 1)[r])

flash_attn need not be installed. A layer's sliding window is that of transformers, which counts the query. Softcap and sinks,
which ring-flash-attn lacks, are honoured. `use_ring_attn(False)` runs the same models on one rank, with padding and caches.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringspan.compat.flash_name import NAME, accept_flash_attention_2
from ringspan.compat.ring_flash_attn.call import reported_to_peers, ring_options, size_and_rank
from ringspan.compat.ring_flash_attn.llama3 import PreparedStart, llama3_flash_attn_prepare_cu_seqlens, run_llama3
from ringspan.hf.attention import layer_attention
from ringspan.hf.masks import LayerMask, layer_mask
from ringspan.hf.register import register

DATA_PARAMS: dict[str, Any] = {}  # of the last update_ring_flash_attn_params; other packages read it
RING_ATTN_SWITCH = True
CHECKED_FORWARDS = 64  # first layer calls, whose position_ids are checked: on a GPU that is a synchronisation
PASSED = (
    "query_states", "key_states", "value_states", "attention_mask", "query_length", "is_causal", "dropout", "position_ids",
    "softmax_scale", "sliding_window", "softcap",
)  # fmt: skip
_checks_left = CHECKED_FORWARDS


def check_params(f1: Callable[..., Any], f2: Callable[..., Any]) -> bool:
    """Return whether two functions have equally many parameters."""
    return len(inspect.signature(f1).parameters) == len(inspect.signature(f2).parameters)


def use_ring_attn(flag: bool) -> None:
    """Run the following forwards on the ring, or on one rank."""
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup) -> None:
    """Set the documents of the next batch.

    Args:
        cu_seqlens: (documents + 1,) boundaries of the whole packed sequence, of which each rank has the r-th of P parts.
        process_group: Process group of the ring.

    Raises:
        ValueError: The boundaries are not valid, or their tokens are no multiple of the number of ranks.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    values = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, size)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    DATA_PARAMS.update(zip(names, values, strict=True))


def create_ring_flash_attention_forward(process_group: dist.ProcessGroup, heads_k_stride: int) -> list[Callable[..., Any]]:
    """Return functions with the parameters of transformers' `_flash_attention_forward`, on the ring: a list of one.

    Args:
        process_group: Process group of the ring.
        heads_k_stride: No effect.
    """

    def _flash_attention_forward(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Any,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        **options: Any,
    ) -> Tensor:
        with reported_to_peers(process_group, query_states):
            _check_call(query_states, attention_mask, position_ids, process_group)
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1 if is_causal else sliding_window - 1)
        known = ring_options(dropout, softmax_scale, is_causal, window, None, deterministic, False)
        known |= dict(softcap=softcap or 0.0, sinks=options.get("s_aux"))
        q, k, v = (x.squeeze(0) for x in (query_states, key_states, value_states))
        return run_llama3(q, k, v, DATA_PARAMS["local_k_slice"], known, process_group).unsqueeze(0)

    return [_flash_attention_forward]


def flash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer: transformers' entry "flash_attention_2", on the ring or on one rank.

    Args:
        module: The attention layer.
        query: (B, Hq, S, D); B is 1 on the ring.
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, D).
        attention_mask: What ringspan.hf's mask function returned.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores; None is D ** −0.5.
        sliding_window: The layer's window, in which the query counts.
        softcap: Cap of the scores.
        kwargs: Further options of transformers.

    Returns:
        out (B, S, Hq, D), and None.
    """
    if not RING_ATTN_SWITCH:
        scores: dict[str, Any] = dict(dropout=dropout, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        return layer_attention(module, query, key, value, attention_mask, **scores, **kwargs)
    from transformers import modeling_flash_attention_utils

    is_causal = kwargs.pop("is_causal", None)
    out = modeling_flash_attention_utils._flash_attention_forward(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        **kwargs,
    )
    return out, None


def substitute_hf_flash_attn(process_group: dist.ProcessGroup, heads_k_stride: int) -> None:
    """Run attn_implementation="flash_attention_2" of transformers on the ring. Call it before the model is loaded.

    Args:
        process_group: Process group of the ring.
        heads_k_stride: No effect: keys and values are sent rank by rank.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers is older than 5, or has another interface.
    """
    register()
    import transformers
    from transformers import masking_utils, modeling_flash_attention_utils, modeling_utils

    theirs = modeling_flash_attention_utils._flash_attention_forward
    missing = [name for name in PASSED if name not in inspect.signature(theirs).parameters]
    if missing:
        raise ValueError(
            f"transformers={transformers.__version__} has another interface for flash attention than Ringspan knows: "
            f"_flash_attention_forward lacks {', '.join(missing)}; 5.24 is tested"
        )
    ours = create_ring_flash_attention_forward(process_group, heads_k_stride)[-1]
    modeling_flash_attention_utils._flash_attention_forward = ours
    modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME] = flash_attention_forward
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[NAME] = layer_mask
    accept_flash_attention_2()


def _check_call(q: Tensor, mask: LayerMask | None, position_ids: Tensor | None, group: dist.ProcessGroup) -> None:
    """Raise a ValueError for what the ring cannot honour."""
    global _checks_left
    if "local_k_slice" not in DATA_PARAMS:
        raise ValueError("no batch has been prepared: call update_ring_flash_attn_params(cu_seqlens, group) before the model")
    if q.shape[0] != 1:
        raise ValueError(
            f"batch={q.shape[0]}: packed documents are one row; concatenate the rows, with cu_seqlens between them"
        )
    if isinstance(mask, LayerMask) and mask.padded:
        raise ValueError("attention_mask has padding: leave it out, padding is a document of its own in cu_seqlens")
    start = DATA_PARAMS["local_k_slice"].start
    if position_ids is None or position_ids.ndim != 2 or not isinstance(start, PreparedStart) or _checks_left <= 0:
        return
    _checks_left -= 1
    size, rank = size_and_rank(group)
    begin = q.shape[1] * rank
    if q.shape[1] * size != start.boundaries[-1]:
        return  # an error of its own
    document_start = max((b for b in start.boundaries[:-1] if b <= begin), default=0)
    if begin > document_start and int(position_ids[0, 0]) == 0:
        raise ValueError(
            f"position_ids begin with 0, but this shard begins at token {begin - document_start} of a document: pass the shard "
            "of the whole sequence's position_ids"
        )
