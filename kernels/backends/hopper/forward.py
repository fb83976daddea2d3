"""The forward for Hopper (sm_90) in Gluon: a producer warp loads tiles by TMA, two or three consumer warpgroups compute.

    producer (1 warp)                  shared memory                 each consumer (1 warpgroup, 64 queries)
    publish_tile  ─── next_full ───▶   9 int32      × 2         ──▶  receive_tile: rows, visible tiles of keys
    TMA           ───  q_full   ───▶   q            × Q_STAGES  ──▶  s(j) = q k(j)ᵀ, then mask, p(j) = softmax
    TMA           ───  kv_full  ───▶   k(j), v(j-1) × STAGES    ──▶  acc += p(j-1) v(j-1)
    wait_free     ◀── q/kv/next_free ───────────────────────────     arrive; out, lse to memory at the end of a tile

A K/V slot holds what is multiplied concurrently. The softmax of tile j overlaps the matmul with v(j-1), except with three
consumers and tiles of 128 keys: they lack the registers, and overlap each other instead. The next query tile's first matmul
overlaps the store of out.
The grid is persistent: one thread block per SM takes query tiles, longest first, from an atomic counter, so all thread blocks
end together under any mask. The producer computes positions and visible keys (forward_producer.py).
Supports what the portable forward does, except fp32, dropout and scales below 1e-30.
"""

