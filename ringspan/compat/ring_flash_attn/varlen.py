"""ring_flash_attn_varlen_… and zigzag_ring_flash_attn_varlen_…: packed documents, of each of which every rank has a part.

    shards of each document  → one all-to-all of q, k and v →  zigzag shard of the packed sequence
                                                               ring_attention_varlen
    shards of each document  ← one all-to-all of out        ←  out

cu_seqlens are the boundaries of the shards, as ring-flash-attn takes them, or those of the whole documents: then a document may
have any length, and shards have the sizes that torch.chunk gives.
"""

from typing import Any

import torch
from torch import Tensor

from ringspan.compat.options import as_flash_result, pad_width, split_packed
from ringspan.compat.ring_flash_attn.call import document, reported_to_peers, ring_options, shared_seed, size_and_rank
from ringspan.compat.ring_flash_attn.exchange import ExchangeRows, host_boundaries, make_route
from ringspan.kernels.varlen import attention_varlen, check_packed
from ringspan.parallel.coordination.argument_check import COMPARED_CALLS, check_same_on_all_ranks
from ringspan.parallel.coordination.process_groups import GroupLike, as_process_group
from ringspan.parallel.ring_attention_varlen import ring_attention_varlen

COMPARED_EXCHANGES_OF_DOCUMENTS = COMPARED_CALLS + 4  # a count of its own, next to ring calls, batches and Ulysses exchanges
TEXT = """Compute attention within packed documents, of each of which a rank has {shard}: ring-flash-attn's `{name}`.

    Args:
        {tensors}: This rank's shards, {shapes}.
        cu_seqlens: (documents + 1,) boundaries of the documents in the shard, or of the whole documents, which may then have
            any length. A tensor on a GPU is read once, with a synchronisation.
        max_seqlen: No effect.
        dropout_p: Probability of dropping an attention weight.
        softmax_scale: Factor of the scores; None is D ** −0.5.
        causal: Let a query attend to no later key.
        window_size: (left, right) in positions of a document; −1 is no bound.
        alibi_slopes: None.
        deterministic: Make gradients equal bit for bit in every run.
        return_attn_probs: Return (out, lse, None).
        group: Process group of the ring; None is the default group.

    Returns:
        out (n, Hq, D), and with `return_attn_probs` lse (Hq, n) in fp32 and None.

    Raises:
        ValueError: An option is not supported, or the shards do not fit cu_seqlens.
    """


def run_varlen(
    kind: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, options: tuple[Any, ...], group: GroupLike | None
) -> Any:
    """Exchange shards of documents, call `ring_attention_varlen`, and exchange its results back."""
    ring = as_process_group(group)
    size, rank = size_and_rank(ring)
    with reported_to_peers(ring, q, COMPARED_EXCHANGES_OF_DOCUMENTS):
        known = ring_options(*options)
        check_packed(q=q, k=k, v=v)
        if not len(q) == len(k) == len(v):
            raise ValueError(f"q, k and v have {len(q)}, {len(k)} and {len(v)} tokens: they are shards of the same documents")
        route = make_route(kind, host_boundaries(cu_seqlens), len(q), size, rank, q.device)
        width, (q, k, v) = v.shape[-1], pad_width(q, k, v, known)
    boundaries = list(route.boundaries)
    if ring is None or size == 1:
        return as_flash_result(attention_varlen(q, k, v, boundaries, **known), width)
    shapes = [x.shape[1:] for x in (q, k, v)]
    form = kind, [tuple(shape) for shape in shapes], str(q.dtype)
    check_same_on_all_ranks(
        ring.group_name,
        q.device,
        lambda: {"layout, shapes and dtype": form, "cu_seqlens of whole documents": route.boundaries},
        COMPARED_EXCHANGES_OF_DOCUMENTS,
    )
    known["seed"] = shared_seed(known["dropout"], q.device, ring)
    rows = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    rows = ExchangeRows.apply(rows, route.documents, route.packed, ring)
    parts = rows.split([shape.numel() for shape in shapes], 1)
    q, k, v = (x.unflatten(1, shape).contiguous() for x, shape in zip(parts, shapes, strict=True))
    result: Any = ring_attention_varlen(q, k, v, boundaries, **known, layout=route.layout, group=ring)
    out, lse = result if known["return_lse"] else (result, None)
    back = route.packed, route.documents, ring
    out = ExchangeRows.apply(out.flatten(1), *back).unflatten(1, out.shape[1:])
    return as_flash_result(out if lse is None else (out, ExchangeRows.apply(lse.T, *back).T), width)


def _make(prefix: str, kind: str, shard: str) -> tuple[Any, Any, Any]:
    """Return the three functions of a layout."""

    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: GroupLike | None = None,
    ) -> Any:
        options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
        return run_varlen(kind, q, k, v, cu_seqlens, options, group)

    def kvpacked_func(
        q: Tensor,
        kv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: GroupLike | None = None,
    ) -> Any:
        options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
        k, v = split_packed("kv", kv, 1, 2)
        return run_varlen(kind, q, k, v, cu_seqlens, options, group)

    def qkvpacked_func(
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: GroupLike | None = None,
    ) -> Any:
        options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs
        q, k, v = split_packed("qkv", qkv, 1, 3)
        return run_varlen(kind, q, k, v, cu_seqlens, options, group)

    forms = [
        (func, "q, k, v", "q (n, Hq, D), k and v (n, Hkv, D)"),
        (kvpacked_func, "q, kv", "q (n, Hq, D), kv (n, 2, Hkv, D)"),
        (qkvpacked_func, "qkv", "(n, 3, H, D)"),
    ]
    made = []
    for function, tensors, shapes in forms:
        name = f"{prefix}_{function.__name__}"
        made.append(document(function, name, TEXT.format(name=name, shard=shard, tensors=tensors, shapes=shapes)))
    return made[0], made[1], made[2]


ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _make(
    "ring_flash_attn_varlen", "contiguous", "the r-th of P parts"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _make("zigzag_ring_flash_attn_varlen", "zigzag", "chunks r and 2P−1−r of 2P")
