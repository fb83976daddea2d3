"""Consumers of Hopper's backward where a thread block owns 64 keys, above head dim 128 (see backward.py).

The registers of a warpgroup cannot hold all columns of dk and dv, so each consumer accumulates half of the columns. A second
chunk (chunks.py) has one consumer: dv's goes to consume_weights, and dk's to consume_ds. Both need all weights and all of dS:

    consume_weights                                  consume_ds
    s, p ──▶ ds_tile ───── exchange[0] ───────────▶  dP, concurrently with s; dS = p (dP - delta)
    dk of the left columns  ◀───── ds_full ────────  dS ──▶ the same slot of ds_tile ── ds_full ──▶ dq warpgroup
    dv of the left columns                           dk, dv of the right columns

The weights are stored first, as fp16 scaled by 2¹⁴ (see BIAS in backward.py). Each thread of consume_ds stores dS where it
has read the weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringspan.kernels.backends.hopper.backward_consumer import (
    fence_and_arrive,
    matmul_minus_stats,
    stats_selector,
    store_dk,
    store_dv,
)
from ringspan.kernels.backends.hopper.chunks import (
    accumulate,
    accumulate_chunk,
    narrow,
    select,
    wait_matmuls,
    zero_accumulators,
)
from ringspan.kernels.backends.hopper.common import (
    accumulator_layout,
    arrive_per_thread,
    load_int,
    num_steps,
    wait_free,
    wait_full,
)
from ringspan.kernels.backends.triton.common import MAX_POSITION, exponents, position, row_count, visible_queries


@gluon.jit
def consume_weights(memory, barriers, tile, outputs, rules, flags: gl.constexpr):
    """Compute scores and weights, the left columns of dk and dv, and the second chunk of dv."""
    STAGES: gl.constexpr = flags.STAGES
    DS_STAGES: gl.constexpr = flags.DS_STAGES
    BIAS: gl.constexpr = flags.BIAS
    WIDTH: gl.constexpr = flags.BLOCK_D // 2
    WIDTH_V: gl.constexpr = flags.BLOCK_DV // 2
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    K_LAYOUT: gl.constexpr = accumulator_layout(WIDTH)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = memory.q[0].dtype
    exchange = barriers.exchange
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    selector = stats_selector(S_LAYOUT)
    dk = gl.zeros([64, WIDTH], gl.float32, K_LAYOUT)
    dv = zero_accumulators(WIDTH_V, flags.TAIL_DV)
    key = tile.first_key + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    lo, hi = visible_queries(position(key, rules.k_at), rules.mask, tile.b)
    key_ok = key < row_count(rules.k_at)
    hi = gl.where(key_ok, hi, -MAX_POSITION)
    steps = num_steps(tile)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    s = zero
    if steps > 0:
        wait_full(barriers.q_full, 0, STAGES)
        s = matmul_minus_stats(select(memory.k, 0), select(memory.q, 0), zero, selector, memory.stats.index(0), flags.D)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        k_rows = select(memory.k, i >> 30)  # opaque 0, see backward_consumer.py
        slot = i % STAGES
        marks = load_int(memory.tile_info, 3 * slot + 2)
        s, factor = exponents(s, rules.scale, rules.softcap, False)
        exponent = s * factor
        if rules.softcap is not None:
            exponent -= memory.lse.index(slot).load(QUERIES)[None, :]
        p = gl.exp2(exponent)
        if marks & 1 != 0:
            p_q = position(load_int(memory.tile_info, 3 * slot + 1) + memory.row_offsets.load(QUERIES), rules.q_at)
            visible = p_q[None, :] <= hi[:, None]
            if rules.mask.right is not None or rules.mask.starts is not None:
                visible &= p_q[None, :] >= lo[:, None]
            p = gl.where(visible, p, 0.0)
        weights = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv[0].type.layout, 2))
        if BIAS == 0:
            p *= 2.0**14
        ds_slot = wait_free(barriers.ds_free, i, DS_STAGES)
        memory.ds.index(ds_slot).store(p.to(gl.float16).to(DTYPE, bitcast=True))
        fence_and_arrive(exchange[0].index(ds_slot))
        if rules.softcap is not None:  # dS also needs the slope of tanh, once the weights have been read
            slope = (1 - s * s).to(gl.float16)
            mbarrier.wait(exchange[1].index(ds_slot), (i // DS_STAGES) & 1)
            memory.ds.index(ds_slot).store(slope.to(DTYPE, bitcast=True))
            fence_and_arrive(exchange[0].index(ds_slot))
        dv = accumulate(weights, narrow(select(memory.dout, slot), 0, WIDTH_V), dv)
        dv = wait_matmuls(0, dv)
        # the next tile's scores; after the last tile they are computed from stale data and discarded
        if i + 1 < steps:
            wait_full(barriers.q_full, i + 1, STAGES)
        next_slot = (i + 1) % STAGES
        next_q, next_lse = select(memory.q, next_slot), memory.stats.index(2 * next_slot)
        s = matmul_minus_stats(k_rows, next_q, zero, selector, next_lse, flags.D)
        wait_full(barriers.ds_full, i, DS_STAGES)
        q = select(memory.q, slot)[0].slice(0, WIDTH, dim=1)
        dk = warpgroup_mma(memory.ds.index(ds_slot), q, dk, is_async=True)
        dk, s = warpgroup_mma_wait(0, deps=(dk, s))
        arrive_per_thread(barriers.q_free.index(slot))
    store_dk(dk * (rules.scale * 2.0**-BIAS), outputs, tile, key, key_ok, 0, flags)
    store_dv(dv[0] * 2.0**-BIAS, outputs, tile, key, key_ok, 0, flags)
    if flags.TAIL_DV > 0:
        store_dv(dv[1] * 2.0**-BIAS, outputs, tile, key, key_ok, flags.BLOCK_DV, flags)


@gluon.jit
def consume_ds(memory, barriers, tile, outputs, rules, flags: gl.constexpr):
    """Compute the gradients of the weights and dS, the right columns of dk and dv, and the second chunk of dk."""
    STAGES: gl.constexpr = flags.STAGES
    DS_STAGES: gl.constexpr = flags.DS_STAGES
    BIAS: gl.constexpr = flags.BIAS
    WIDTH: gl.constexpr = flags.BLOCK_D // 2
    WIDTH_V: gl.constexpr = flags.BLOCK_DV // 2
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    V_LAYOUT: gl.constexpr = accumulator_layout(WIDTH_V)
    DTYPE: gl.constexpr = memory.q[0].dtype
    EXCHANGES: gl.constexpr = 1 if rules.softcap is None else 2  # tiles that consume_weights hands over per query tile
    exchange = barriers.exchange
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    selector = stats_selector(S_LAYOUT)
    dk = zero_accumulators(WIDTH, flags.TAIL_D)
    dv = gl.zeros([64, WIDTH_V], gl.float32, V_LAYOUT)
    key = tile.first_key + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    key_ok = key < row_count(rules.k_at)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    for i in range(num_steps(tile)):
        v_rows = select(memory.v, i >> 30)
        slot = wait_full(barriers.q_full, i, STAGES)
        dout, delta = select(memory.dout, slot), memory.stats.index(2 * slot + 1)
        dp = matmul_minus_stats(v_rows, dout, zero, selector, delta, flags.DV)
        ds_slot = i % DS_STAGES
        shared = memory.ds.index(ds_slot)
        mbarrier.wait(exchange[0].index(ds_slot), (EXCHANGES * (i // DS_STAGES)) & 1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        p = shared.load(S_LAYOUT).to(gl.float16, bitcast=True)
        weights = p.to(gl.float32)
        if BIAS == 0:
            weights *= 2.0**-14
        ds = weights * dp
        if rules.softcap is not None:
            arrive_per_thread(exchange[1].index(ds_slot))
            mbarrier.wait(exchange[0].index(ds_slot), 1)
            ds *= shared.load(S_LAYOUT).to(gl.float16, bitcast=True).to(gl.float32)
        ds = ds.to(DTYPE)
        shared.store(ds)
        fence_and_arrive(barriers.ds_full.index(ds_slot))
        dout = select(memory.dout, slot)[0].slice(WIDTH_V, WIDTH_V, dim=1)
        dv = accumulate_chunk(weights.to(DTYPE), dout, dv)
        dk = accumulate(ds, narrow(select(memory.q, slot), WIDTH, WIDTH), dk)
        dk, dv = wait_matmuls(0, dk, dv)
        arrive_per_thread(barriers.q_free.index(slot))
    store_dk(dk[0] * (rules.scale * 2.0**-BIAS), outputs, tile, key, key_ok, WIDTH, flags)
    if flags.TAIL_D > 0:
        store_dk(dk[1] * (rules.scale * 2.0**-BIAS), outputs, tile, key, key_ok, flags.BLOCK_D, flags)
    store_dv(dv * 2.0**-BIAS, outputs, tile, key, key_ok, WIDTH_V, flags)
