"""The two consumers of Hopper's backward at head dims up to 128 (see hopper_backward.py), and what all its consumers need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringspan.kernels.backends.hopper.common import arrive_each, number, product_layout, wait_free, wait_full
from ringspan.kernels.backends.triton.common import EVERYWHERE, exponents, position, queries_of, row_count
from ringspan.kernels.runtime.triton_compat import PAIRS_GO_THROUGH_BRANCHES, tma_store


@gluon.jit
def share_keys(
    tiles, flags, keys, gradients, options, ME: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """64 of 128 keys: both their weights and these' gradients."""
    k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, facts, rows = tiles
    kv_full, between, full_at, free_at, ds_full, ds_free = flags
    b, kv_head, first_key, until, begin, end = keys
    dk_to, dk_tiles, dv_to, dv_tiles, dk_strides, dv_strides = gradients
    mask, q_at, k_at, scale, softcap = options
    S_LAYOUT: gl.constexpr = product_layout(64)
    K_LAYOUT: gl.constexpr = product_layout(BLOCK_D)
    V_LAYOUT: gl.constexpr = product_layout(BLOCK_DV)
    KEYS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LEAVES_OUT: gl.constexpr = TIGHT
    ALTERNATES: gl.constexpr = TIGHT  # in working out scores
    FIRST: gl.constexpr = ME * 64  # of its keys
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    minus = minus_thirds(S_LAYOUT)
    dk = gl.zeros([64, BLOCK_D], gl.float32, K_LAYOUT)
    dv = gl.zeros([64, BLOCK_DV], gl.float32, V_LAYOUT)
    key = first_key + FIRST + gl.arange(0, 64, KEYS)
    lo, hi = queries_of(position(key, k_at), mask, b)
    key_ok = key < until
    hi = gl.where(key_ok, hi, -EVERYWHERE)
    steps = GROUP * (end - begin)
    mbarrier.wait(kv_full.index(0), 0)
    v_held = v_tile.index(ME).reshape([64, BLOCK_DV])
    if not TIGHT:  # in registers: dP's products then read half as much from shared memory
        v_held = v_held.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    s = zero  # if TIGHT, only so that the loop has one
    if not TIGHT and steps > 0:
        wait_full(full_at, 0, STAGES)
        k_mine = k_tile.index(0).reshape([128, BLOCK_D]).slice(FIRST, 64)
        s = product(k_mine, q_tile.index(0), zero, minus, stats.index(0), BLOCK_D)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        k_mine = k_tile.index(0).reshape([128, BLOCK_D]).slice(FIRST, 64)
        v_mine = v_held
        if TIGHT:
            only = i >> 30  # 0, but the compiler must not know: else it would keep where each slice of k and v begins
            k_mine = k_tile.index(only).reshape([128, BLOCK_D]).slice(FIRST, 64)
            v_mine = v_tile.index(only + ME).reshape([64, BLOCK_DV])
        place = i % STAGES
        q = q_tile.index(place).reshape([64, BLOCK_D])
        dout = dout_tile.index(place).reshape([64, BLOCK_DV])
        if ALTERNATES:
            mbarrier.wait(between[ME].index(0), (i & 1) ^ (1 - ME))  # consumer 0 begins
        if TIGHT:
            wait_full(full_at, i, STAGES)
        marks = number(facts, 3 * place + 2)
        # At a diagonal a tile's queries may see the other consumer's keys alone.
        if (marks & (2 << ME) if LEAVES_OUT else 1) != 0:
            if TIGHT:
                s = product(k_mine, q_tile.index(place), zero, minus, stats.index(2 * place), BLOCK_D)
                s = warpgroup_mma_wait(0, deps=(s,))
                if ALTERNATES:
                    arrive_each(between[1 - ME].index(0))
            else:
                dp = product(v_mine, dout_tile.index(place), zero, minus, stats.index(2 * place + 1), BLOCK_DV)
            s, factor = exponents(s, scale, softcap, False)
            exponent = s * factor
            if softcap is not None:
                exponent -= lse_tile.index(place).load(QUERIES)[None, :]
            p = gl.exp2(exponent)
            # To 16 bits before the mask, whose branch the compiler moves nothing across: so conversions fill the time that
            # exponentials take.
            if PAIRS_GO_THROUGH_BRANCHES:
                weights, p = narrow(p, q_tile.dtype, TIGHT, BIAS)
            if marks & 1 != 0:
                p_q = position(number(facts, 3 * place + 1) + rows.load(QUERIES), q_at)
                visible = p_q[None, :] <= hi[:, None]
                if mask[1] is not None or mask[2] is not None:
                    visible &= p_q[None, :] >= lo[:, None]
                p = gl.where(visible, p, 0.0)
                if PAIRS_GO_THROUGH_BRANCHES:
                    weights = gl.where(visible, weights, 0.0)
            if not PAIRS_GO_THROUGH_BRANCHES:
                weights, p = narrow(p, q_tile.dtype, TIGHT, BIAS)
            weights = gl.convert_layout(weights, gl.DotOperandLayout(0, V_LAYOUT, 2))
            if TIGHT:
                dp = product(v_mine, dout_tile.index(place), zero, minus, stats.index(2 * place + 1), BLOCK_DV)
            dv = warpgroup_mma(weights, dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = p.to(gl.float32) * dp
            if TIGHT and BIAS == 0:
                ds *= 2.0**-14
            if softcap is not None:
                ds *= 1 - s * s
            ds = ds.to(q_tile.dtype)
            ds_place = wait_free(ds_free, i, DS_STAGES)
            ds_tile.index(ds_place).slice(FIRST, 64).store(ds)
            if TIGHT:
                hand_on(ds_full.index(ds_place))
            dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, K_LAYOUT, 2)), q, dk, is_async=True)
            if not TIGHT:
                hand_on(ds_full.index(ds_place))
            if TIGHT:
                dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            else:  # the next tile's scores; behind the last tile they are of whatever is there, and dropped
                if i + 1 < steps:
                    wait_full(full_at, i + 1, STAGES)
                after = (i + 1) % STAGES
                s = product(k_mine, q_tile.index(after), zero, minus, stats.index(2 * after), BLOCK_D)
                dk, dv, s = warpgroup_mma_wait(0, deps=(dk, dv, s))
        else:
            if ALTERNATES:
                arrive_each(between[1 - ME].index(0))
            ds_place = wait_free(ds_free, i, DS_STAGES)
            ds_tile.index(ds_place).slice(FIRST, 64).store(gl.zeros([64, 64], q_tile.dtype, S_LAYOUT))
            hand_on(ds_full.index(ds_place))
        arrive_each(free_at.index(place))
    dk *= scale * 2.0**-BIAS
    dv *= 2.0**-BIAS
    if dk_tiles is None:
        write(dk, dk_to, dk_strides, b, kv_head, key, key_ok, 0, D, BLOCK_D, K_LAYOUT, ADD)
        write(dv, dv_to, dv_strides, b, kv_head, key, key_ok, 0, DV, BLOCK_DV, V_LAYOUT, ADD)
    elif ((first_key + FIRST + 64 <= until) | (until == row_count(k_at))) if dk_to is not None else True:
        send(dk, dv, dk_tiles, dv_tiles, tiles, free_at, [b, kv_head, first_key + FIRST, 0], steps, ME)
    else:  # another document begins among these rows
        write(dk, dk_to, dk_strides, b, kv_head, key, key_ok, 0, D, BLOCK_D, K_LAYOUT, ADD)
        write(dv, dv_to, dv_strides, b, kv_head, key, key_ok, 0, DV, BLOCK_DV, V_LAYOUT, ADD)


