"""The attention function that transformers calls for attn_implementation="ringspan".

    layer → layer_attention(module, q, k, v, LayerMask, scaling, sliding_window, softcap, s_aux, …)
              one GPU   attention(q, k, v, LayerMask.mask)
              ring      context_attention(q, k, v, BatchShard.mask(…), layout, mesh)

Every option that a layer passes is honoured, known to concern something else, or refused by name.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ringspan.hf.batch import SHARD_KEY, BatchShard
from ringspan.hf.context import RingContext, active_context
from ringspan.hf.masks import USE_OTHER, LayerMask
from ringspan.kernels.attention import attention
from ringspan.kernels.segments import POSITION_LIMIT
from ringspan.parallel.context_attention import context_attention

# Keyword arguments that reach attention layers and concern other parts of a model. Documents come from the mask and from
# cu_seq_lens; a layer's index, cache and rotary positions have been applied.
UNRELATED = frozenset(
    (
        "num_items_in_batch", "output_hidden_states", "output_router_logits", "max_length_q", "max_length_k", "seq_idx",
        "use_cache", "cache", "past_key_values", "cache_position", "position_embeddings", "logits_to_keep", "return_dict",
        "return_loss", "labels", "shift_labels", "document_ids", "token_type_ids", "layer_idx", "is_training", "skip_logits",
    )
)  # fmt: skip


def layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer of a transformers model.

    Args:
        module: The attention layer, for its index and for error messages.
        query: (B, Hq, S, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv).
        attention_mask: What `layer_mask` returned for this forward. None: the model asked for no mask, which a layer that is
            not causal may.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores; None is D ** −0.5.
        sliding_window: The layer's window; it must be the mask's.
        softcap: Cap of the scores; None is none.
        s_aux: (Hq,) sinks.
        is_causal: What the layer takes itself for; None is `module.is_causal`.
        options: Further options of transformers.

    Returns:
        out (B, S, Hq, Dv), and None for attention weights, which are not computed.

    Raises:
        ValueError: An option cannot be honoured, or a sharded batch and a ring do not come together. The message names the
            layer and the option.
    """
    layer = _name(module)
    shard: BatchShard | None = options.pop(SHARD_KEY, None)
    position_ids: Tensor | None = options.pop("position_ids", None)
    cu_seqlens = options.pop("cu_seq_lens_q", None), options.pop("cu_seq_lens_k", None)
    _check_options(options, layer)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask = _check_mask(attention_mask, query, key, causal, sliding_window, layer)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, sinks=s_aux, dropout=dropout)
    context = active_context() if mask is None else mask.context
    if shard is None and context is None:
        if mask is None:
            return attention(q, k, v, **scores), None
        if not mask.is_read or cu_seqlens != (None, None):
            _read_documents(mask, cu_seqlens, position_ids, layer)
        return attention(q, k, v, mask.mask, **scores), None
    context = _check_ring(shard, context, mask, module, cu_seqlens, layer)
    assert shard is not None and mask is not None
    context.check_positions(position_ids, shard, layer)
    if dropout:
        scores["seed"] = shard.seed(q.device, getattr(module, "layer_idx", None) or 0)
    whole = shard.mask(mask.rules.causal, mask.rules.window)
    out = context_attention(q, k, v, whole, **scores, **context.options, layout=shard.layout, mesh=context.mesh)
    return out, None


def _name(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    index, model = getattr(module, "layer_idx", None), getattr(config, "model_type", None)
    name = type(module).__name__ + ("" if index is None else f" {index}")
    return name if model is None else f"{name} of model {model!r}"


def _check_options(options: dict[str, Any], layer: str) -> None:
    for name, value in options.items():
        if value is None or value is False or name in UNRELATED:
            continue
        if name == "output_attentions":
            raise ValueError(f"output_attentions=True of {layer}: attention weights are never stored; {USE_OTHER}")
        kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}={kind} of {layer}: not supported by attn_implementation='ringspan'; {USE_OTHER}")


def _check_mask(
    mask: LayerMask | Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None, layer: str
) -> LayerMask | None:
    """Return the mask if it is ours and fits the layer, or None if the layer needs none."""
    if mask is None:
        if causal or sliding_window is not None:
            raise ValueError(
                f"attention_mask=None of {layer}, which is causal or has a window: its model did not ask for a mask by "
                f"transformers.masking_utils; {USE_OTHER}"
            )
        return None
    if not isinstance(mask, LayerMask):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask={shape} of {layer}: a matrix is not supported; pass attention_mask (B, S) of 0 and 1 to the "
            f"model, or {USE_OTHER}"
        )
    if (mask.q_length, mask.kv_length) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask of {layer} is for {mask.q_length} queries and {mask.kv_length} keys, the layer has "
            f"{query.shape[2]} and {key.shape[2]}: this cache or prefix is not supported; DynamicCache works"
        )
    if causal is False and mask.rules.causal:
        raise ValueError(f"is_causal=False of {layer}, but its mask is causal: set is_causal in the model's config")
    left = mask.rules.left
    if sliding_window is not None and mask.rules.causal and left != sliding_window - 1:
        window = None if left == POSITION_LIMIT else left + 1
        raise ValueError(f"sliding_window={sliding_window} of {layer}, but its mask has window={window}: {USE_OTHER}")
    return mask


def _read_documents(
    mask: LayerMask, cu_seqlens: tuple[Tensor | None, Tensor | None], position_ids: Tensor | None, layer: str
) -> None:
    q_offsets, k_offsets = cu_seqlens
    if k_offsets is not None and (q_offsets is None or not torch.equal(q_offsets, k_offsets)):
        raise ValueError(f"cu_seq_lens_k of {layer} differ from cu_seq_lens_q, or only they are passed: pass equal ones")
    if mask.is_read and mask.packed_by is q_offsets:
        return
    try:
        mask.read_documents(position_ids, q_offsets)
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from None


def _check_ring(
    shard: BatchShard | None,
    context: RingContext | None,
    mask: LayerMask | None,
    module: nn.Module,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    layer: str,
) -> RingContext:
    """Return the ring of a layer that has a sharded batch, or runs inside context_parallel."""
    if shard is None:
        raise ValueError(
            f"batch of {layer} is not sharded, inside context_parallel: call model(**ring.shard(batch)). If it was, this model "
            "does not pass keyword arguments to its attention layers, which is not supported under a ring"
        )
    if context is None and shard.entered is not None and torch._C._current_graph_task_id() != -1:
        context = shard.entered  # a recomputation of the whole model, after the `with` has ended
    if context is None:
        raise ValueError(f"batch of {layer} is sharded, outside context_parallel: run the model inside `with ring:`")
    if context.mesh is not shard.mesh:
        raise ValueError(f"batch of {layer} was sharded for {shard.mesh}, this is {context.mesh}: use one ring for both")
    if "cross" in type(module).__name__.lower() or getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"cross-attention of {layer} under a ring: not supported; decoder-only models work")
    if mask is None:
        raise ValueError(f"attention_mask=None of {layer} under a ring: its model asked for no mask; text decoders work")
    if mask.padded:
        raise ValueError(
            f"attention_mask of {layer} under a ring: pass it to ring.shard with the whole batch, and not to the model"
        )
    if cu_seqlens != (None, None):
        raise ValueError(f"cu_seq_lens_q of {layer} under a ring: pass it to ring.shard with the whole batch")
    shard.entered = context
    return context