from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.hopper.argument_tuples import (
    ForwardFlags,
    ForwardInputs,
    ForwardMemory,
    Outputs,
    QueryWork,
    Queue,
)
from ringspan.kernels.backends.hopper.arguments import forward_arguments
from ringspan.kernels.backends.hopper.chunks import (
    accumulate,
    allocate_tiles,
    multiply_transposed,
    select,
    skips_padding,
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
from ringspan.kernels.runtime.work_counters import new_counter


@gluon.jit(**ANY_SIZE)
def attention_forward(
    q, q_tail, k, k_tail, v, v_tail, out, out_tiles, lse, carry_out, carry_lse, work_counter,
    out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, concurrent_heads, stagger, scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, TAIL_DV: gl.constexpr, BLOCK_N: gl.constexpr,
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
    flags: gl.constexpr = ForwardFlags(D, DV, BLOCK_DV, TAIL_DV, BLOCK_N, CONSUMERS, Q_STAGES, STAGES, IN_STEP)
    inputs = ForwardInputs(q, k, v)
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
    memory = ForwardMemory(q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns)
    queue = Queue(next_tile, next_full, next_free)
    work = QueryWork(mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, concurrent_heads, stagger)
    outputs = Outputs(out, out_tiles, lse, carry_out, carry_lse, out_strides, lse_strides, carry_out_strides, carry_lse_strides)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (memory, queue, work, outputs, scale, softcap, flags, 0)),
            (consume, (memory, queue, work, outputs, scale, softcap, flags, 1)),
            (produce, (inputs, memory, queue, work_counter, work, flags)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (memory, queue, work, outputs, scale, softcap, flags, 0)),
            (consume, (memory, queue, work, outputs, scale, softcap, flags, 1)),
            (consume, (memory, queue, work, outputs, scale, softcap, flags, 2)),
            (produce, (inputs, memory, queue, work_counter, work, flags)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


@gluon.jit
def consume(memory, queue, work, outputs, scale, softcap, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Role of consumer warpgroup CONSUMER_ID: 64 queries of each query tile of the thread block."""
    QK_MATMULS: gl.constexpr = 3 if skips_padding(flags.D) else len(memory.q)
    PV_MATMULS: gl.constexpr = len(memory.v)
    DTYPE: gl.constexpr = memory.v[0].dtype
    # with documents a tile's last rows may belong to the next tile, and a thread block may have no tile
    DOCUMENTS: gl.constexpr = work.mask.starts is not None
    S_LAYOUT: gl.constexpr = accumulator_layout(flags.BLOCK_N)
    # Without a mask the producer loads the full tiles in another order, so `key_tile` is not the loaded tile. It only
    # distinguishes full tiles from a last partial one.
    UNMASKED: gl.constexpr = work.stagger is not None
    OVERLAP: gl.constexpr = flags.CONSUMERS == 2 or flags.BLOCK_N == 64  # softmax with the own matmul with v
    gl.static_assert(flags.STAGES > 1 or not OVERLAP, "the wait for a slot overlaps the use of another one: STAGES > 1")
    zero_scores = gl.zeros([64, flags.BLOCK_N], gl.float32, S_LAYOUT)
    i = 0
    kv_count = 0  # K/V slots received
    tile = receive_tile(queue, i, DOCUMENTS, flags.IN_STEP)
    row, lo, hi = key_interval(tile, work, CONSUMER_ID, S_LAYOUT)
    if (tile.end_row != 0) if DOCUMENTS else True:
        wait_full(memory.q_full, i, flags.Q_STAGES)
    q_slot = i
    slot = wait_full(memory.kv_full, kv_count, flags.STAGES)
    q_rows = select(memory.q, q_slot * flags.CONSUMERS + CONSUMER_ID)
    s = multiply_transposed(q_rows, select(memory.k, slot), zero_scores, flags.D)
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(memory.kv_free.index(slot), flags.IN_STEP)
    while tile.end_row != 0:
        weights, reference, total, acc = begin_softmax(
            s, tile, row, lo, hi, work, outputs, memory.columns, scale, softcap, flags, DTYPE
        )
        q_rows = select(memory.q, q_slot * flags.CONSUMERS + CONSUMER_ID)
        kv_count += 1
        slot = wait_full(memory.kv_full, kv_count, flags.STAGES)
        num_partial = tile.full_begin - tile.begin + tile.end - tile.full_end
        for j in range(1, tile.end - tile.begin):
            s = multiply_transposed(q_rows, select(memory.k, slot), zero_scores, flags.D)
            acc = pv_matmul(weights, select(memory.v, slot), acc)
            s = warpgroup_mma_wait(PV_MATMULS, deps=(s,))
            key_tile = nth_tile(j, tile.begin, tile.full_begin, tile.full_end, tile.end)
            is_partial = j < num_partial if not UNMASKED else False  # a last partial tile is processed first
            s, factor = apply_mask(s, key_tile, is_partial, lo, hi, work.mask, memory.columns, scale, softcap, flags.BLOCK_N)
            prev_slot = slot
            kv_count += 1
            if OVERLAP:
                next_weights, reference, tile_sum, rescale, needs_rescale = compute_weights(s, factor, reference, DTYPE, False)
                # This wait is a branch, across which the compiler does not move the matmul wait below. Otherwise it would move
                # that wait before the softmax, and the softmax would not overlap the matmul with v.
                slot = wait_full(memory.kv_full, kv_count, flags.STAGES)
            acc = wait_matmuls(0, acc)
            arrive(memory.kv_free.index(prev_slot), flags.IN_STEP)
            if not OVERLAP:  # the registers of the previous weights are free now
                next_weights, reference, tile_sum, rescale, needs_rescale = compute_weights(s, factor, reference, DTYPE, False)
            acc = scale_accumulators(acc, rescale, needs_rescale)
            total = total * rescale + tile_sum
            weights = next_weights
            if not OVERLAP:
                slot = wait_full(memory.kv_full, kv_count, flags.STAGES)
        arrive(memory.q_free.index(q_slot), flags.IN_STEP)
        # The last matmul with v overlaps the next query tile's first scores. After the last tile these scores are computed from
        # stale shared memory and discarded.
        i += 1
        prev_tile, prev_row = tile, row
        tile = receive_tile(queue, i, DOCUMENTS, flags.IN_STEP)
        row, lo, hi = key_interval(tile, work, CONSUMER_ID, S_LAYOUT)
        if tile.end_row != 0:
            wait_full(memory.q_full, i, flags.Q_STAGES)
        q_slot = i % flags.Q_STAGES
        acc = pv_matmul(weights, select(memory.v, slot), acc)
        q_rows = select(memory.q, q_slot * flags.CONSUMERS + CONSUMER_ID)
        s = multiply_transposed(q_rows, select(memory.k, slot), zero_scores, flags.D)
        acc = wait_matmuls(QK_MATMULS, acc)
        store_result(
            acc, reference, total, prev_tile, prev_row, row_count(work.q_at), outputs, memory.out, CONSUMER_ID,
            DOCUMENTS, flags.DV,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s,))
        arrive(memory.kv_free.index(slot), flags.IN_STEP)

    if outputs.out_tiles is not None:
        tma.store_wait(0)


@gluon.jit
def key_interval(tile, work, CONSUMER_ID: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Return a consumer's 64 rows of q, and for each the first and last visible row of k, counted from the tile's origin."""
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    row = tile.first_row + CONSUMER_ID * 64 + gl.arange(0, 64, ROWS)
    lo, hi = visible_keys(position(row, work.q_at), work.mask, tile.b)
    return row, rows_below(lo, work.k_at) - tile.origin, rows_below(hi + 1, work.k_at) - 1 - tile.origin


@gluon.jit
def begin_softmax(s, tile, row, lo, hi, work, outputs, columns, scale, softcap, flags: gl.constexpr, DTYPE: gl.constexpr):
    """Return (weights, reference, total, acc) after the first tile of keys and the carry, with which a row begins."""
    DOCUMENTS: gl.constexpr = work.mask.starts is not None
    HAS_CARRY: gl.constexpr = outputs.carry_lse is not None
    acc = zero_accumulators(flags.BLOCK_DV, flags.TAIL_DV)
    min_reference = gl.full([64, 4], NO_REFERENCE, gl.float32, LANE_LAYOUT)
    if HAS_CARRY:
        row_ok = row < (tile.end_row if DOCUMENTS else row_count(work.q_at))
        acc, carry_exponent = load_carry(outputs, tile.b, tile.h, row, row_ok, acc, flags.DV)
        min_reference = gl.maximum(carry_exponent - LOG2_MAX_CARRY_WEIGHT, min_reference)
    key_tile = nth_tile(0, tile.begin, tile.full_begin, tile.full_end, tile.end)
    s, factor = apply_mask(s, key_tile, True, lo, hi, work.mask, columns, scale, softcap, flags.BLOCK_N)
    weights, reference, total, _rescale, needs_rescale = compute_weights(s, factor, min_reference, DTYPE, True)
    if HAS_CARRY:  # after the first softmax, which covers the latency of the carry's loads
        weight = gl.where(
            (reference == min_reference) & (min_reference < carry_exponent),
            MAX_CARRY_WEIGHT,
            gl.exp2(carry_exponent - reference),
        )
        total += weight / 4  # each of a row's four threads adds a quarter
        if outputs.carry_out is not None:
            acc = scale_accumulators(acc, weight, needs_rescale)
    return weights, reference, total, acc


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
    cached = [run() for run in forward_launches(source, carry, out, lse, launch)]
    is_replayable = source is block and carry is input_carry and block.is_single_range
    return partial(replay, cached[0]) if is_replayable and cached[0] is not None else None


def launch(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Launch:
    """Return the launch for a block that is one ascending range, with tensors that the TMA can read."""
    q, k, v = block.q, block.k, block.v
    bounds = block.mask.bounds(q.device)
    tensors, tiles = kernel_tensors(q, k, v, bounds, carry, out, lse), tiles_for("forward", q, v, bounds)
    return Launch(attention_forward, forward_arguments, tensors, common_arguments(block, tiles))


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
    return tensors | dict(mask=mask_argument(bounds), work_counter=new_counter(q.device))
