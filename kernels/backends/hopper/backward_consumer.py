"""Consumers of Hopper's backward at head dims up to 128 (see backward.py), and helpers of all its consumers.

Each of the two warpgroups owns 64 of the 128 keys: their weights, dS, dk and dv.

    TIGHT (head dims above 80)                                 not TIGHT (head dims up to 80)
    consumer 0   | s(i) | exp2, dP, dS, dk, dv | s(i+1) | …    scores run one tile ahead:
    consumer 1          | s(i) | exp2, dP, dS, dk, dv | …      s(i+1) overlaps dk and dv of tile i

With TIGHT the consumers alternate in computing scores, so that the matmul of one overlaps the exponentials of the other.
They also skip query tiles that see none of their 64 keys, and keep the weights in 16 bits until dS needs them.
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

from ringspan.kernels.backends.hopper.chunks import (
    accumulate,
    load_operand,
    multiply_transposed,
    select,
    select_rows,
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
from ringspan.kernels.runtime.triton_compat import CAST_BEFORE_MASK, K_FITS_REGISTERS, tma_store


@gluon.jit
def consume_keys(memory, barriers, tile, outputs, rules, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Compute dS, dk and dv of 64 keys."""
    TIGHT: gl.constexpr = flags.TIGHT
    STAGES: gl.constexpr = flags.STAGES
    OFFSET: gl.constexpr = CONSUMER_ID * 64
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    DV_MATMULS: gl.constexpr = 1 if flags.TAIL_DV == 0 else 2
    DTYPE: gl.constexpr = memory.q[0].dtype
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    selector = stats_selector(S_LAYOUT)
    dk, dv = zero_accumulators(flags.BLOCK_D, flags.TAIL_D), zero_accumulators(flags.BLOCK_DV, flags.TAIL_DV)
    key = tile.first_key + OFFSET + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    lo, hi, key_ok = query_bounds(key, tile, rules)
    steps = num_steps(tile)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    # What fits into registers, so that matmuls read less shared memory: v up to head dim 64; above 80 the second chunk of k, or
    # all of k up to 96 without documents. With softcap nothing fits.
    V_IN_REGISTERS: gl.constexpr = not TIGHT and flags.TAIL_DV == 0 and rules.softcap is None
    K_IN_REGISTERS: gl.constexpr = TIGHT and flags.TAIL_D > 0 and rules.softcap is None
    ALL_OF_K: gl.constexpr = K_IN_REGISTERS and flags.DV <= 96 and rules.mask.starts is None and K_FITS_REGISTERS
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    k_operand, v_operand = select_rows(memory.k, 0, OFFSET), select(memory.v, CONSUMER_ID)
    if K_IN_REGISTERS:
        k_operand = load_operand(k_operand, OPERAND)
    if V_IN_REGISTERS:
        v_operand = load_operand(v_operand, OPERAND)
    s = zero  # with TIGHT unused; the loop needs an initial value
    if not TIGHT and steps > 0:
        wait_full(barriers.q_full, 0, STAGES)
        s = start_scores(k_operand, memory, 0, zero, selector, flags)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        k_half, v_half = k_operand, v_operand
        if TIGHT:
            # 0, which the compiler cannot know: otherwise it keeps the address of each slice of k and v in a register
            opaque_zero = i >> 30
            k_half, v_half = select_rows(memory.k, opaque_zero, OFFSET), select(memory.v, opaque_zero + CONSUMER_ID)
            if ALL_OF_K:  # then the addresses of v's second chunk fit as well
                k_half, v_half = k_operand, v_half[:1] + v_operand[1:]
            elif K_IN_REGISTERS:
                k_half = k_half[:1] + k_operand[1:]
        slot = i % STAGES
        q, dout = select(memory.q, slot), select(memory.dout, slot)
        delta = memory.stats.index(2 * slot + 1)
        if TIGHT:  # the consumers alternate, and consumer 0 starts
            mbarrier.wait(barriers.exchange[CONSUMER_ID].index(0), (i & 1) ^ (1 - CONSUMER_ID))
            wait_full(barriers.q_full, i, STAGES)
        marks = load_int(memory.tile_info, 3 * slot + 2)
        # near the diagonal a tile's queries may see only the other consumer's keys
        if (marks & (2 << CONSUMER_ID) if TIGHT else 1) != 0:
            if TIGHT:
                s = start_scores(k_half, memory, slot, zero, selector, flags)
                s = warpgroup_mma_wait(0, deps=(s,))
                arrive_per_thread(barriers.exchange[1 - CONSUMER_ID].index(0))
            else:
                dp = matmul_minus_stats(v_half, dout, zero, selector, delta, flags.DV)
            s, weights, p = recompute_weights(s, marks, lo, hi, memory, slot, tile, rules, flags, OFFSET, DTYPE)
            weights = gl.convert_layout(weights, gl.DotOperandLayout(0, dv[0].type.layout, 2))
            if TIGHT:
                dp = matmul_minus_stats(v_half, dout, zero, selector, delta, flags.DV)
            dv = accumulate(weights, dout, dv)
            dp = warpgroup_mma_wait(DV_MATMULS, deps=(dp,))
            ds = compute_ds(s, p, dp, rules, flags, DTYPE)
            ds_slot = wait_free(barriers.ds_free, i, flags.DS_STAGES)
            memory.ds.index(ds_slot).slice(OFFSET, 64).store(ds)
            if TIGHT:
                fence_and_arrive(barriers.ds_full.index(ds_slot))
            dk = accumulate(ds, q, dk)
            if not TIGHT:
                fence_and_arrive(barriers.ds_full.index(ds_slot))
            if TIGHT:
                dk, dv = wait_matmuls(0, dk, dv)
            else:  # the next tile's scores; after the last tile they are computed from stale data and discarded
                if i + 1 < steps:
                    wait_full(barriers.q_full, i + 1, STAGES)
                s = start_scores(k_half, memory, (i + 1) % STAGES, zero, selector, flags)
                dk, dv, s = wait_matmuls(0, dk, dv, s)
        else:
            skip_tile(memory, barriers, i, flags, S_LAYOUT, DTYPE, CONSUMER_ID)
        arrive_per_thread(barriers.q_free.index(slot))
    store_gradients(dk, dv, memory, barriers, tile, outputs, rules, flags, key, key_ok, steps, CONSUMER_ID)


