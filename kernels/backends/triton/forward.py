"""FlashAttention-2's forward in portable Triton: one tile of queries stays on the chip and streams the keys it can see.

Promises: any segments, interval masks, GQA, carry, softcap, dropout by coordinates; fp32, bf16, fp16; head dims 16 to 256.
The online softmax takes in the carry (out, lse), if there is one, as its last term, and divides once. Tiles that the mask
splits come first, in a loop of their own; the tiles seen whole follow without any compare. The latest query tiles, which see
most under a causal mask, start first so that the grid's tail is short.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.reference import INF
from ringspan.kernels.backends.triton.arguments import Tiles, of_mask_and_dropout, quads, rules, shared_out
from ringspan.kernels.backends.triton.common import (
    ANY_SIZE,
    LN2,
    LOG2E,
    exponents,
    head_offset,
    kept,
    keys_of,
    load_tile,
    position,
    row_count,
    rows_of,
    split_tile,
    store_tile,
    tile_range,
)
from ringspan.kernels.backends.triton.tile_sizes import tiles_for
from ringspan.kernels.runtime.launch import Arguments, Launch
from ringspan.kernels.segments import ascending_runs, in_pieces, num_rows
from ringspan.kernels.tensors import aligned, is_aligned


@triton.jit(**ANY_SIZE)
def attention_forward(
    q, k, v, out, lse, carry_out, carry_lse,
    q_strides, k_strides, v_strides, out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, group, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # heads fastest, so that the heads of a group read the same keys together; the last tile of queries first
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    n = row_count(q_at)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < n

    p_q = position(row, q_at)
    lo, hi = keys_of(p_q, mask, b)
    first_lo, first_hi = keys_of(position(tl.minimum(tile * BLOCK_M, n - 1), q_at), mask, b)
    last_lo, last_hi = keys_of(position(tl.minimum(tile * BLOCK_M + BLOCK_M, n) - 1, q_at), mask, b)
    HEAD: tl.constexpr = mask[0] is not None or mask[2] is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, 0, BLOCK_N, HEAD)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_tile = load_tile(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D)
    k += head_offset(b, h // group, k_strides)
    v += head_offset(b, h // group, v_strides)
    for i in range(0, full - begin + end - rest):
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, split_tile(i, begin, full, rest), p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, HEAD, True,
        )  # fmt: skip
    for i in range(full, rest):
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, i, p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, HEAD, False,
        )  # fmt: skip

    before = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if carry_lse is not None:
        # The carry joins last, in fp32. Had it come first, its lse and not a score would be the rows' largest exponent, and
        # the largest weight of a row would be rounded to 16 bits where it can be an exact 1.
        carry_lse += b * carry_lse_strides[0] + h * carry_lse_strides[1]
        before = tl.load(carry_lse + row.to(tl.int64) * carry_lse_strides[2], mask=row_ok, other=float("-inf"))
        base = before * LOG2E
        top = tl.maximum(m, base)
        top_safe = tl.where(top == float("-inf"), 0.0, top)
        # exactly 1 where the carry is on top: fused into one operation, the subtraction would leave base's rounding error
        weight = tl.where(base == top_safe, 1.0, tl.exp2(base - top_safe))
        shrink = tl.exp2(m - top_safe)
        total = total * shrink + weight
        acc *= shrink[:, None]
        if carry_out is not None:
            carry_tile = load_tile(
                carry_out + head_offset(b, h, carry_out_strides), row, carry_out_strides, row_ok, DV, BLOCK_DV
            )
            acc += weight[:, None] * carry_tile
        m = top
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    acc = tl.where(empty[:, None], 0.0, acc / divisor[:, None])
    # a row that this block gave nothing keeps its lse to the last bit, which base 2 and back would not
    stats = tl.where((m == before * LOG2E) & (total == 1), before, m * LN2 + tl.log(divisor))
    stats = tl.where(empty, float("-inf"), stats)
    tl.store(lse + b * lse_strides[0] + h * lse_strides[1] + row.to(tl.int64) * lse_strides[2], stats, mask=row_ok)
    store_tile(out + head_offset(b, h, out_strides), acc, row, out_strides, row_ok, DV, BLOCK_DV, False)


@triton.jit
def attend(
    acc, m, total, q_tile, k, v, tile, p_q, lo, hi, b, h, k_strides, v_strides, mask, drop, k_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over a tile of keys. SPLIT: the mask goes through it."""
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key_ok = None
    if SPLIT:
        key_ok = rows_of(key, k_at, mask, b)
    k_tile = load_tile(k, key, k_strides, key_ok, D, BLOCK_D)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p_k = position(key, k_at)
    if SPLIT:
        visible = (p_k[None, :] <= hi[:, None]) & key_ok[None, :]
        if HEAD:
            visible &= p_k[None, :] >= lo[:, None]
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = m_new
    if SPLIT:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: exp2(-inf - 0) is 0, not NaN
    p = tl.exp2(s * factor - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    total = total * shrink + tl.sum(p, 1)
    if drop is not None:
        p = tl.where(kept(drop, b, h, p_q, p_k, QUADS), p / drop[2], 0.0)
    v_tile = load_tile(v, key, v_strides, key_ok, DV, BLOCK_DV)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return acc, m_new, total


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    block = block.read_from(aligned(block.q), aligned(block.k), aligned(block.v))
    for call in forward_launches(block, readable(carry), out, lse):
        call()


def readable(carry: Carry | None) -> Carry | None:
    """The carry, with a copy of its out where kernels could not read it."""
    return carry if carry is None or carry[0] is None or is_aligned(carry[0]) else (aligned(carry[0]), carry[1])


def forward_launches(
    block: Block,
    carry: Carry | None,
    out: Tensor,
    lse: Tensor,
    launch: Callable[..., Launch] | None = None,
    most_keys: int | None = None,
) -> Iterator[Launch]:
    """One launch, unless a list has more segments than a kernel takes, or there are more keys than one launch is to go through:
    then queries split and keys carry on, in fp32. If out is of another type the sums have memory of their own, or that of a
    carry that is used up."""
    launch = launch or _launch
    if block.is_one_run and (most_keys is None or block.k.shape[1] <= most_keys):
        yield launch(block, carry, out, lse)
        return
    n = num_rows(block.q_at)
    carry_out, carry_lse = carry or (None, None)
    out[:, n:], lse[:, :, n:] = 0, -INF
    if not block.k_at:
        out[:, :n] = 0 if carry_out is None else carry_out[:, :n]
        lse[:, :, :n] = -INF if carry_lse is None else carry_lse[:, :, :n]
        return
    key_runs = ascending_runs(block.k_at)
    if most_keys is not None:
        key_runs = tuple(piece for run in key_runs for piece in in_pieces(run, most_keys))
    for queries in ascending_runs(block.q_at):
        rows = queries[0]
        so_far = carry if carry is None else (carry_out if carry_out is None else carry_out[:, rows], carry_lse[:, :, rows])
        sums: Tensor | None = None
        for keys in key_runs:
            target = out[:, rows], lse[:, :, rows]
            if keys is not key_runs[-1] and out.dtype != lse.dtype:  # more keys follow
                if sums is None:
                    sums = carry_out[:, rows] if used_up(carry, lse) else torch.empty_like(target[0], dtype=lse.dtype)
                target = sums, target[1]
            yield launch(block.part(queries, keys), so_far, *target)
            so_far = target


def used_up(carry: Carry | None, lse: Tensor) -> bool:
    """Whether lse is written over the carry's, whose out then says nothing any more, and can be written to."""
    if carry is None or carry[0] is None:
        return False
    out, before = carry
    return is_aligned(out) and 0 not in out.stride() and before.data_ptr() == lse.data_ptr() and before.stride() == lse.stride()


def _launch(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Launch:
    carry_out, carry_lse = carry or (None, None)
    tensors = dict(q=block.q, k=block.k, v=block.v, out=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse)
    tiles = tiles_for("forward", block.q, block.v, extras=bool(block.dropout or block.softcap))
    how = rules(block, tiles) | dict(QUADS=quads(block.k_at, tiles["BLOCK_N"]))
    return Launch(attention_forward, _arguments, tensors | of_mask_and_dropout(block), how)


def _arguments(tiles: Tiles, **given: Any) -> Arguments:
    group = given["q"].shape[2] // given["k"].shape[2]
    no_carry = dict(carry_out_strides=None, carry_lse_strides=None)  # stays so where there is none
    return shared_out("q", "BLOCK_M", tiles, no_carry | given | dict(group=group))
