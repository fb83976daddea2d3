"""Attention for decoding: one query per sequence, over keys and values in pages.

    out = paged_attention(q, keys, values, table, lengths)      q (B, Hq, D), keys and values (pages, page length, Hkv, D)

PagedAttention: the memory of keys and values is divided into pages, and a table lists the pages of each sequence in order. A
sequence takes another page when it needs one, so its length need not be known in advance; sequences with a common beginning
share pages.

Flash-Decoding: one thread block per sequence and key head is too little work for a GPU. The keys of a sequence are split over
as many thread blocks as keep the GPU busy. Each thread block writes the softmax over its part, and lse weights the parts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.backends.choose import device_obstacle
from ringspan.kernels.backends.triton.paged_decode import launch
from ringspan.kernels.mask import NO_LIMIT, Mask
from ringspan.kernels.tensors import can_read, num_sms
from ringspan.kernels.validate import check_head_dims, check_options, check_sinks, check_tensor

BLOCKS_PER_SM = 4  # thread blocks per SM, so that some compute while others wait for loads


class PagedInputs(NamedTuple):
    """Tensor arguments of `paged_attention`."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


def paged_attention(
    q: Tensor,  # (B, Hq, D)
    keys: Tensor,  # (pages, page, Hkv, D)
    values: Tensor,  # (pages, page, Hkv, Dv)
    table: Tensor,  # (B, max pages), int32
    lengths: Tensor,  # (B,), int32
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention of each sequence's last token over keys and values in pages, for decoding. There is no gradient.

    The result equals `attention` with Mask(causal=True, window=window) and one query at the position of the last key.

    Args:
        q: Query of each sequence's last token, (B, Hq, D).
        keys: (pages, page length, Hkv, D), in q's dtype. Hq is a multiple of Hkv.
        values: (pages, page length, Hkv, Dv), in q's dtype. D and Dv are 16 to 256, in steps of 8.
        table: int32 (B, max pages): the pages of each sequence, in order. Entries past its last page are ignored.
        lengths: int32 (B,): number of keys of each sequence, the query's own included, so at least 1.
        window: Number of last keys that the query attends to, itself included. None: all.
        scale: Factor of the scores. None: D ** −0.5.
        softcap: Bound the scores: s ← softcap · tanh(s / softcap). 0: off.
        sinks: (Hq,) floats: for each query head, the score of one extra key whose value is 0.
        backend: "triton" (pages of a power of two ≥ 16 tokens, no float64), "gather" (copies each sequence's pages, then
            calls `attention`), or "auto": "gather" on a CPU, otherwise "triton".

    Returns:
        (B, Hq, Dv), in q's dtype.

    Raises:
        ValueError: An argument has a wrong shape, dtype, device or range, or the backend cannot run these inputs.

    Example:
        >>> out = paged_attention(q, keys, values, table, lengths)
    """
    inputs = PagedInputs(q, keys, values, table, lengths)
    _check(inputs, window, sinks, backend)
    check_options(q[:, None], scale, softcap, 0.0, None, False)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "gather" or (backend == "auto" and q.device.type == "cpu") or not q.numel():
        return _gather(inputs, Mask(causal=True, window=window), scale=scale, softcap=softcap, sinks=sinks)
    splits = num_splits(len(q) * keys.shape[2], table.shape[1], max(1, num_sms(q.device)))
    shape = len(q), splits, q.shape[1]
    parts, lse = (torch.empty(size, dtype=torch.float32, device=q.device) for size in ((*shape, values.shape[3]), shape))
    inputs = inputs._replace(table=table.contiguous(), lengths=lengths.contiguous())  # as the kernel reads them
    launch(*inputs, parts, lse, window or NO_LIMIT, scale, softcap)()
    return _combine(parts, lse, sinks).to(q.dtype)


def num_splits(num_blocks: int, pages: int, multiprocessors: int) -> int:
    """Return into how many parts to split the keys, if there are `num_blocks` thread blocks without a split."""
    return max(1, min(pages, BLOCKS_PER_SM * multiprocessors // num_blocks))


def _combine(parts: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge softmaxes over parts of the keys: parts (B, splits, Hq, Dv), lse (B, splits, Hq). A sink is a part of value 0."""
    if sinks is not None:
        lse = torch.cat((lse, sinks.detach().to(lse.dtype).expand(len(lse), 1, -1)), 1)
    weights = lse.softmax(1)[:, : parts.shape[1], :, None]
    return (weights * parts).sum(1)


@torch.no_grad()
def _gather(inputs: PagedInputs, mask: Mask, **options: Any) -> Tensor:
    """Copy the pages of each sequence into contiguous memory and call `attention` per sequence."""
    q, keys, values, table, lengths = inputs
    out = q.new_empty((*q.shape[:2], values.shape[-1]))
    for index, length in enumerate(lengths.tolist()):
        pages = table[index, : -(-length // keys.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[None, :length] for x in (keys, values))
        out[index] = attention(q[index, None, None], k, v, mask=mask, **options)[0, 0]
    return out


def _check(inputs: PagedInputs, window: int | None, sinks: Tensor | None, backend: str) -> None:
    for name, x in inputs._asdict().items():
        check_tensor(name, x)
    q, keys, values, table, lengths = inputs
    if q.ndim != 3 or keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or q.shape[2] != keys.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}: give q (B, Hq, D), keys "
            "(pages, page, Hkv, D) and values (pages, page, Hkv, Dv)"
        )
    for name, x in (("keys", keys), ("values", values), ("table", table)):
        if 0 in x.shape[1:]:
            raise ValueError(f"{name} {tuple(x.shape)}: only the first dimension may be 0")
    check_head_dims({"q and keys": q, "values": values})
    if q.shape[1] % keys.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, keys have {keys.shape[2]}: q's heads must be a multiple of theirs")
    if table.ndim != 2 or len(table) != len(q) or lengths.shape != q.shape[:1] or {table.dtype, lengths.dtype} != {torch.int32}:
        raise ValueError(
            f"table {tuple(table.shape)} {table.dtype}, lengths {tuple(lengths.shape)} {lengths.dtype} for {len(q)} sequences: "
            "give int32 (B, max pages) and int32 (B,)"
        )
    if len({x.dtype for x in (q, keys, values)}) > 1 or len({x.device for x in inputs}) > 1:
        raise ValueError("q, keys and values must have one dtype, and be on one device with table and lengths: move them")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window={window} must be an int of at least 1, or None: it includes the query itself")
    if sinks is not None:
        check_sinks(q[:, None], sinks)
    if backend not in ("auto", "gather", "triton"):
        raise ValueError(f"backend={backend!r}: choose auto, gather or triton")
    page, uses_kernel = keys.shape[1], backend == "triton" or (backend == "auto" and q.device.type != "cpu")
    if uses_kernel and (obstacle := device_obstacle(q.device)):
        raise ValueError(f"backend={backend!r} {obstacle}: use backend='gather'")
    if uses_kernel and (q.dtype == torch.float64 or page < 16 or page & (page - 1)):
        raise ValueError(
            f"pages of {page} tokens in {q.dtype}: the kernel takes powers of two from 16 on, and no fp64; use backend='gather'"
        )
    if can_read(table) and can_read(lengths):
        _check_contents(table, lengths, len(keys), page)


def _check_contents(table: Tensor, lengths: Tensor, num_pages: int, page: int) -> None:
    """Validate numbers that the host can read. Those on a GPU are not read, because that needs a host sync."""
    limit = table.shape[1] * page
    for index, (length, pages) in enumerate(zip(lengths.tolist(), table.tolist(), strict=True)):
        if not 1 <= length <= limit:
            raise ValueError(f"lengths[{index}]={length} must be 1 to {limit}: the table has {table.shape[1]} pages of {page}")
        for number in pages[: -(-length // page)]:
            if not 0 <= number < num_pages:
                raise ValueError(f"table[{index}] has page {number}: pages must be >= 0 and < {num_pages}, their number")
