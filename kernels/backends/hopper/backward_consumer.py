"""Consumers of Hopper's backward at head dims up to 128 (see backward.py), and helpers of all its consumers.

Each of the two warpgroups owns 64 of the 128 keys: their weights, dS, dk and dv.

    TIGHT (head dim 128)                                       not TIGHT (head dim 64)
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
from ringspan.kernels.backends.hopper.common import accumulator_layout, arrive_per_thread, load_int, wait_free, wait_full
from ringspan.kernels.backends.triton.common import MAX_POSITION, exponents, position, row_count, visible_queries
from ringspan.kernels.runtime.triton_compat import CAST_BEFORE_MASK, tma_store


@gluon.jit
def consume_keys(
    buffers, barriers, key_range, gradients, options, CONSUMER_ID: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    TAIL_DV: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr,
    GROUP: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Compute dS, dk and dv of 64 keys."""
    k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, tile_info, row_offsets = buffers
    kv_full, exchange, q_full, q_free, ds_full, ds_free = barriers
    b, kv_head, first_key, tile_end, begin, end = key_range
    dk_out, dk_tiles, dv_out, dv_tiles, dk_strides, dv_strides = gradients
    mask, q_at, k_at, scale, softcap = options
    S_LAYOUT: gl.constexpr = accumulator_layout(64)
    DV_MATMULS: gl.constexpr = 1 if TAIL_DV == 0 else 2
    DTYPE: gl.constexpr = q_tile[0].dtype
    KEYS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    SKIPS_TILES: gl.constexpr = TIGHT
    ALTERNATES: gl.constexpr = TIGHT
    OFFSET: gl.constexpr = CONSUMER_ID * 64
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    selector = stats_selector(S_LAYOUT)
    dk = zero_accumulators(BLOCK_D, TAIL_D)
    dv = zero_accumulators(BLOCK_DV, TAIL_DV)
    key = first_key + OFFSET + gl.arange(0, 64, KEYS)
    lo, hi = visible_queries(position(key, k_at), mask, b)
    key_ok = key < tile_end
    # A query sees keys past the end of the tile by neither bound. Only bounds that the mask has occupy registers in the loop.
    LOW_BOUND: gl.constexpr = mask[1] is not None or mask[2] is not None
    HIGH_BOUND: gl.constexpr = mask[0] is not None or mask[2] is not None
    if LOW_BOUND:
        lo = gl.where(key_ok, lo, MAX_POSITION)
    elif HIGH_BOUND:
        hi = gl.where(key_ok, hi, -MAX_POSITION)
    steps = GROUP * (end - begin)
    mbarrier.wait(kv_full.index(0), 0)
    v_operand = select(v_tile, CONSUMER_ID)
    if not TIGHT:  # in registers, which halves the shared memory reads of the matmul for dP
        v_operand = load_operand(v_operand, gl.DotOperandLayout(0, S_LAYOUT, 2))
    s = zero  # with TIGHT unused; the loop needs an initial value
    if not TIGHT and steps > 0:
        wait_full(q_full, 0, STAGES)
        k_half = select_rows(k_tile, 0, OFFSET)
        s = matmul_minus_stats(k_half, select(q_tile, 0), zero, selector, stats.index(0))
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        k_half = select_rows(k_tile, 0, OFFSET)
        v_half = v_operand
        if TIGHT:
            # 0, which the compiler cannot know: otherwise it keeps the address of each slice of k and v in a register
            opaque_zero = i >> 30
            k_half = select_rows(k_tile, opaque_zero, OFFSET)
            v_half = select(v_tile, opaque_zero + CONSUMER_ID)
        slot = i % STAGES
        q = select(q_tile, slot)
        dout = select(dout_tile, slot)
        if ALTERNATES:
            mbarrier.wait(exchange[CONSUMER_ID].index(0), (i & 1) ^ (1 - CONSUMER_ID))  # consumer 0 starts
        if TIGHT:
            wait_full(q_full, i, STAGES)
        marks = load_int(tile_info, 3 * slot + 2)
        # near the diagonal a tile's queries may see only the other consumer's keys
        if (marks & (2 << CONSUMER_ID) if SKIPS_TILES else 1) != 0:
            if TIGHT:
                s = matmul_minus_stats(k_half, q, zero, selector, stats.index(2 * slot))
                s = warpgroup_mma_wait(0, deps=(s,))
                if ALTERNATES:
                    arrive_per_thread(exchange[1 - CONSUMER_ID].index(0))
            else:
                dp = matmul_minus_stats(v_half, dout, zero, selector, stats.index(2 * slot + 1))
            s, factor = exponents(s, scale, softcap, False)
            exponent = s * factor
            if softcap is not None:
                exponent -= lse_tile.index(slot).load(QUERIES)[None, :]
            p = gl.exp2(exponent)
            # Cast before the mask: the compiler moves nothing across the mask's branch, and conversions overlap exponentials.
            if CAST_BEFORE_MASK:
                weights, p = cast_weights(p, DTYPE, TIGHT, BIAS)
            if marks & 1 != 0:
                p_q = position(load_int(tile_info, 3 * slot + 1) + row_offsets.load(QUERIES), q_at)
                if LOW_BOUND:
                    visible = p_q[None, :] >= lo[:, None]
                    if HIGH_BOUND:
                        visible &= p_q[None, :] <= hi[:, None]
                elif HIGH_BOUND:
                    visible = p_q[None, :] <= hi[:, None]
                else:  # row offsets again from shared memory: the loop has no register for the comparison
                    visible = (first_key + OFFSET + row_offsets.load(KEYS) < tile_end)[:, None]
                p = gl.where(visible, p, 0.0)
                if CAST_BEFORE_MASK:
                    weights = gl.where(visible, weights, 0.0)
            if not CAST_BEFORE_MASK:
                weights, p = cast_weights(p, DTYPE, TIGHT, BIAS)
            weights = gl.convert_layout(weights, gl.DotOperandLayout(0, dv[0].type.layout, 2))
            if TIGHT:
                dp = matmul_minus_stats(v_half, dout, zero, selector, stats.index(2 * slot + 1))
            dv = accumulate(weights, dout, dv)
            dp = warpgroup_mma_wait(DV_MATMULS, deps=(dp,))
            ds = p.to(gl.float32) * dp
            if TIGHT and BIAS == 0:
                ds *= 2.0**-14
            if softcap is not None:
                ds *= 1 - s * s
            ds = ds.to(DTYPE)
            ds_slot = wait_free(ds_free, i, DS_STAGES)
            ds_tile.index(ds_slot).slice(OFFSET, 64).store(ds)
            if TIGHT:
                fence_and_arrive(ds_full.index(ds_slot))
            dk = accumulate(ds, q, dk)
            if not TIGHT:
                fence_and_arrive(ds_full.index(ds_slot))
            if TIGHT:
                dk, dv = wait_matmuls(0, dk, dv)
            else:  # the next tile's scores; after the last tile they are computed from stale data and discarded
                if i + 1 < steps:
                    wait_full(q_full, i + 1, STAGES)
                next_slot = (i + 1) % STAGES
                s = matmul_minus_stats(k_half, select(q_tile, next_slot), zero, selector, stats.index(2 * next_slot))
                dk, dv, s = wait_matmuls(0, dk, dv, s)
        else:
            if ALTERNATES:
                arrive_per_thread(exchange[1 - CONSUMER_ID].index(0))
            ds_slot = wait_free(ds_free, i, DS_STAGES)
            ds_tile.index(ds_slot).slice(OFFSET, 64).store(gl.zeros([64, 64], DTYPE, S_LAYOUT))
            fence_and_arrive(ds_full.index(ds_slot))
        arrive_per_thread(q_free.index(slot))
    if TAIL_D > 0:
        store_columns(dk[1] * (scale * 2.0**-BIAS), dk_out, dk_strides, b, kv_head, key, key_ok, BLOCK_D, D, ADD)
    if TAIL_DV > 0:
        store_columns(dv[1] * 2.0**-BIAS, dv_out, dv_strides, b, kv_head, key, key_ok, BLOCK_DV, DV, ADD)
    dk, dv = dk[0] * (scale * 2.0**-BIAS), dv[0] * 2.0**-BIAS
    if dk_tiles is None:
        store_columns(dk, dk_out, dk_strides, b, kv_head, key, key_ok, 0, D, ADD)
        store_columns(dv, dv_out, dv_strides, b, kv_head, key, key_ok, 0, DV, ADD)
    elif ((first_key + OFFSET + 64 <= tile_end) | (tile_end == row_count(k_at))) if dk_out is not None else True:
        store_by_tma(dk, dv, dk_tiles, dv_tiles, buffers, q_free, [b, kv_head, first_key + OFFSET, 0], steps, CONSUMER_ID)
    else:  # another document begins within these rows
        store_columns(dk, dk_out, dk_strides, b, kv_head, key, key_ok, 0, D, ADD)
        store_columns(dv, dv_out, dv_strides, b, kv_head, key, key_ok, 0, DV, ADD)


