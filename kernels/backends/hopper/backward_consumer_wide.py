"""The two consumers of Hopper's backward above head dim 128, where a program has 64 keys (see hopper_backward.py).

Registers do not hold dk and dv of all columns, so each consumer has half of these, for which both need all weights and all dS.
`weigh` works out weights, `derive` dS from them, at the same time as the other's scores. They are handed over in one place of
shared memory: weights come first, in fp16 (see hopper_backward.py), and each thread of `derive` puts dS where it read weights,
for `weigh` and the collector.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringspan.kernels.backends.hopper.backward_consumer import hand_on, minus_thirds, product, write
from ringspan.kernels.backends.hopper.common import arrive_each, number, product_layout, wait_free, wait_full
from ringspan.kernels.backends.triton.common import EVERYWHERE, exponents, position, queries_of, row_count


@gluon.jit
def weigh(
    tiles, flags, keys, gradients, options,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Scores and weights, and of dk and dv the left columns."""
    k_tile, _v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, facts, rows = tiles
    kv_full, between, full_at, free_at, ds_full, ds_free = flags
    b, kv_head, first_key, _until, begin, end = keys
    dk_to, _dk_tiles, dv_to, _dv_tiles, dk_strides, dv_strides = gradients
    mask, q_at, k_at, scale, softcap = options
    WIDTH: gl.constexpr = BLOCK_D // 2
    WIDTH_V: gl.constexpr = BLOCK_DV // 2
    S_LAYOUT: gl.constexpr = product_layout(64)
    K_LAYOUT: gl.constexpr = product_layout(WIDTH)
    V_LAYOUT: gl.constexpr = product_layout(WIDTH_V)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = q_tile.dtype
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    minus = minus_thirds(S_LAYOUT)
    dk = gl.zeros([64, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([64, WIDTH_V], gl.float32, V_LAYOUT)
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    lo, hi = queries_of(position(key, k_at), mask, b)
    key_ok = key < row_count(k_at)
    hi = gl.where(key_ok, hi, -EVERYWHERE)
    steps = GROUP * (end - begin)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero
    if steps > 0:
        wait_full(full_at, 0, STAGES)
        s = product(k_tile.index(0).reshape([64, BLOCK_D]), q_tile.index(0), zero, minus, stats.index(0), BLOCK_D)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        k_mine = k_tile.index(i >> 30).reshape([64, BLOCK_D])  # 0, which the compiler must not know: see hopper_keys.py
        place = i % STAGES
        marks = number(facts, 3 * place + 2)
        s, factor = exponents(s, scale, softcap, False)
        exponent = s * factor
        if softcap is not None:
            exponent -= lse_tile.index(place).load(QUERIES)[None, :]
        p = gl.exp2(exponent)
        if marks & 1 != 0:
            p_q = position(number(facts, 3 * place + 1) + rows.load(QUERIES), q_at)
            visible = p_q[None, :] <= hi[:, None]
            if mask[1] is not None or mask[2] is not None:
                visible &= p_q[None, :] >= lo[:, None]
            p = gl.where(visible, p, 0.0)
        weights = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, V_LAYOUT, 2))
        if BIAS == 0:
            p *= 2.0**14
        ds_place = wait_free(ds_free, i, DS_STAGES)
        ds_tile.index(ds_place).store(p.to(gl.float16).to(DTYPE, bitcast=True))
        hand_on(between[0].index(ds_place))
        if softcap is not None:  # dS needs its slope too: when the weights have been read
            slope = (1 - s * s).to(gl.float16)
            mbarrier.wait(between[1].index(ds_place), (i // DS_STAGES) & 1)
            ds_tile.index(ds_place).store(slope.to(DTYPE, bitcast=True))
            hand_on(between[0].index(ds_place))
        dout = dout_tile.index(place).reshape([64, BLOCK_DV]).slice(0, WIDTH_V, dim=1)
        dv = warpgroup_mma(weights, dout, dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        # the next tile's scores; behind the last tile they are of whatever is there, and dropped
        if i + 1 < steps:
            wait_full(full_at, i + 1, STAGES)
        after = (i + 1) % STAGES
        s = product(k_mine, q_tile.index(after), zero, minus, stats.index(2 * after), BLOCK_D)
        wait_full(ds_full, i, DS_STAGES)
        q = q_tile.index(place).reshape([64, BLOCK_D]).slice(0, WIDTH, dim=1)
        dk = warpgroup_mma(ds_tile.index(ds_place), q, dk, is_async=True)
        dk, s = warpgroup_mma_wait(0, deps=(dk, s))
        arrive_each(free_at.index(place))
    write(dk * (scale * 2.0**-BIAS), dk_to, dk_strides, b, kv_head, key, key_ok, 0, D, WIDTH, K_LAYOUT, ADD)
    write(dv * 2.0**-BIAS, dv_to, dv_strides, b, kv_head, key, key_ok, 0, DV, WIDTH_V, V_LAYOUT, ADD)


@gluon.jit
def derive(
    tiles, flags, keys, gradients, options,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, DS_STAGES: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Gradients of weights and dS, and of dk and dv the right columns."""
    _k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, _lse_tile, _facts, _rows = tiles
    kv_full, between, full_at, free_at, ds_full, _ds_free = flags
    b, kv_head, first_key, _until, begin, end = keys
    dk_to, _dk_tiles, dv_to, _dv_tiles, dk_strides, dv_strides = gradients
    _mask, _q_at, k_at, scale, softcap = options
    WIDTH: gl.constexpr = BLOCK_D // 2
    WIDTH_V: gl.constexpr = BLOCK_DV // 2
    S_LAYOUT: gl.constexpr = product_layout(64)
    K_LAYOUT: gl.constexpr = product_layout(WIDTH)
    V_LAYOUT: gl.constexpr = product_layout(WIDTH_V)
    DTYPE: gl.constexpr = q_tile.dtype
    HANDED: gl.constexpr = 1 if softcap is None else 2  # tiles for each of queries
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    minus = minus_thirds(S_LAYOUT)
    dk = gl.zeros([64, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([64, WIDTH_V], gl.float32, V_LAYOUT)
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    key_ok = key < row_count(k_at)
    mbarrier.wait(kv_full.index(0), 0)
    for i in range(GROUP * (end - begin)):
        v_mine = v_tile.index(i >> 30).reshape([64, BLOCK_DV])
        place = wait_full(full_at, i, STAGES)
        dp = product(v_mine, dout_tile.index(place), zero, minus, stats.index(2 * place + 1), BLOCK_DV)
        ds_place = i % DS_STAGES
        mine = ds_tile.index(ds_place)
        mbarrier.wait(between[0].index(ds_place), (HANDED * (i // DS_STAGES)) & 1)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        p = mine.load(S_LAYOUT).to(gl.float16, bitcast=True)
        weights = p.to(gl.float32)
        if BIAS == 0:
            weights *= 2.0**-14
        ds = weights * dp
        if softcap is not None:
            arrive_each(between[1].index(ds_place))
            mbarrier.wait(between[0].index(ds_place), 1)
            ds *= mine.load(S_LAYOUT).to(gl.float16, bitcast=True).to(gl.float32)
        ds = ds.to(DTYPE)
        mine.store(ds)
        hand_on(ds_full.index(ds_place))
        dout = dout_tile.index(place).reshape([64, BLOCK_DV]).slice(WIDTH_V, WIDTH_V, dim=1)
        dv = warpgroup_mma(gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, V_LAYOUT, 2)), dout, dv, is_async=True)
        q = q_tile.index(place).reshape([64, BLOCK_D]).slice(WIDTH, WIDTH, dim=1)
        dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, K_LAYOUT, 2)), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        arrive_each(free_at.index(place))
    write(dk * (scale * 2.0**-BIAS), dk_to, dk_strides, b, kv_head, key, key_ok, WIDTH, D, WIDTH, K_LAYOUT, ADD)
    write(dv * 2.0**-BIAS, dv_to, dv_strides, b, kv_head, key, key_ok, WIDTH_V, DV, WIDTH_V, V_LAYOUT, ADD)
