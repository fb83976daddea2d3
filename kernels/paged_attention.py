"""Attention of a model that writes: one query a sequence, over keys and values that lie in pages.

    out = paged_attention(q, keys, values, table, lengths)      q (B, Hq, D), keys and values (pages, page, Hkv, D)

A text grows by one token at a time, and nobody knows how far. So the memory for keys and values is cut into pages, and a table
says which pages a sequence has, in order: it takes one more when it needs it, and sequences that begin alike share pages
(PagedAttention). And one query a sequence is too little work for a GPU if each has one program: the keys are dealt out to as
many programs as keep it busy, each ends with its own softmax, and lse weighs them (Flash-Decoding).

Nothing here has a gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.mask import NO_LIMIT, Mask
from ringspan.kernels.validate import check_options

PROGRAMS = 4  # for each multiprocessor: while some wait for what they load, others have theirs


class PagedInputs(NamedTuple):
    """As `paged_attention` takes them."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


def paged_attention(
    q: Tensor,  # (B, Hq, D): of each sequence the last token's
    keys: Tensor,  # (pages, page, Hkv, D)
    values: Tensor,  # (pages, page, Hkv, Dv)
    table: Tensor,  # int32 (B, most): a sequence's pages; behind them anything
    lengths: Tensor,  # int32 (B,): how many keys it has, the query's own among them, so at least 1
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """What `attention` gives for a causal query that stands at its sequence's last key: (B, Hq, Dv). Options are its own."""
    given = PagedInputs(q, keys, values, table, lengths)
    _check(given, window, sinks, backend)
    check_options(q[:, None], scale, softcap, 0.0, None, False)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "gather" or (backend == "auto" and q.device.type == "cpu"):
        return _gathered(given, Mask(causal=True, window=window), scale=scale, softcap=softcap, sinks=sinks)
    from ringspan.kernels.backends.triton.paged_decode import launch  # only here: it needs Triton

    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    splits = splits_of(len(q) * keys.shape[2], table.shape[1], multiprocessors)
    shape = len(q), splits, q.shape[1]
    parts, lse = (torch.empty(size, dtype=torch.float32, device=q.device) for size in ((*shape, values.shape[3]), shape))
    launch(*given, parts, lse, window or NO_LIMIT, scale, softcap)()
    return _weighed(parts, lse, sinks).to(q.dtype)


def splits_of(num_programs: int, pages: int, multiprocessors: int) -> int:
    """Into how many parts keys are dealt out, if there would be so many programs without."""
    return max(1, min(pages, PROGRAMS * multiprocessors // num_programs))


def _weighed(parts: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """One softmax of several over parts of the keys: (B, splits, Hq, Dv) and (B, splits, Hq). A sink is one of value 0."""
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(len(lse), 1, -1)), 1)
    weights = lse.softmax(1)[:, : parts.shape[1], :, None]
    return (weights * parts).sum(1)


def _gathered(given: PagedInputs, mask: Mask, **options: Any) -> Tensor:
    """Each sequence by itself, its pages put together first."""
    q, keys, values, table, lengths = given
    out = q.new_empty((*q.shape[:2], values.shape[-1]))
    for index, length in enumerate(lengths.tolist()):
        pages = table[index, : -(-length // keys.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[None, :length] for x in (keys, values))
        out[index] = attention(q[index, None, None], k, v, mask=mask, **options)[0, 0]
    return out


def _check(given: PagedInputs, window: int | None, sinks: Tensor | None, backend: str) -> None:
    q, keys, values, table, lengths = given
    if q.ndim != 3 or keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or q.shape[2] != keys.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}: give q (B, Hq, D), keys "
            "(pages, page, Hkv, D) and values (pages, page, Hkv, Dv)"
        )
    if q.shape[1] % keys.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, keys have {keys.shape[2]}: give q a multiple of those")
    if table.ndim != 2 or len(table) != len(q) or lengths.shape != q.shape[:1] or {table.dtype, lengths.dtype} != {torch.int32}:
        raise ValueError(
            f"table {tuple(table.shape)} {table.dtype}, lengths {tuple(lengths.shape)} {lengths.dtype} for {len(q)} sequences: "
            "give int32 (B, most) and int32 (B,)"
        )
    if len({x.dtype for x in (q, keys, values)}) > 1 or len({x.device for x in given}) > 1:
        raise ValueError("q, keys and values must have one dtype, and be on one device with table and lengths: move them")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, or None: it counts the query itself")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be ({q.shape[1]},): one a query head")
    if backend not in ("auto", "gather", "triton"):
        raise ValueError(f"backend={backend!r}: choose auto, gather or triton")
    page, by_kernel = keys.shape[1], backend == "triton" or (backend == "auto" and q.device.type != "cpu")
    if by_kernel and (q.dtype == torch.float64 or page < 16 or page & (page - 1)):
        raise ValueError(
            f"pages of {page} tokens in {q.dtype}: the kernel takes powers of two from 16 on, and no fp64; use backend='gather'"
        )
