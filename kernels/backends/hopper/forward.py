"""The forward for Hopper (sm_90) in Gluon: a producer warp loads tiles by TMA, two or three consumer warpgroups compute.

    producer (1 warp)                  shared memory                 each consumer (1 warpgroup, 64 queries)
    publish_tile  ─── next_full ───▶   9 int32      × 2         ──▶  receive_tile: rows, visible tiles of keys
    TMA           ───  q_full   ───▶   q            × Q_STAGES  ──▶  s(j) = q k(j)ᵀ, then mask, p(j) = softmax
    TMA           ───  kv_full  ───▶   k(j), v(j-1) × STAGES    ──▶  acc += p(j-1) v(j-1)
    wait_free     ◀── q/kv/next_free ───────────────────────────     arrive; out, lse to memory at the end of a tile

A K/V slot holds what is multiplied concurrently. With two consumers the softmax of tile j overlaps the matmul with v(j-1);
three consumers overlap each other instead. The next query tile's first matmul overlaps the store of out.
The grid is persistent: one thread block per SM takes query tiles, longest first, from an atomic counter, so all thread blocks
end together under any mask. The producer computes positions and visible keys (forward_producer.py).
Supports what the portable forward does, except fp32, dropout and scales below 1e-30.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.hopper.arguments import forward_arguments, max_keys_per_launch
from ringspan.kernels.backends.hopper.common import (
    accumulator_layout,
    arrive,
    make_barriers,
    nth_tile,
    tma_readable,
    wait_full,
    zero_padding,
)
from ringspan.kernels.backends.hopper.forward_producer import produce, receive_tile
from ringspan.kernels.backends.hopper.online_softmax import (
    LANE_LAYOUT,
    NO_REFERENCE,
    apply_mask,
    as_operand,
    compute_weights,
    scale_rows,
)
from ringspan.kernels.backends.hopper.tile_sizes import tiles_for
from ringspan.kernels.backends.triton.arguments import common_arguments, mask_argument
from ringspan.kernels.backends.triton.common import ANY_SIZE, LN2, LOG2E, position, row_count, rows_below, visible_keys
from ringspan.kernels.backends.triton.forward import forward_launches, readable_carry
from ringspan.kernels.mask import Bounds
from ringspan.kernels.runtime.call_cache import Replay
from ringspan.kernels.runtime.launch import CachedLaunch, Launch
from ringspan.kernels.runtime.triton_compat import tma_store

# Upper limit of a carry's weight. Below the limit the row's reference is the largest score of its first tile, so the weight
# of that score is exactly 1, as without a carry, and is not rounded to 16 bits. At the limit these scores are negligible.
LOG2_MAX_CARRY_WEIGHT = gl.constexpr(64.0)
MAX_CARRY_WEIGHT = gl.constexpr(2.0**64)


@gluon.jit(**ANY_SIZE)
def attention_forward(
    q, k, v, out, out_tiles, lse, carry_out, carry_lse, work_counter,
    out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, concurrent_heads, scale, softcap,
    DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    """Write out and lse, persistently over all query tiles.

    q, k, v and out_tiles are TMA descriptors of (batch, head, row, column). Blocks of q and out_tiles have 64 rows; a block
    of an fp32 out_tiles has half of the columns. Without out_tiles, and where a tile ends within a block, registers are
    stored to out directly. num_tiles counts work pieces per head (forward_producer.py).
    """
    q_tile = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS, 1, 1, 64, BLOCK_D], q.layout)
    k_tile = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v.layout)
    o_tile = q_tile  # not read without out_tiles
    if out_tiles is not None:
        o_tile = gl.allocate_shared_memory(
            out_tiles.dtype, [CONSUMERS, 1, 1, 64, out_tiles.block_type.shape[3]], out_tiles.layout
        )
    next_tile = gl.allocate_shared_memory(gl.int32, [32, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # 0 … BLOCK_N - 1 in shared memory: the compiler would keep constants in registers, which the loop needs
    columns = gl.allocate_shared_memory(gl.int32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns.store(gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0])))
    READERS: gl.constexpr = CONSUMERS if IN_STEP else CONSUMERS * 128
    q_full, q_free = make_barriers(Q_STAGES, 1, READERS)
    kv_full, kv_free = make_barriers(STAGES, 1, READERS)
    next_full, next_free = make_barriers(2, 1, READERS)
    tiles = (q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns)
    queue = (next_tile, next_full, next_free)
    work = (mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, concurrent_heads)
    outputs = (
        out, out_tiles, lse, carry_out, carry_lse, out_strides, lse_strides, carry_out_strides, carry_lse_strides,
        scale, softcap,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (tiles, queue, work, outputs, 0, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 1, DV, CONSUMERS, IN_STEP)),
            (produce, (q, k, v, tiles, queue, work_counter, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (tiles, queue, work, outputs, 0, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 1, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 2, DV, CONSUMERS, IN_STEP)),
            (produce, (q, k, v, tiles, queue, work_counter, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


@gluon.jit
def consume(
    tiles, queue, work, outputs, CONSUMER_ID: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    """Role of consumer warpgroup CONSUMER_ID: 64 queries of each query tile of the thread block."""
    q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns = tiles
    STAGES: gl.constexpr = k_tile.shape[0]
    BLOCK_N: gl.constexpr = k_tile.shape[3]
    BLOCK_D: gl.constexpr = k_tile.shape[4]
    BLOCK_DV: gl.constexpr = v_tile.shape[4]
    Q_STAGES: gl.constexpr = q_tile.shape[0] // CONSUMERS
    mask, q_at, k_at, _num_tiles, _num_sequences, _num_heads, _group, _concurrent_heads = work
    scale, softcap = outputs[9], outputs[10]
    # with documents a tile's last rows may belong to the next tile, and a thread block may have no tile
    DOCUMENTS: gl.constexpr = mask[2] is not None
    S_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Without a mask the producer rotates the order of the full tiles, so `tile` is not the loaded tile. It only distinguishes
    # full tiles from a last partial one.
    UNMASKED: gl.constexpr = mask[0] is None and mask[1] is None and mask[2] is None
    HAS_CARRY: gl.constexpr = outputs[4] is not None
    OVERLAP: gl.constexpr = CONSUMERS == 2  # softmax with the own matmul with v; three consumers overlap each other
    gl.static_assert(STAGES > 1 or not OVERLAP, "the wait for a slot overlaps the use of another one: STAGES must exceed 1")
    zero_scores = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    i = 0
    kv_count = 0  # K/V slots received
    tile_end, b, h, first_row, begin, full_begin, full_end, end, origin = receive_tile(queue, i, DOCUMENTS, IN_STEP)
    row, lo, hi = key_interval(first_row + CONSUMER_ID * 64, origin, b, mask, q_at, k_at, ROWS)
    if (tile_end != 0) if DOCUMENTS else True:
        wait_full(q_full, i, Q_STAGES)
    q_slot = i
    slot = wait_full(kv_full, kv_count, STAGES)
    s = qk_matmul(q_tile.index(q_slot * CONSUMERS + CONSUMER_ID), k_tile.index(slot), zero_scores, BLOCK_D, BLOCK_N)
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(kv_free.index(slot), IN_STEP)
    while tile_end != 0:
        acc = gl.zeros([64, BLOCK_DV], gl.float32, O_LAYOUT)
        min_reference = gl.full([64, 4], NO_REFERENCE, gl.float32, LANE_LAYOUT)
        if HAS_CARRY:
            row_ok = row < (tile_end if DOCUMENTS else row_count(q_at))
            acc, carry_exponent = load_carry(outputs, b, h, row, row_ok, acc, DV)
            min_reference = gl.maximum(carry_exponent - LOG2_MAX_CARRY_WEIGHT, min_reference)
        q_rows = q_tile.index(q_slot * CONSUMERS + CONSUMER_ID)

        tile = nth_tile(0, begin, full_begin, full_end, end)
        s, factor = apply_mask(s, tile, True, lo, hi, mask, columns, scale, softcap, BLOCK_N)
        weights, reference, total, _rescale, needs_rescale = compute_weights(s, factor, min_reference, v_tile.dtype, True)
        if HAS_CARRY:  # after the first softmax, which covers the latency of the carry's loads
            weight = gl.where(
                (reference == min_reference) & (min_reference < carry_exponent),
                MAX_CARRY_WEIGHT,
                gl.exp2(carry_exponent - reference),
            )
            total += weight / 4  # each of a row's four threads adds a quarter
            if outputs[3] is not None:
                acc = scale_rows(acc, weight, needs_rescale)
        kv_count += 1
        slot = wait_full(kv_full, kv_count, STAGES)
        num_partial = full_begin - begin + end - full_end
        for j in range(1, end - begin):
            s = qk_matmul(q_rows, k_tile.index(slot), zero_scores, BLOCK_D, BLOCK_N)
            acc = pv_matmul(weights, v_tile.index(slot), acc)
            s = warpgroup_mma_wait(1, deps=(s,))
            tile = nth_tile(j, begin, full_begin, full_end, end)
            is_partial = j < num_partial if not UNMASKED else False  # a last partial tile is processed first
            s, factor = apply_mask(s, tile, is_partial, lo, hi, mask, columns, scale, softcap, BLOCK_N)
            prev_slot = slot
            kv_count += 1
            if OVERLAP:
                next_weights, reference, partial_sum, rescale, needs_rescale = compute_weights(
                    s, factor, reference, v_tile.dtype, False
                )
                # This wait is a branch, across which the compiler does not move the matmul wait below. Otherwise it would move
                # that wait before the softmax, and the softmax would not overlap the matmul with v.
                slot = wait_full(kv_full, kv_count, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            arrive(kv_free.index(prev_slot), IN_STEP)
            if not OVERLAP:  # the registers of the previous weights are free now
                next_weights, reference, partial_sum, rescale, needs_rescale = compute_weights(
                    s, factor, reference, v_tile.dtype, False
                )
            acc = scale_rows(acc, rescale, needs_rescale)
            total = total * rescale + partial_sum
            weights = next_weights
            if not OVERLAP:
                slot = wait_full(kv_full, kv_count, STAGES)
        arrive(q_free.index(q_slot), IN_STEP)
        # The last matmul with v overlaps the next query tile's first scores. After the last tile these scores are computed from
        # stale shared memory and discarded.
        i += 1
        prev_b, prev_h, prev_first_row, prev_row, prev_tile_end = b, h, first_row + CONSUMER_ID * 64, row, tile_end
        tile_end, b, h, first_row, begin, full_begin, full_end, end, origin = receive_tile(queue, i, DOCUMENTS, IN_STEP)
        row, lo, hi = key_interval(first_row + CONSUMER_ID * 64, origin, b, mask, q_at, k_at, ROWS)
        if tile_end != 0:
            wait_full(q_full, i, Q_STAGES)
        q_slot = i % Q_STAGES
        acc = pv_matmul(weights, v_tile.index(slot), acc)
        s = qk_matmul(q_tile.index(q_slot * CONSUMERS + CONSUMER_ID), k_tile.index(slot), zero_scores, BLOCK_D, BLOCK_N)
        acc = warpgroup_mma_wait(1, deps=(acc,))

        store_result(
            acc, reference, total, prev_b, prev_h, prev_first_row, prev_row, prev_tile_end, row_count(q_at),
            outputs, o_tile.index(CONSUMER_ID), DOCUMENTS, DV, BLOCK_DV, O_LAYOUT,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s,))
        arrive(kv_free.index(slot), IN_STEP)

    if outputs[1] is not None:
        tma.store_wait(0)


@gluon.jit
def key_interval(first_row, origin, b, mask, q_at, k_at, ROWS: gl.constexpr):
    """Return 64 rows of q, and for each the first and last visible row of k, counted from `origin`."""
    row = first_row + gl.arange(0, 64, ROWS)
    lo, hi = visible_keys(position(row, q_at), mask, b)
    return row, rows_below(lo, k_at) - origin, rows_below(hi + 1, k_at) - 1 - origin


@gluon.jit
def load_carry(outputs, b, h, row, row_ok, acc, DV: gl.constexpr):
    """Return the carry, which initialises a row: its out, and its lse in base 2."""
    carry_out, carry_lse, carry_out_strides, carry_lse_strides = outputs[3], outputs[4], outputs[7], outputs[8]
    b, h = b.to(gl.int64), h.to(gl.int64)
    lse_row = gl.load(
        carry_lse + b * carry_lse_strides[0] + h * carry_lse_strides[1] + row.to(gl.int64) * carry_lse_strides[2],
        mask=row_ok, other=float("-inf"),
    )  # fmt: skip
    if carry_out is not None:
        O_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        is_valid = gl.convert_layout(row_ok, O_ROWS)[:, None] & (column < DV)[None, :]
        pointers = carry_out + b * carry_out_strides[0] + h * carry_out_strides[2]
        o_row = gl.convert_layout(row, O_ROWS).to(gl.int64)
        acc = gl.load(pointers + o_row[:, None] * carry_out_strides[1] + column[None, :], mask=is_valid, other=0.0)
    carry_exponent = gl.convert_layout(lse_row * LOG2E, gl.SliceLayout(1, LANE_LAYOUT), assert_trivial=True)[:, None]
    return acc, carry_exponent + gl.full([64, 4], 0.0, gl.float32, LANE_LAYOUT)


@gluon.jit
def store_result(
    acc, reference, total, b, h, first_row, row, tile_end, num_rows, outputs, o_tile,
    DOCUMENTS: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Divide by the softmax sum; store rows of out and lse before `tile_end`."""
    out, out_tiles, lse, _carry_out, carry_lse, out_strides, lse_strides, _carry_out_strides, carry_lse_strides = outputs[:9]
    b_wide, h_wide = b.to(gl.int64), h.to(gl.int64)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # `tile_end` selects the same rows without documents, but compiles to other code, which is not timed
    row_ok = row < (tile_end if DOCUMENTS else num_rows)
    total = gl.convert_layout(gl.sum(total, 1), row.type.layout, assert_trivial=True)
    reference_row = gl.convert_layout(gl.max(reference, 1), row.type.layout, assert_trivial=True)
    empty = total == 0
    divisor = gl.where(empty, 1.0, total)
    lse_row = gl.where(empty, float("-inf"), reference_row * LN2 + gl.log(divisor))
    if carry_lse is not None:  # a row without a visible key keeps the carry's lse bit for bit
        pointers = carry_lse + b_wide * carry_lse_strides[0] + h_wide * carry_lse_strides[1]
        carry_lse_row = gl.load(pointers + row.to(gl.int64) * carry_lse_strides[2], mask=row_ok, other=float("-inf"))
        lse_row = gl.where(total == MAX_CARRY_WEIGHT, carry_lse_row, lse_row)
    pointers = lse + b_wide * lse_strides[0] + h_wide * lse_strides[1]
    gl.store(pointers + row.to(gl.int64) * lse_strides[2], lse_row, mask=row_ok)
    acc *= gl.convert_layout(gl.where(empty, 0.0, 1 / divisor), O_ROWS)[:, None]
    column = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, O_LAYOUT))
    o_row = gl.convert_layout(row, O_ROWS).to(gl.int64)
    o_ok = gl.convert_layout(row_ok, O_ROWS)[:, None] & (column < DV)[None, :]
    out += b_wide * out_strides[0] + h_wide * out_strides[2]
    if out_tiles is None:
        gl.store(out + o_row[:, None] * out_strides[1] + column[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
    elif DOCUMENTS:
        if (first_row + 64 <= tile_end) | (tile_end == num_rows):
            store_out(acc, out_tiles, b, h, first_row, o_tile, BLOCK_DV)
        else:
            gl.store(out + o_row[:, None] * out_strides[1] + column[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
    else:
        store_out(acc, out_tiles, b, h, first_row, o_tile, BLOCK_DV)


@gluon.jit
def store_out(rows, out_tiles, b, h, first_row, o_tile, BLOCK_DV: gl.constexpr):
    """Store rows of out by TMA, in two halves if the buffer holds only half. The TMA drops rows past the end of the tensor."""
    COLUMNS: gl.constexpr = o_tile.shape[3]
    if COLUMNS == BLOCK_DV:
        store_out_columns(rows, out_tiles, b, h, first_row, 0, o_tile)
    else:
        left, right = rows.reshape([64, 2, COLUMNS]).permute((0, 2, 1)).split()
        store_out_columns(left, out_tiles, b, h, first_row, 0, o_tile)
        store_out_columns(right, out_tiles, b, h, first_row, COLUMNS, o_tile)


@gluon.jit
def store_out_columns(columns, out_tiles, b, h, first_row, first_column, o_tile):
    """Wait until the TMA has read the buffer, refill it and start the next store."""
    tma.store_wait(0)
    o_tile.reshape([o_tile.shape[2], o_tile.shape[3]]).store(columns.to(out_tiles.dtype))
    fence_async_shared()
    tma_store(out_tiles, [b, h, first_row, first_column], o_tile)


@gluon.jit
def qk_matmul(q_rows, k_tile, zero_scores, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start q kᵀ (64, BLOCK_N)."""
    q_rows, k_tile = q_rows.reshape([64, BLOCK_D]), k_tile.reshape([BLOCK_N, BLOCK_D])
    return warpgroup_mma(q_rows, k_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)


@gluon.jit
def pv_matmul(weights, v_tile, acc):
    """Start acc + weights v (64, BLOCK_DV)."""
    v_tile = v_tile.reshape([v_tile.shape[2], v_tile.shape[3]])
    return warpgroup_mma(
        as_operand(weights, v_tile.dtype, gl.DotOperandLayout(0, acc.type.layout, 2)), v_tile, acc, is_async=True
    )


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Replay | None:
    """Write the block's out (B, S, Hq, Dv) and lse (B, Hq, S), continuing the carry's softmax (see block.py).

    Returns:
        A function that repeats the launch for tensors of the same signature; None if it took copies or several launches.
    """
    v = zero_padding(block.v, block.mask, block.k_at)
    source = block.with_tensors(tma_readable(block.q), tma_readable(block.k), tma_readable(v))
    input_carry, carry = carry, readable_carry(carry)
    max_keys = max_keys_per_launch(source.mask, source.q, source.k, source.v)
    cached = [run() for run in forward_launches(source, carry, out, lse, launch, max_keys)]
    is_replayable = source is block and carry is input_carry and block.is_single_range and len(cached) == 1
    return partial(replay, cached[0]) if is_replayable and cached[0] is not None else None


def launch(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Launch:
    """Return the launch for a block that is one ascending range, with tensors that the TMA can read."""
    q, k, v = block.q, block.k, block.v
    tensors = kernel_tensors(q, k, v, block.mask.bounds(q.device), carry, out, lse)
    return Launch(attention_forward, forward_arguments, tensors, common_arguments(block, tiles_for("forward", q, v)))


def replay(cached: CachedLaunch, *args: Any) -> None:
    """Repeat a launch; `args` are those of kernel_tensors."""
    cached.launch(kernel_tensors(*args))


def kernel_tensors(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, carry: Carry | None, out: Tensor, lse: Tensor
) -> dict[str, Any]:
    """Return the tensors among the kernel's arguments, with a new work counter."""
    carry_out, carry_lse = carry or (None, None)
    tensors = dict(q=q, k=k, v=v, out=out, out_tiles=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse)
    return tensors | dict(mask=mask_argument(bounds), work_counter=torch.zeros((), dtype=torch.int32, device=q.device))
