"""Flash-Decoding in portable Triton: one thread block per (sequence, KV head, split of the sequence's pages).

The query heads that share a KV head are the rows of one tile, so keys are loaded once for all of them. The tile has at least
16 rows, the minimum of a tensor-core matmul; the kernel is bound by memory bandwidth. It reads the page table one page at a
time. Each split writes its own out and lse; the caller merges the splits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.triton.common import LN2, exponents
from ringspan.kernels.runtime.launch import Arguments, Launch


class QueryStrides(NamedTuple):
    """Strides of q."""

    sequence: int
    head: int
    column: int


class PageStrides(NamedTuple):
    """Strides of pages of keys or values."""

    page: int
    slot: int
    head: int
    column: int


class SplitStrides(NamedTuple):
    """Strides of out and lse; columns and, in lse, heads are contiguous."""

    sequence: int
    split: int
    head: int


@triton.jit(do_not_specialize=("kv_heads", "group", "splits", "window", "table_stride"))
def paged_forward(
    q, keys, values, table, lengths, out, lse,
    q_strides, k_strides, v_strides, table_stride, out_strides, lse_strides,
    kv_heads, group, window, scale, softcap, splits,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one split of a sequence's keys, for the query heads of one KV head."""
    sequence, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, head = (sequence // kv_heads).to(tl.int64), (sequence % kv_heads).to(tl.int64)
    length = tl.load(lengths + b)
    first_key = tl.maximum(0, length - window)
    # this split's range of the pages that hold visible keys
    first_page = first_key // PAGE
    num_pages = tl.cdiv(tl.cdiv(length, PAGE) - first_page, splits)
    begin = first_page + split * num_pages
    end = tl.minimum(begin + num_pages, tl.cdiv(length, PAGE))

    row = tl.arange(0, GROUP)
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads = head * group + row
    queries = q + b * q_strides.sequence + heads[:, None] * q_strides.head + columns[None, :] * q_strides.column
    q_tile = tl.load(queries, mask=(row < group)[:, None] & (columns < D)[None, :], other=0.0)
    keys += head * k_strides.head
    values += head * v_strides.head

    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_DV], tl.float32)
    for page in range(begin, end):
        page_index = tl.load(table + b * table_stride + page).to(tl.int64)
        slot = tl.arange(0, PAGE)
        position = page * PAGE + slot
        visible = (position >= first_key) & (position < length)
        k_offsets = page_index * k_strides.page + slot[:, None] * k_strides.slot + columns[None, :] * k_strides.column
        k_tile = tl.load(keys + k_offsets, mask=visible[:, None] & (columns < D)[None, :], other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        s, factor = exponents(s, scale, softcap, True)
        s = tl.where(visible[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)  # each page of the range holds a visible key, so m_new is finite
        p = tl.exp2(s * factor - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, 1)
        v_offsets = page_index * v_strides.page + slot[:, None] * v_strides.slot + v_columns[None, :] * v_strides.column
        v_tile = tl.load(values + v_offsets, mask=visible[:, None] & (v_columns < DV)[None, :], other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        m = m_new

    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse_row = tl.where(empty, float("-inf"), m * LN2 + tl.log(tl.where(empty, 1.0, total)))
    out_offsets = b * out_strides.sequence + split * out_strides.split + heads[:, None] * out_strides.head + v_columns[None, :]
    tl.store(out + out_offsets, acc, mask=(row < group)[:, None] & (v_columns < DV)[None, :])
    tl.store(lse + b * lse_strides.sequence + split * lse_strides.split + heads, lse_row, mask=row < group)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> Launch:
    """Return the launch for one query token per sequence; it writes `out` and `lse`.

    Args:
        q: (B, Hq, D).
        keys, values: (pages, page size, Hkv, D) and (pages, page size, Hkv, Dv).
        table, lengths: int32 (B, pages of a sequence) and (B,).
        out, lse: fp32 (B, splits, Hq, Dv) and (B, splits, Hq).
        window: Number of last keys that are visible.
        scale, softcap: Of the scores; softcap 0 is none.
    """
    tensors = dict(q=q, keys=keys, values=values, table=table, lengths=lengths, out=out, lse=lse)
    return Launch(paged_forward, _arguments, tensors, dict(window=window, scale=scale, softcap=softcap or None))


def _arguments(**args: Any) -> Arguments:
    q, values, out = args["q"], args["values"], args["out"]
    (batch, heads, width), (_, page, kv_heads, v_width), splits = q.shape, values.shape, out.shape[1]
    args |= dict(q_strides=QueryStrides(*q.stride()), k_strides=PageStrides(*args["keys"].stride()))
    args |= dict(v_strides=PageStrides(*values.stride()), out_strides=SplitStrides(*out.stride()[:3]))
    args |= dict(lse_strides=SplitStrides(*args["lse"].stride()), table_stride=args["table"].stride(0))
    args |= dict(kv_heads=kv_heads, group=heads // kv_heads, splits=splits)
    args |= dict(D=width, DV=v_width, BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(v_width))
    args |= dict(GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), PAGE=page, num_warps=4)
    return batch * kv_heads * splits, args