@gluon.jit
def send(dk, dv, dk_tiles, dv_tiles, tiles, free_at, at, steps, ME: gl.constexpr):
    """dk and dv to memory, through places that nobody needs any more."""
    _k_tile, v_tile, q_tile, dout_tile, _ds_tile, _stats, _lse_tile, _facts, _rows = tiles
    STAGES: gl.constexpr = q_tile.shape[0]
    # Its half of v is read by nobody else; the next place of q and dout is free once all have read what stood there. (The
    # other consumer's scores, if they run a tile ahead, are then of whatever is there, and dropped.)
    v_mine = v_tile.index(ME)
    v_mine.reshape([64, dv.shape[1]]).store(dv.to(q_tile.dtype))
    fence_async_shared()
    tma_store(dv_tiles, at, v_mine)
    place = wait_free(free_at, steps, STAGES)
    free = q_tile.index(place) if ME == 0 else dout_tile.index(place)
    free.reshape([64, dk.shape[1]]).store(dk.to(q_tile.dtype))
    fence_async_shared()
    tma_store(dk_tiles, at, free)
    tma.store_wait(0)


@gluon.jit
def minus_thirds(S_LAYOUT: gl.constexpr):
    """Times the `thirds` of hopper_queries.py: what is taken away from each key's product."""
    MINUS: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    column = gl.arange(0, 16, gl.SliceLayout(0, MINUS))[None, :] + gl.zeros([64, 16], gl.int32, MINUS)
    return gl.where(column < 3, -1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def product(mine, tile, zero, minus, stats, WIDTH: gl.constexpr):
    """(keys, queries) of k or v with a tile of q or dout, less what each query's lse or delta is."""
    acc = warpgroup_mma(mine, tile.reshape([64, WIDTH]).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(minus, stats.permute((1, 0)), acc, is_async=True)


@gluon.jit
def narrow(p, DTYPE: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr):
    """Weights as dv's product takes them, and as they wait for dS."""
    weights = p.to(DTYPE)
    if TIGHT:
        if BIAS == 0:
            p *= 2.0**14
        p = p.to(gl.float16)
    return weights, p


@gluon.jit
def hand_on(full):
    """What was stored in shared memory, to a party whose products read it."""
    fence_async_shared()
    arrive_each(full)


@gluon.jit
def write(
    value, to, strides, b, h, row, row_ok, FIRST: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """A consumer's WIDTH columns of dk or dv, from FIRST on, as far as there are COLUMNS."""
    row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ok = gl.convert_layout(row_ok, gl.SliceLayout(1, LAYOUT))[:, None] & (column < COLUMNS)[None, :]
    at = to + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[2] + row[:, None] * strides[1] + column[None, :]
    if ADD:
        value += gl.load(at, mask=ok, other=0.0)
    gl.store(at, value.to(to.dtype.element_ty), mask=ok)