@gluon.jit
def store_by_tma(dk, dv, dk_tiles, dv_tiles, buffers, q_free, coordinates, steps, CONSUMER_ID: gl.constexpr):
    """Store dk and dv by TMA through shared memory that is no longer needed."""
    v_tile, q_tile, dout_tile = buffers[1][0], buffers[2][0], buffers[3][0]  # one chunk
    STAGES: gl.constexpr = q_tile.shape[0]
    # Only this consumer reads its half of v. The next slot of q and dout is free once all have read it. If the other consumer's
    # scores run one tile ahead, they read dk from there and are discarded.
    v_half = v_tile.index(CONSUMER_ID)
    v_half.reshape([64, dv.shape[1]]).store(dv.to(q_tile.dtype))
    fence_async_shared()
    tma_store(dv_tiles, coordinates, v_half)
    slot = wait_free(q_free, steps, STAGES)
    dk_slot = q_tile.index(slot) if CONSUMER_ID == 0 else dout_tile.index(slot)
    dk_slot.reshape([64, dk.shape[1]]).store(dk.to(q_tile.dtype))
    fence_async_shared()
    tma_store(dk_tiles, coordinates, dk_slot)
    tma.store_wait(0)


@gluon.jit
def stats_selector(S_LAYOUT: gl.constexpr):
    """Operand (64, 16) with -1 in columns 0 … 2: times backward_producer.split_in_three it subtracts a value per query."""
    MINUS: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    column = gl.arange(0, 16, gl.SliceLayout(0, MINUS))[None, :] + gl.zeros([64, 16], gl.int32, MINUS)
    return gl.where(column < 3, -1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def matmul_minus_stats(rows, tile, zero, selector, stats):
    """Start rows · tileᵀ minus each query's lse or delta, (keys, queries): rows of k or v, a tile of q or dout."""
    product = multiply_transposed(rows, tile, zero)
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
def store_columns(
    value, pointer, strides, b, h, row, row_ok, FIRST: gl.constexpr, COLUMNS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store columns of dk or dv from column FIRST on; the tensor has COLUMNS."""
    LAYOUT: gl.constexpr = value.type.layout
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    column = FIRST + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    is_valid = gl.convert_layout(row_ok, gl.SliceLayout(1, LAYOUT))[:, None] & (column < COLUMNS)[None, :]
    pointers = pointer + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[2] + row[:, None] * strides[1] + column[None, :]
    if ADD:
        value += gl.load(pointers, mask=is_valid, other=0.0)
    gl.store(pointers, value.to(pointer.dtype.element_ty), mask=is_valid)
