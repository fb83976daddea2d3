"""Consumers of Hopper's backward that also compute dq: head dims 129 to 160, and to 192 with 128 for v (see backward.py).

Each of the two warpgroups owns 64 of the 128 keys, as in backward_consumer.py. dk and dv occupy 160 registers per thread, so
there is no warpgroup for dq. dq has three parts of at most 64 columns: each consumer computes one of them, and the middle one
for every second tile, from the dS of both.

    consumer 0  | exp2, dP, dS(i), dv, dk | dq(i-1), s(i+1) | …         dS × 2 ──▶ both consumers
    consumer 1          | exp2, dP, dS(i), dv, dk | dq(i), s(i+1) | …   dS × 1 ──▶ both consumers

Consumer 0 computes dq one tile late, when consumer 1 has stored its dS. The next scores overlap the addition of dq to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringspan.kernels.backends.hopper.backward_consumer import (
    compute_ds,
    fence_and_arrive,
    matmul_minus_stats,
    query_bounds,
    recompute_weights,
    start_scores,
    stats_selector,
    store_gradients,
)
from ringspan.kernels.backends.hopper.backward_dq import split_pieces, store_staggered
from ringspan.kernels.backends.hopper.chunks import accumulate, select, select_rows, wait_matmuls, zero_accumulators
from ringspan.kernels.backends.hopper.common import (
    accumulator_layout,
    arrive_per_thread,
    load_int,
    num_steps,
    wait_free,
    wait_full,
)
from ringspan.kernels.runtime.triton_compat import tma_add


@gluon.jit
def consume_keys_and_dq(memory, barriers, tile, outputs, rules, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Compute dS, dk and dv of 64 keys, and add half of the columns of dq."""
    gl.static_assert(flags.BLOCK_D == 128 and flags.TAIL_D > 0, "dq has three parts")
    gl.static_assert(flags.DS_STAGES >= 2 and flags.DQ_STAGES == 2 and flags.DQ_WIDTH == 64, "slots of dS and dq")
    STAGES: gl.constexpr = flags.STAGES
    OFFSET: gl.constexpr = CONSUMER_ID * 64
    OWN_PART: gl.constexpr = 2 * CONSUMER_ID
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    KEYS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DV_MATMULS: gl.constexpr = 1 if flags.TAIL_DV == 0 else 2
    DTYPE: gl.constexpr = memory.q[0].dtype
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    selector = stats_selector(S_LAYOUT)
    dk, dv = zero_accumulators(flags.BLOCK_D, flags.TAIL_D), zero_accumulators(flags.BLOCK_DV, flags.TAIL_DV)
    key = tile.first_key + OFFSET + gl.arange(0, 64, KEYS)
    lo, hi, _ = query_bounds(key, tile, rules)
    dq_scale = rules.scale * 2.0**-flags.BIAS
    steps = num_steps(tile)
    late_h, late_row = 0, 1 << 30  # before tile 0: rows out of bounds, which the TMA drops
    mbarrier.wait(barriers.kv_full.index(0), 0)
    s = zero
    if steps > 0:
        wait_full(barriers.q_full, 0, STAGES)
        s = start_scores(select_rows(memory.k, 0, OFFSET), memory, 0, zero, selector, flags)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        opaque_zero = i >> 30  # see backward_consumer.py
        slot = i % STAGES
        q, dout = select(memory.q, slot), select(memory.dout, slot)
        delta = memory.stats.index(2 * slot + 1)
        marks = load_int(memory.tile_info, 3 * slot + 2)
        s, weights, p = recompute_weights(s, marks, lo, hi, memory, slot, tile, rules, flags, OFFSET, DTYPE)
        weights = gl.convert_layout(weights, gl.DotOperandLayout(0, dv[0].type.layout, 2))
        dp = matmul_minus_stats(select(memory.v, opaque_zero + CONSUMER_ID), dout, zero, selector, delta, flags.DV)
        dv = accumulate(weights, dout, dv)
        dp = warpgroup_mma_wait(DV_MATMULS, deps=(dp,))
        ds = compute_ds(s, p, dp, rules, flags, DTYPE)
        store_ds(ds, memory, barriers, i, flags, CONSUMER_ID)
        dk = accumulate(ds, q, dk)
        dk, dv = wait_matmuls(0, dk, dv)
        h, row = load_int(memory.tile_info, 3 * slot), load_int(memory.tile_info, 3 * slot + 1)
        arrive_per_thread(barriers.q_free.index(slot))
        step = i
        if CONSUMER_ID == 0:
            h, row, late_h, late_row = late_h, late_row, h, row
            step = i - 1
        ds_halves, k = wait_ds(memory, barriers, gl.maximum(step, 0), flags), select(memory.k, opaque_zero)
        add_middle_part(ds_halves, k, outputs.dq, memory, tile, step, h, row, dq_scale, flags, CONSUMER_ID)
        dq = dq_part(ds_halves, k, OWN_PART, flags)
        if step >= 0:
            free_ds(barriers, step, flags)
        store_part(dq, memory, dq_scale, flags, CONSUMER_ID)
        # the next tile's scores; after the last tile they are computed from stale data and discarded
        if i + 1 < steps:
            wait_full(barriers.q_full, i + 1, STAGES)
        s = start_scores(select_rows(memory.k, opaque_zero, OFFSET), memory, (i + 1) % STAGES, zero, selector, flags)
        add_part(outputs.dq, memory, tile, h, row, OWN_PART, CONSUMER_ID)
        s = warpgroup_mma_wait(0, deps=(s,))
    if CONSUMER_ID == 0 and steps > 0:
        ds_halves, k = wait_ds(memory, barriers, steps - 1, flags), select(memory.k, 0)
        store_part(dq_part(ds_halves, k, OWN_PART, flags), memory, dq_scale, flags, CONSUMER_ID)
        add_part(outputs.dq, memory, tile, late_h, late_row, OWN_PART, CONSUMER_ID)
        add_middle_part(ds_halves, k, outputs.dq, memory, tile, steps - 1, late_h, late_row, dq_scale, flags, CONSUMER_ID)
    tma.store_wait(0)
    key = tile.first_key + OFFSET + memory.row_offsets.load(KEYS)  # again, so that the loop needs no registers for them
    store_gradients(dk, dv, memory, barriers, tile, outputs, rules, flags, key, key < tile.end_key, steps, CONSUMER_ID)


