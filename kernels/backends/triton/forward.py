"""FlashAttention-2's forward in portable Triton: each thread block owns one tile of queries and streams its visible keys.

    acc, m, total = 0, -inf, 0
    for each partial tile of keys (masked), then for each full tile (no mask):
        s = q kᵀ · scale                        m' = max(m, rowmax(s))
        acc, total = acc · 2^(m - m') + 2^(s - m') v, total · 2^(m - m') + rowsum(2^(s - m'))
    merge the carry (out, lse) of earlier blocks as the last term; out = acc / total, lse = m + log(total)

Supports all segments, interval masks, GQA, carry, softcap and dropout by coordinates; fp32, bf16, fp16; head dims 16 to 256.
The last query tiles, which see most keys under a causal mask, start first: the last wave is short.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.triton.arguments import (
    Tiles,
    common_arguments,
    grid_arguments,
    keys_in_quads,
    mask_and_dropout_arguments,
)
from ringspan.kernels.backends.triton.common import (
    ANY_SIZE,
    LN2,
    LOG2E,
    accumulate_chunks,
    bounded_position,
    dot_transposed,
    dropout_keep,
    exponents,
    head_offset,
    last_position,
    load_chunks,
    partial_tile,
    position,
    row_count,
    scale_chunks,
    store_chunks,
    tile_range,
    valid_rows,
    visible_keys,
    zero_chunks,
)
from ringspan.kernels.backends.triton.tile_sizes import tiles_for
from ringspan.kernels.runtime.launch import Arguments, Launch
from ringspan.kernels.segments import ascending_ranges, num_rows
from ringspan.kernels.tensors import INF, aligned, is_aligned


@triton.jit(**ANY_SIZE)
def attention_forward(
    q, k, v, out, lse, carry_out, carry_lse,
    q_strides, k_strides, v_strides, out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, group, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one tile of queries."""
    # heads vary fastest: the query heads of a KV head read the same keys concurrently; the last query tile starts first
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    n = row_count(q_at)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < n

    p_q = position(row, q_at)
    lo, hi = visible_keys(p_q, mask, b)
    hi = tl.minimum(hi, last_position(k_at))
    first_lo, first_hi = visible_keys(position(tl.minimum(tile * BLOCK_M, n - 1), q_at), mask, b)
    last_lo, last_hi = visible_keys(position(tl.minimum(tile * BLOCK_M + BLOCK_M, n) - 1, q_at), mask, b)
    LOW_BOUND: tl.constexpr = mask.left is not None or mask.starts is not None
    begin, full_begin, full_end, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, 0, BLOCK_N, LOW_BOUND)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, BLOCK_DV, TAIL_DV)
    q_tile = load_chunks(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D, TAIL_D)
    k += head_offset(b, h // group, k_strides)
    v += head_offset(b, h // group, v_strides)
    for i in range(0, full_begin - begin + end - full_end):
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, partial_tile(i, begin, full_begin, full_end), p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, LOW_BOUND, True,
        )  # fmt: skip
    for i in range(full_begin, full_end):
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, i, p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, LOW_BOUND, False,
        )  # fmt: skip

    carry_lse_row = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if carry_lse is not None:
        # Merged last, in fp32. Merged first, the carry's lse instead of a score would be the row's largest exponent, and
        # the row's largest weight would be rounded to 16 bits instead of being exactly 1.
        carry_lse += b * carry_lse_strides.batch + h * carry_lse_strides.head
        carry_lse_row = tl.load(carry_lse + row.to(tl.int64) * carry_lse_strides.row, mask=row_ok, other=float("-inf"))
        carry_exponent = carry_lse_row * LOG2E
        new_max = tl.maximum(m, carry_exponent)
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        # exactly 1 where the carry has the maximum: in a fused multiply-add the rounding error of carry_exponent would remain
        weight = tl.where(carry_exponent == safe_max, 1.0, tl.exp2(carry_exponent - safe_max))
        rescale = tl.exp2(m - safe_max)
        total = total * rescale + weight
        acc = scale_chunks(acc, rescale[:, None])
        if carry_out is not None:
            carry_out += head_offset(b, h, carry_out_strides)
            carry = load_chunks(carry_out, row, carry_out_strides, row_ok, DV, BLOCK_DV, TAIL_DV)
            acc = add_chunks(acc, scale_chunks(carry, weight[:, None]))
        m = new_max
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    acc = divide_rows(acc, empty, divisor)
    # a row without a visible key keeps the carry's lse bit for bit, which conversion to base 2 and back would not
    lse_row = tl.where((m == carry_lse_row * LOG2E) & (total == 1), carry_lse_row, m * LN2 + tl.log(divisor))
    lse_row = tl.where(empty, float("-inf"), lse_row)
    tl.store(lse + b * lse_strides.batch + h * lse_strides.head + row.to(tl.int64) * lse_strides.row, lse_row, mask=row_ok)
    store_chunks(out + head_offset(b, h, out_strides), acc, row, out_strides, row_ok, DV, BLOCK_DV, False)


