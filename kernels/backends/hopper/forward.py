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
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.hopper.arguments import forward_arguments, max_keys_per_launch
from ringspan.kernels.backends.hopper.chunks import (
    accumulate,
    allocate_tiles,
    multiply_transposed,
    select,
    wait_matmuls,
    zero_accumulators,
)
from ringspan.kernels.backends.hopper.common import (
    accumulator_layout,
    arrive,
    make_barriers,
    nth_tile,
    tma_readable,
    wait_full,
    zero_padding,
)
from ringspan.kernels.backends.hopper.forward_outputs import LOG2_MAX_CARRY_WEIGHT, MAX_CARRY_WEIGHT, load_carry, store_result
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
from ringspan.kernels.backends.triton.common import ANY_SIZE, position, row_count, rows_below, visible_keys
from ringspan.kernels.backends.triton.forward import forward_launches, readable_carry
from ringspan.kernels.mask import Bounds
from ringspan.kernels.runtime.call_cache import Replay
from ringspan.kernels.runtime.launch import CachedLaunch, Launch


@gluon.jit(**ANY_SIZE)
def attention_forward(
    q, q_tail, k, k_tail, v, v_tail, out, out_tiles, lse, carry_out, carry_lse, work_counter,
    out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, concurrent_heads, scale, softcap,
    DV: gl.constexpr, BLOCK_DV: gl.constexpr, TAIL_DV: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    """Write out and lse, persistently over all query tiles.

    q, k, v, their tails (chunks.py) and out_tiles are TMA descriptors of (batch, head, row, column). Blocks of q and
    out_tiles have 64 rows. Without out_tiles all of out is stored from registers (forward_outputs.py). num_tiles counts work
    pieces per head (forward_producer.py).
    """
    q = (q,) if q_tail is None else (q, q_tail)
    k = (k,) if k_tail is None else (k, k_tail)
    v = (v,) if v_tail is None else (v, v_tail)
    inputs = (q, k, v)
    q_tile = allocate_tiles(q, Q_STAGES * CONSUMERS)
    k_tile = allocate_tiles(k, STAGES)
    v_tile = allocate_tiles(v, STAGES)
    o_tile = q_tile[0]  # not read without out_tiles
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
            (consume, (tiles, queue, work, outputs, 0, DV, BLOCK_DV, TAIL_DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 1, DV, BLOCK_DV, TAIL_DV, CONSUMERS, IN_STEP)),
            (produce, (inputs, tiles, queue, work_counter, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (tiles, queue, work, outputs, 0, DV, BLOCK_DV, TAIL_DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 1, DV, BLOCK_DV, TAIL_DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, outputs, 2, DV, BLOCK_DV, TAIL_DV, CONSUMERS, IN_STEP)),
            (produce, (inputs, tiles, queue, work_counter, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


@gluon.jit
def consume(
    tiles, queue, work, outputs, CONSUMER_ID: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, TAIL_DV: gl.constexpr,
    CONSUMERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    """Role of consumer warpgroup CONSUMER_ID: 64 queries of each query tile of the thread block."""
    q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns = tiles
    STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_N: gl.constexpr = k_tile[0].shape[3]
    Q_STAGES: gl.constexpr = q_tile[0].shape[0] // CONSUMERS
    QK_MATMULS: gl.constexpr = len(q_tile)
    PV_MATMULS: gl.constexpr = len(v_tile)
    DTYPE: gl.constexpr = v_tile[0].dtype
    mask, q_at, k_at, _num_tiles, _num_sequences, _num_heads, _group, _concurrent_heads = work
    scale, softcap = outputs[9], outputs[10]
    # with documents a tile's last rows may belong to the next tile, and a thread block may have no tile
    DOCUMENTS: gl.constexpr = mask[2] is not None
    S_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N)
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
    s = multiply_transposed(select(q_tile, q_slot * CONSUMERS + CONSUMER_ID), select(k_tile, slot), zero_scores)
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(kv_free.index(slot), IN_STEP)
    while tile_end != 0:
        acc = zero_accumulators(BLOCK_DV, TAIL_DV)
        min_reference = gl.full([64, 4], NO_REFERENCE, gl.float32, LANE_LAYOUT)
        if HAS_CARRY:
            row_ok = row < (tile_end if DOCUMENTS else row_count(q_at))
            acc, carry_exponent = load_carry(outputs, b, h, row, row_ok, acc, DV)
            min_reference = gl.maximum(carry_exponent - LOG2_MAX_CARRY_WEIGHT, min_reference)
        q_rows = select(q_tile, q_slot * CONSUMERS + CONSUMER_ID)

        tile = nth_tile(0, begin, full_begin, full_end, end)
        s, factor = apply_mask(s, tile, True, lo, hi, mask, columns, scale, softcap, BLOCK_N)
        weights, reference, total, _rescale, needs_rescale = compute_weights(s, factor, min_reference, DTYPE, True)
        if HAS_CARRY:  # after the first softmax, which covers the latency of the carry's loads
            weight = gl.where(
                (reference == min_reference) & (min_reference < carry_exponent),
                MAX_CARRY_WEIGHT,
                gl.exp2(carry_exponent - reference),
            )
            total += weight / 4  # each of a row's four threads adds a quarter
            if outputs[3] is not None:
                acc = scale_accumulators(acc, weight, needs_rescale)
        kv_count += 1
        slot = wait_full(kv_full, kv_count, STAGES)
        num_partial = full_begin - begin + end - full_end
        for j in range(1, end - begin):
            s = multiply_transposed(q_rows, select(k_tile, slot), zero_scores)
            acc = pv_matmul(weights, select(v_tile, slot), acc)
            s = warpgroup_mma_wait(PV_MATMULS, deps=(s,))
            tile = nth_tile(j, begin, full_begin, full_end, end)
            is_partial = j < num_partial if not UNMASKED else False  # a last partial tile is processed first
            s, factor = apply_mask(s, tile, is_partial, lo, hi, mask, columns, scale, softcap, BLOCK_N)
            prev_slot = slot
            kv_count += 1
            if OVERLAP:
                next_weights, reference, partial_sum, rescale, needs_rescale = compute_weights(
                    s, factor, reference, DTYPE, False
                )
                # This wait is a branch, across which the compiler does not move the matmul wait below. Otherwise it would move
                # that wait before the softmax, and the softmax would not overlap the matmul with v.
                slot = wait_full(kv_full, kv_count, STAGES)
            acc = wait_matmuls(0, acc)
            arrive(kv_free.index(prev_slot), IN_STEP)
            if not OVERLAP:  # the registers of the previous weights are free now
                next_weights, reference, partial_sum, rescale, needs_rescale = compute_weights(
                    s, factor, reference, DTYPE, False
                )
            acc = scale_accumulators(acc, rescale, needs_rescale)
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
        acc = pv_matmul(weights, select(v_tile, slot), acc)
        s = multiply_transposed(select(q_tile, q_slot * CONSUMERS + CONSUMER_ID), select(k_tile, slot), zero_scores)
        acc = wait_matmuls(QK_MATMULS, acc)

        store_result(
            acc, reference, total, prev_b, prev_h, prev_first_row, prev_row, prev_tile_end, row_count(q_at),
            outputs, o_tile.index(CONSUMER_ID), DOCUMENTS, DV,
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
def pv_matmul(weights, v_tile, acc):
    """Start acc + weights v."""
    return accumulate(as_operand(weights, v_tile[0].dtype, gl.DotOperandLayout(0, acc[0].type.layout, 2)), v_tile, acc)


@gluon.jit
def scale_accumulators(acc, rescale, needs_rescale):
    """Multiply each row of all chunks by its factor, see scale_rows."""
    first = scale_rows(acc[0], rescale, needs_rescale)
    if len(acc) == 1:
        return (first,)
    else:
        return first, scale_rows(acc[1], rescale, needs_rescale)


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
    tensors = dict(
        q=q, q_tail=q, k=k, k_tail=k, v=v, v_tail=v, out=out, out_tiles=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse
    )
    return tensors | dict(mask=mask_argument(bounds), work_counter=torch.zeros((), dtype=torch.int32, device=q.device))