@gluon.jit
def store_ds(ds, memory, barriers, i, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Hand dS of a consumer's keys to both consumers.

    Consumer 0 reads dS one tile late. Then its own next dS is already written, so it needs one slot more than consumer 1.
    """
    SLOTS: gl.constexpr = flags.DS_STAGES - CONSUMER_ID
    slot = wait_free(barriers.ds_free[CONSUMER_ID], i, SLOTS)
    memory.ds.index(flags.DS_STAGES * CONSUMER_ID + slot).store(ds)
    fence_and_arrive(barriers.ds_full[CONSUMER_ID].index(slot))


@gluon.jit
def wait_ds(memory, barriers, step, flags: gl.constexpr):
    """Wait until both consumers have stored dS of a tile; return both, as (queries, keys)."""
    slot_0 = wait_full(barriers.ds_full[0], step, flags.DS_STAGES)
    slot_1 = wait_full(barriers.ds_full[1], step, flags.DS_STAGES - 1)
    return memory.ds.index(slot_0).permute((1, 0)), memory.ds.index(flags.DS_STAGES + slot_1).permute((1, 0))


@gluon.jit
def free_ds(barriers, step, flags: gl.constexpr):
    """Free dS of a tile, after the last matmul that reads it."""
    arrive_per_thread(barriers.ds_free[0].index(step % flags.DS_STAGES))
    arrive_per_thread(barriers.ds_free[1].index(step % (flags.DS_STAGES - 1)))


@gluon.jit
def dq_part(ds_halves, k, PART: gl.constexpr, flags: gl.constexpr):
    """Return dS k for 64 columns, or for the second chunk."""
    WIDTH: gl.constexpr = 64 if PART < 2 else flags.TAIL_D
    LAYOUT: gl.constexpr = accumulator_layout(WIDTH)
    columns = k[0].slice(64 * PART, 64, dim=1) if PART < 2 else k[1]
    dq = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    dq = warpgroup_mma(ds_halves[0], columns.slice(0, 64), dq, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds_halves[1], columns.slice(64, 64), dq, is_async=True)
    return warpgroup_mma_wait(0, deps=(dq,))


@gluon.jit
def add_middle_part(
    ds_halves, k, dq_out, memory, tile, step, h, row, scale, flags: gl.constexpr, CONSUMER_ID: gl.constexpr
):  # fmt: skip
    """Compute and add the middle part of dq, if it is this consumer's turn.

    The branch holds one part: a version with two in a branch gave wrong dq on an H200, for an unknown reason.
    """
    if (step & 1) == CONSUMER_ID:
        store_part(dq_part(ds_halves, k, 1, flags), memory, scale, flags, CONSUMER_ID)
        add_part(dq_out, memory, tile, h, row, 1, CONSUMER_ID)


@gluon.jit
def store_part(dq, memory, scale, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Store a part of dq in the consumer's slot, once the TMA has read the previous part."""
    part = split_pieces(dq * scale, flags.DQ_WIDTH)[0]
    tma.store_wait(0)
    store_staggered(part, memory.dq.index(CONSUMER_ID), flags.DQ_WIDTH)


@gluon.jit
def add_part(dq_out, memory, tile, h, row, PART: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Add a stored part of dq to memory."""
    fence_async_shared()
    tma_add(dq_out, [tile.b, h, row, 64 * PART], memory.dq.index(CONSUMER_ID))