@gluon.jit
def query_bounds(key, tile, rules):
    """Return the first and the last position of the queries that see each key, and whether the key is in the tile.

    A query sees keys past the end of the tile by neither bound. Only bounds that the mask has occupy registers in the loop.
    """
    lo, hi = visible_queries(position(key, rules.k_at), rules.mask, tile.b)
    key_ok = key < tile.end_key
    if rules.mask.right is not None or rules.mask.starts is not None:
        lo = gl.where(key_ok, lo, MAX_POSITION)
    elif rules.mask.left is not None:
        hi = gl.where(key_ok, hi, -MAX_POSITION)
    return lo, hi, key_ok


@gluon.jit
def start_scores(k_half, memory, slot, zero, selector, flags: gl.constexpr):
    """Start the scores of 64 keys and the queries of a slot, minus lse."""
    return matmul_minus_stats(k_half, select(memory.q, slot), zero, selector, memory.stats.index(2 * slot), flags.D)


@gluon.jit
def skip_tile(memory, barriers, i, flags: gl.constexpr, S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Pass the turn to the other consumer and store a dS of zeros: this one's keys see no query of the tile."""
    arrive_per_thread(barriers.exchange[1 - CONSUMER_ID].index(0))
    ds_slot = wait_free(barriers.ds_free, i, flags.DS_STAGES)
    memory.ds.index(ds_slot).slice(CONSUMER_ID * 64, 64).store(gl.zeros([64, 64], DTYPE, S_LAYOUT))
    fence_and_arrive(barriers.ds_full.index(ds_slot))


@gluon.jit
def recompute_weights(
    s, marks, lo, hi, memory, slot, tile, rules, flags: gl.constexpr, OFFSET: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Turn scores into (s, weights as operand for dv, weights as they wait for dS); with softcap, s is the tanh."""
    QUERIES: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    LOW_BOUND: gl.constexpr = rules.mask.right is not None or rules.mask.starts is not None
    HIGH_BOUND: gl.constexpr = rules.mask.left is not None or rules.mask.starts is not None
    s, factor = exponents(s, rules.scale, rules.softcap, False)
    exponent = s * factor
    if rules.softcap is not None:
        exponent -= memory.lse.index(slot).load(QUERIES)[None, :]
    p = gl.exp2(exponent)
    # Cast before the mask: the compiler moves nothing across the mask's branch, and conversions overlap exponentials.
    if CAST_BEFORE_MASK:
        weights, p = cast_weights(p, DTYPE, flags.TIGHT, flags.BIAS)
    if marks & 1 != 0:
        p_q = position(load_int(memory.tile_info, 3 * slot + 1) + memory.row_offsets.load(QUERIES), rules.q_at)
        if LOW_BOUND:
            visible = p_q[None, :] >= lo[:, None]
            if HIGH_BOUND:
                visible &= p_q[None, :] <= hi[:, None]
        elif HIGH_BOUND:
            visible = p_q[None, :] <= hi[:, None]
        else:  # row offsets again from shared memory: the loop has no register for the comparison
            keys = tile.first_key + OFFSET + memory.row_offsets.load(gl.SliceLayout(1, s.type.layout))
            visible = (keys < tile.end_key)[:, None]
        p = gl.where(visible, p, 0.0)
        if CAST_BEFORE_MASK:
            weights = gl.where(visible, weights, 0.0)
    if not CAST_BEFORE_MASK:
        weights, p = cast_weights(p, DTYPE, flags.TIGHT, flags.BIAS)
    return s, weights, p


@gluon.jit
def compute_ds(s, p, dp, rules, flags: gl.constexpr, DTYPE: gl.constexpr):
    """Return dS = p · dP; with softcap also times the slope of tanh."""
    ds = p.to(gl.float32) * dp
    if flags.TIGHT and flags.BIAS == 0:
        ds *= 2.0**-14
    if rules.softcap is not None:
        ds *= 1 - s * s
    return ds.to(DTYPE)


@gluon.jit
def store_gradients(
    dk, dv, memory, barriers, tile, outputs, rules, flags: gl.constexpr, key, key_ok, steps, CONSUMER_ID: gl.constexpr,
):  # fmt: skip
    """Scale and store dk and dv of a consumer's keys."""
    dk_scale, dv_scale = rules.scale * 2.0**-flags.BIAS, 2.0**-flags.BIAS
    if flags.TAIL_D > 0:
        store_dk(dk[1] * dk_scale, outputs, tile, key, key_ok, flags.BLOCK_D, flags)
    if flags.TAIL_DV > 0:
        store_dv(dv[1] * dv_scale, outputs, tile, key, key_ok, flags.BLOCK_DV, flags)
    dk, dv = dk[0] * dk_scale, dv[0] * dv_scale
    first_key = tile.first_key + CONSUMER_ID * 64
    if outputs.dk_tiles is None:
        store_dk(dk, outputs, tile, key, key_ok, 0, flags)
        store_dv(dv, outputs, tile, key, key_ok, 0, flags)
    elif ((first_key + 64 <= tile.end_key) | (tile.end_key == row_count(rules.k_at))) if outputs.dk is not None else True:
        store_by_tma(dk, dv, outputs, memory, barriers.q_free, tile, first_key, steps, CONSUMER_ID)
    else:  # another document begins within these rows
        store_dk(dk, outputs, tile, key, key_ok, 0, flags)
        store_dv(dv, outputs, tile, key, key_ok, 0, flags)


@gluon.jit
def store_by_tma(dk, dv, outputs, memory, q_free, tile, first_key, steps, CONSUMER_ID: gl.constexpr):
    """Store dk and dv by TMA through shared memory that is no longer needed."""
    v_tile, q_tile, dout_tile = memory.v[0], memory.q[0], memory.dout[0]  # one chunk
    STAGES: gl.constexpr = q_tile.shape[0]
    # Only this consumer reads its half of v. The next slot of q and dout is free once all have read it. If the other consumer's
    # scores run one tile ahead, they read dk from there and are discarded.
    v_half = v_tile.index(CONSUMER_ID)
    v_half.reshape([64, dv.shape[1]]).store(dv.to(q_tile.dtype))
    fence_async_shared()
    tma_store(outputs.dv_tiles, [tile.b, tile.kv_head, first_key, 0], v_half)
    slot = wait_free(q_free, steps, STAGES)
    dk_slot = q_tile.index(slot) if CONSUMER_ID == 0 else dout_tile.index(slot)
    dk_slot.reshape([64, dk.shape[1]]).store(dk.to(q_tile.dtype))
    fence_async_shared()
    tma_store(outputs.dk_tiles, [tile.b, tile.kv_head, first_key, 0], dk_slot)
    tma.store_wait(0)


@gluon.jit
def stats_selector(S_LAYOUT: gl.constexpr):
    """Operand (64, 16) with -1 in columns 0 … 2: times backward_producer.split_in_three it subtracts a value per query."""
    MINUS: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    column = gl.arange(0, 16, gl.SliceLayout(0, MINUS))[None, :] + gl.zeros([64, 16], gl.int32, MINUS)
    return gl.where(column < 3, -1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def matmul_minus_stats(rows, tile, zero, selector, stats, WIDTH: gl.constexpr):
    """Start rows · tileᵀ minus each query's lse or delta, (keys, queries): rows of k or v, a tile of q or dout."""
    product = multiply_transposed(rows, tile, zero, WIDTH)
    return warpgroup_mma(selector, stats.permute((1, 0)), product, is_async=True)


@gluon.jit
def cast_weights(p, DTYPE: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr):
    """Return the weights as the operand for dv, and as they wait for dS."""
    weights = p.to(DTYPE)
    if TIGHT:
        if BIAS == 0:
            p *= 2.0**14
        p = p.to(gl.float16)
    return weights, p


@gluon.jit
def fence_and_arrive(full):
    """Signal that a tile is written; the fence makes it visible to matmuls and to the TMA."""
    fence_async_shared()
    arrive_per_thread(full)


@gluon.jit
def store_dk(dk, outputs, tile, key, key_ok, FIRST: gl.constexpr, flags: gl.constexpr):
    """Store columns of dk from column FIRST on."""
    store_columns(dk, outputs.dk, outputs.dk_strides, tile.b, tile.kv_head, key, key_ok, FIRST, flags.D, flags.ADD)


@gluon.jit
def store_dv(dv, outputs, tile, key, key_ok, FIRST: gl.constexpr, flags: gl.constexpr):
    """Store columns of dv from column FIRST on."""
    store_columns(dv, outputs.dv, outputs.dv_strides, tile.b, tile.kv_head, key, key_ok, FIRST, flags.DV, flags.ADD)


@gluon.jit
def store_columns(
    value, pointer, strides, b, h, row, row_ok, FIRST: gl.constexpr, COLUMNS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store columns of dk or dv from column FIRST on; the tensor has COLUMNS."""
    LAYOUT: gl.constexpr = value.type.layout
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    column = FIRST + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    is_valid = gl.convert_layout(row_ok, gl.SliceLayout(1, LAYOUT))[:, None] & (column < COLUMNS)[None, :]
    pointers = (
        pointer + b.to(gl.int64) * strides.batch + h.to(gl.int64) * strides.head + row[:, None] * strides.row + column[None, :]
    )
    if ADD:
        value += gl.load(pointers, mask=is_valid, other=0.0)
    gl.store(pointers, value.to(pointer.dtype.element_ty), mask=is_valid)