@triton.jit
def attend(
    acc, m, total, q_tile, k, v, tile, p_q, lo, hi, b, h, k_strides, v_strides, mask, drop, k_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRESCALED: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, LOW_BOUND: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over a tile of keys. PARTIAL: the tile needs the mask."""
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key_ok = None
    if PARTIAL:
        key_ok = valid_rows(key, k_at, mask, b)
    k_tile = load_chunks(k, key, k_strides, key_ok, D, BLOCK_D, TAIL_D)
    s = dot_transposed(q_tile, k_tile, PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p_k = bounded_position(key, k_at) if PARTIAL else position(key, k_at)
    if PARTIAL:
        visible = p_k[None, :] <= hi[:, None]
        if LOW_BOUND:
            visible &= p_k[None, :] >= lo[:, None]
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = m_new
    if PARTIAL:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key yet: exp2(-inf - 0) is 0, not NaN
    p = tl.exp2(s * factor - m_safe[:, None])
    rescale = tl.exp2(m - m_safe)
    total = total * rescale + tl.sum(p, 1)
    if drop is not None:
        p = tl.where(dropout_keep(drop, b, h, p_q, p_k, QUADS), p / drop.keep_rate, 0.0)
    v_tile = load_chunks(v, key, v_strides, key_ok, DV, BLOCK_DV, TAIL_DV)
    acc = accumulate_chunks(p, v_tile, scale_chunks(acc, rescale[:, None]), PRECISION)
    return acc, m_new, total


@triton.jit
def add_chunks(left, right):
    """Return left + right."""
    if len(left) == 1:
        return (left[0] + right[0],)
    else:
        return left[0] + right[0], left[1] + right[1]


@triton.jit
def divide_rows(acc, empty, divisor):
    """Return acc / divisor; 0 in empty rows."""
    first = tl.where(empty[:, None], 0.0, acc[0] / divisor[:, None])
    if len(acc) == 1:
        return (first,)
    else:
        return first, tl.where(empty[:, None], 0.0, acc[1] / divisor[:, None])


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    """Write the block's out (B, S, Hq, Dv) and lse (B, Hq, S), continuing the carry's softmax (see block.py)."""
    block = block.with_tensors(aligned(block.q), aligned(block.k), aligned(block.v))
    for launch in forward_launches(block, readable_carry(carry), out, lse):
        launch()


def readable_carry(carry: Carry | None) -> Carry | None:
    """Return the carry; its out is copied if kernels cannot read it."""
    return carry if carry is None or carry[0] is None or is_aligned(carry[0]) else (aligned(carry[0]), carry[1])


def forward_launches(
    block: Block,
    carry: Carry | None,
    out: Tensor,
    lse: Tensor,
    make_launch: Callable[..., Launch] | None = None,
) -> Iterator[Launch]:
    """Yield the launches of a block's forward, in order.

    One launch suffices if the block is one ascending range. Otherwise each range of queries runs one launch per range of keys,
    and each launch is the carry of the next, in fp32. If `out` is not fp32, these carries use a temporary buffer, or the input
    carry's memory if the caller no longer needs it.

    Args:
        out, lse: Outputs, (B, S, Hq, Dv) and (B, Hq, S).
        make_launch: Makes the launch of one range; the portable kernel's by default.
    """
    make_launch = make_launch or _launch
    if block.is_single_range:
        yield make_launch(block, carry, out, lse)
        return
    n = num_rows(block.q_at)
    carry_out, carry_lse = carry or (None, None)
    out[:, n:], lse[:, :, n:] = 0, -INF
    if not block.k_at:
        out[:, :n] = 0 if carry_out is None else carry_out[:, :n]
        lse[:, :, :n] = -INF if carry_lse is None else carry_lse[:, :, :n]
        return
    key_ranges = ascending_ranges(block.k_at)
    for queries in ascending_ranges(block.q_at):
        rows = queries[0]
        running_carry: Carry | None = None
        if carry_lse is not None:
            running_carry = None if carry_out is None else carry_out[:, rows], carry_lse[:, :, rows]
        fp32_out: Tensor | None = None
        for keys in key_ranges:
            target = out[:, rows], lse[:, :, rows]
            if keys is not key_ranges[-1] and out.dtype != lse.dtype:  # more keys follow
                if fp32_out is None:
                    reusable = reusable_out(carry, lse)
                    fp32_out = torch.empty_like(target[0], dtype=lse.dtype) if reusable is None else reusable[:, rows]
                target = fp32_out, target[1]
            yield make_launch(block.part(queries, keys), running_carry, *target)
            running_carry = target


def reusable_out(carry: Carry | None, lse: Tensor) -> Tensor | None:
    """Return the carry's out if a kernel may overwrite it: lse overwrites the carry's lse, and out is writable."""
    if carry is None or carry[1].data_ptr() != lse.data_ptr() or carry[1].stride() != lse.stride():
        return None
    out = carry[0]
    return out if out is not None and is_aligned(out) and 0 not in out.stride() else None


def _launch(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Launch:
    carry_out, carry_lse = carry or (None, None)
    tensors = dict(q=block.q, k=block.k, v=block.v, out=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse)
    tiles = tiles_for("forward", block.q, block.v, extras=bool(block.dropout or block.softcap))
    options = common_arguments(block, tiles) | dict(QUADS=keys_in_quads(block, tiles["BLOCK_N"]))
    return Launch(attention_forward, _arguments, tensors | mask_and_dropout_arguments(block), options)


def _arguments(tiles: Tiles, **args: Any) -> Arguments:
    group = args["q"].shape[2] // args["k"].shape[2]
    no_carry = dict(carry_out_strides=None, carry_lse_strides=None)  # for a launch without carry
    return grid_arguments("q", "BLOCK_M", tiles, no_carry | args | dict(group=group))
