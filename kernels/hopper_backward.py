"""The backward for Hopper (sm_90), in Gluon: one pass with five products, where the portable one makes two passes with seven.

A program keeps BLOCK_N keys and streams the queries that see them, 64 at a time, over all heads of the group. Four parties
work beside each other and wait for nothing but each other's tiles in shared memory:

    produce      one warp: the TMA brings q and dout, the warp lse and delta (hopper_queries.py)
    consume      two warpgroups: scores, weights and their gradients dS; dk and dv stay in their registers
    collect      a warpgroup: dq = dS k needs the keys of both; the TMA adds it to an fp32 dq in memory (hopper_dq.py)

What passes through shared memory is what limits them. So lse and delta come as one more product, 16 wide, and not once for each
key: exp2(q k - lse) and dout v - delta are what the tensor cores leave.

Of 128 keys a consumer takes 64, and leaves out tiles whose queries see none of them; the two alternate in working out scores,
so that one's products run beside the other's exponentials. (Neither at small head dims, where scores run a tile ahead.) Above
head dim 128 its registers cannot hold their dk and dv: then a program has 64 keys, and a consumer half of the columns; both
work out the same scores, which costs two products more and saves them a meeting.

Scores are (keys, queries), so that weights and dS are operands as they stand, from registers. dq is added in the order in which
programs come by; in a deterministic backward they take turns (hopper_dq.py).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .block import Again, Block, Gradients
from .compat import PAIRS_GO_THROUGH_BRANCHES, tma_load, tma_store
from .hopper_arguments import backward_arguments
from .hopper_common import (
    arrive_each,
    barriers,
    fetchable,
    in_turn,
    number,
    wait_free,
    wait_full,
    without_padding,
)
from .hopper_dq import collect
from .hopper_queries import produce
from .hopper_tiles import tiles_for
from .launches import Known, Launch
from .mask import Bounds
from .triton_backward import add_up
from .triton_common import (
    ANY_SIZE,
    EVERYWHERE,
    exponents,
    mask_argument,
    position,
    queries_of,
    row_count,
    rows_below,
    rules,
    tile_range,
)


@gluon.jit(**ANY_SIZE)
def attention_backward(
    dout, q, k, v, dq, lse, delta, dk, dv, turns, lse_strides, delta_strides, dk_strides, dv_strides, turns_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, together, scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, DQ_WIDTH: gl.constexpr,
    TIGHT: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """dout, q, k, v and dq, and dk and dv if STAGED, are descriptors of (batch, head, row, column)."""
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [BLOCK_N // 64, 1, 1, 64, BLOCK_DV], v.layout)
    q_tile = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, 64, BLOCK_D], q.layout)
    dout_tile = gl.allocate_shared_memory(dout.dtype, [STAGES, 1, 1, 64, BLOCK_DV], dout.layout)
    ds_tile = gl.allocate_shared_memory(q.dtype, [DS_STAGES, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 2))
    dq_tile = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, 1, 1, 64, DQ_WIDTH], dq.layout)
    stats = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 16], gl.NVMMASharedLayout(32, 16, 2))  # lse, delta
    lse_tile = stats  # stands in where the product with it is enough
    if softcap is not None:
        lse_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of each place: head, first row, and marks: 1 if the mask splits it and, where tiles are left out, 2 if it sees keys of
    # consumer 0, 4 if of consumer 1. One number for all marks: while products read shared memory, each load from it waits long.
    facts = gl.allocate_shared_memory(gl.int32, [3 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # 0 … 63 in memory: as constants they would take registers that the loop needs
    rows.store(gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0])))
    kv_full, _kv_free = barriers(1, 1, 1)  # fetched once, so nobody frees it
    # where consumers alternate; each in memory of its own: of the same, Triton would stop a warpgroup between wait and arrival
    may_score_0, _ = barriers(1, 128, 1)
    may_score_1, _ = barriers(1, 128, 1)
    may_score = (may_score_0, may_score_1)
    full_at, free_at = barriers(STAGES, 2, 3 * 128)  # the producer arrives twice: bytes are coming, and statistics are there
    ds_full, ds_free = barriers(DS_STAGES, BLOCK_N // 64 * 128, 128)
    flags = (kv_full, may_score, full_at, free_at, ds_full, ds_free)

    # Apart only where dk and dv leave through shared memory: elsewhere registers are short, and this is arithmetic with them.
    sequence, turn = in_turn(gl.program_id(0), num_tiles, num_sequences, together, STAGED)
    first_key = turn * BLOCK_N  # the first keys, which most queries see under a causal mask, first
    b, kv_head = sequence // num_heads, sequence % num_heads
    # on their way while the tiles of queries are looked up
    mbarrier.expect(kv_full.index(0), k.block_type.nbytes + BLOCK_N // 64 * v.block_type.nbytes)
    tma_load(k, [b, kv_head, first_key, 0], kv_full.index(0), k_tile.index(0))
    for half in gl.static_range(BLOCK_N // 64):
        tma_load(v, [b, kv_head, first_key + half * 64, 0], kv_full.index(0), v_tile.index(half))
    n = row_count(k_at)
    first_lo, first_hi = queries_of(position(first_key, k_at), mask, b)
    last_lo, last_hi = queries_of(position(gl.minimum(first_key + BLOCK_N, n) - 1, k_at), mask, b)
    begin, full, rest, end = tile_range(
        first_lo, last_lo, first_hi, last_hi, q_at, 64, mask[1] is not None or mask[2] is not None
    )
    if first_key + BLOCK_N > n:  # behind the last key lse has nothing to say: every tile needs the compare
        full = end
        rest = end
    LEAVES_OUT: gl.constexpr = TIGHT and BLOCK_N == 128
    borders = (None, None)  # or: where queries of the lower 64 keys end, and where those of the upper begin
    if LEAVES_OUT:
        _, lower_hi = queries_of(position(first_key + 63, k_at), mask, b)
        upper_lo, _ = queries_of(position(first_key + 64, k_at), mask, b)
        borders = (rows_below(lower_hi + 1, q_at), rows_below(upper_lo, q_at))
    taking_turns = (None, None, None, None)  # or: whose turn, its stride of heads, ours, rows that the one before sees
    if turns is not None:
        _, before_hi = queries_of(position(gl.maximum(first_key, 1) - 1, k_at), mask, b)
        before_end = gl.where(turn > 0, rows_below(before_hi + 1, q_at), 0)
        taking_turns = (turns + b.to(gl.int64) * turns_strides[0], turns_strides[1], turn, before_end)
    consumed = (k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, facts, rows)
    keys = (b, kv_head, first_key, begin, end)
    gradients = (dk, dv, dk_strides, dv_strides)
    options = (mask, q_at, k_at, scale, softcap)
    statistics = (lse, delta, lse_strides, delta_strides, stats, lse_tile, facts, row_count(q_at), scale, softcap)
    # Where registers are tight weights wait as fp16, which is finer than the products' bf16 but ends at 6e-8: so they are kept
    # 2**14 times too large, as are dq, dk and dv until they are handed on. Powers of two, so nothing is rounded. (A weight of
    # 4 would be too large for it: lse has to be that of all keys, as it is in a backward.) With fp16 inputs, whose dS would
    # overflow, they are large only while they wait.
    BIAS: gl.constexpr = 14 if TIGHT and q.dtype == gl.bfloat16 else 0
    gl.warp_specialize([
        (consume, (
            consumed, flags, keys, gradients, options, 0,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, DS_STAGES, TIGHT, BIAS, GROUP, ADD, STAGED,
        )),
        (consume, (
            consumed, flags, keys, gradients, options, 1,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, DS_STAGES, TIGHT, BIAS, GROUP, ADD, STAGED,
        )),
        (collect, (
            dq, k_tile, ds_tile, dq_tile, facts, flags, taking_turns, b, begin, end, scale * 2.0**-BIAS,
            BLOCK_D, BLOCK_N, STAGES, DS_STAGES, DQ_STAGES, DQ_WIDTH, GROUP,
        )),
        (produce, (
            q, dout, q_tile, dout_tile, statistics, flags,
            b, kv_head, begin, full, rest, end, borders, STAGES, BIAS, GROUP,
        )),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip


@gluon.jit
def consume(
    tiles, flags, keys, gradients, options, ME: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr,
    GROUP: gl.constexpr, ADD: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, facts, rows = tiles
    kv_full, may_score, full_at, free_at, ds_full, ds_free = flags
    b, kv_head, first_key, begin, end = keys
    dk_to, dv_to, dk_strides, dv_strides = gradients
    mask, q_at, k_at, scale, softcap = options
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    WIDTH: gl.constexpr = BLOCK_D * BLOCK_N // 128  # columns of dk, and of dv, that a consumer has
    WIDTH_V: gl.constexpr = BLOCK_DV * BLOCK_N // 128
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH_V, 16])
    KEYS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    MINUS: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    HALVES: gl.constexpr = BLOCK_N == 64
    HANDS_ON: gl.constexpr = not HALVES or ME == 0  # dS; of two that work out the same one does
    LEAVES_OUT: gl.constexpr = TIGHT and BLOCK_N == 128
    ALTERNATES: gl.constexpr = LEAVES_OUT  # in working out scores
    FIRST: gl.constexpr = 0 if HALVES else ME * 64  # of its keys
    COLUMN: gl.constexpr = ME * WIDTH if HALVES else 0
    COLUMN_V: gl.constexpr = ME * WIDTH_V if HALVES else 0
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    column = gl.arange(0, 16, gl.SliceLayout(0, MINUS))[None, :] + gl.zeros([64, 16], gl.int32, MINUS)
    minus = gl.where(column < 3, -1.0, 0.0).to(gl.bfloat16)  # times `thirds`: what is taken away
    dk = gl.zeros([64, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([64, WIDTH_V], gl.float32, V_LAYOUT)
    key = first_key + FIRST + gl.arange(0, 64, KEYS)
    lo, hi = queries_of(position(key, k_at), mask, b)
    key_ok = key < row_count(k_at)
    hi = gl.where(key_ok, hi, -EVERYWHERE)
    steps = GROUP * (end - begin)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero  # if TIGHT, only so that the loop has one
    if not TIGHT and steps > 0:
        wait_full(full_at, 0, STAGES)
        k_mine = k_tile.index(0).reshape([BLOCK_N, BLOCK_D]).slice(FIRST, 64)
        s = product(k_mine, q_tile.index(0), zero, minus, stats.index(0), BLOCK_D)
        s = warpgroup_mma_wait(0, deps=(s,))
    for i in range(steps):
        # Where registers are tight, 0, but the compiler cannot know: else it would work out before the loop, and keep, where
        # each slice of k and v begins.
        only = i >> 30 if TIGHT else 0
        k_mine = k_tile.index(only).reshape([BLOCK_N, BLOCK_D]).slice(FIRST, 64)
        v_mine = v_tile.index(only + (0 if HALVES else ME)).reshape([64, BLOCK_DV])
        place = i % STAGES
        q = q_tile.index(place).reshape([64, BLOCK_D]).slice(COLUMN, WIDTH, dim=1)
        dout = dout_tile.index(place).reshape([64, BLOCK_DV]).slice(COLUMN_V, WIDTH_V, dim=1)
        if ALTERNATES:
            mbarrier.wait(may_score[ME].index(0), (i & 1) ^ (1 - ME))  # consumer 0 begins
        if TIGHT:
            wait_full(full_at, i, STAGES)
        marks = number(facts, 3 * place + 2)
        # At a diagonal a tile's queries may see the other consumer's keys alone.
        if (marks & (2 << ME) if LEAVES_OUT else 1) != 0:
            if TIGHT:
                s = product(k_mine, q_tile.index(place), zero, minus, stats.index(2 * place), BLOCK_D)
                s = warpgroup_mma_wait(0, deps=(s,))
                if ALTERNATES:
                    arrive_each(may_score[1 - ME].index(0))
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
            if HANDS_ON:
                ds_place = wait_free(ds_free, i, DS_STAGES)
                ds_tile.index(ds_place).slice(FIRST, 64).store(ds)
            if HANDS_ON and TIGHT:
                hand_on(ds_full.index(ds_place))
            dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, K_LAYOUT, 2)), q, dk, is_async=True)
            if HANDS_ON and not TIGHT:
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
                arrive_each(may_score[1 - ME].index(0))
            ds_place = wait_free(ds_free, i, DS_STAGES)
            ds_tile.index(ds_place).slice(FIRST, 64).store(gl.zeros([64, 64], q_tile.dtype, S_LAYOUT))
            hand_on(ds_full.index(ds_place))
        arrive_each(free_at.index(place))
    if STAGED:
        # Its half of v is read by nobody else; the next place of q and dout is free once all have read what stood there. (The
        # other consumer's scores, if they run a tile ahead, are then of whatever is there, and dropped.)
        v_mine = v_tile.index(ME)
        v_mine.reshape([64, BLOCK_DV]).store((dv * 2.0**-BIAS).to(q_tile.dtype))
        fence_async_shared()
        tma_store(dv_to, [b, kv_head, first_key + ME * 64, 0], v_mine)
        place = wait_free(free_at, steps, STAGES)
        free = q_tile.index(place) if ME == 0 else dout_tile.index(place)
        free.reshape([64, BLOCK_D]).store((dk * (scale * 2.0**-BIAS)).to(q_tile.dtype))
        fence_async_shared()
        tma_store(dk_to, [b, kv_head, first_key + ME * 64, 0], free)
        tma.store_wait(0)
    else:
        write(dk * (scale * 2.0**-BIAS), dk_to, dk_strides, b, kv_head, key, key_ok, COLUMN, D, WIDTH, K_LAYOUT, ADD)
        write(dv * 2.0**-BIAS, dv_to, dv_strides, b, kv_head, key, key_ok, COLUMN_V, DV, WIDTH_V, V_LAYOUT, ADD)


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


Result = TypeVar("Result")
ADDS_DQ_ALONE = True  # dq adds up in any case; ADD is about dk and dv
ADDS_DQ_IN_MEMORY = True  # by the TMA, and in any order unless programs take turns


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> Again | None:
    dout, q = (fetchable(without_padding(x, block.mask, block.q_at)) for x in (gradients.dout, block.q))
    k, v = (fetchable(without_padding(x, block.mask, block.k_at)) for x in (block.k, block.v))
    read = block.read_from(q, k, v)
    known = into_sums(gradients, accumulate, lambda sums: add_up(read, sums._replace(dout=dout), accumulate or "dq", launches))
    as_it_is = read is block and dout is gradients.dout and block.is_one_run and not block.deterministic
    return partial(again, known[0], accumulate) if as_it_is and known[0] is not None else None


def into_sums(gradients: Gradients, accumulate: bool | str, add: Callable[[Gradients], Result]) -> Result:
    """The TMA adds, and in fp32: what is not to be added to begins as zeros, and is cast."""
    dq = gradients.dq
    dq_sum = dq if accumulate else torch.zeros_like(dq, dtype=gradients.lse.dtype)
    result = add(gradients._replace(dq=dq_sum))
    if dq_sum is not dq:
        dq.copy_(dq_sum)
    return result


def launches(block: Block, gradients: Gradients, accumulate: bool | str) -> Iterator[Launch]:
    q, turns = block.q, None
    batch, q_rows, heads, _ = q.shape
    if block.deterministic:
        turns = torch.zeros(batch, heads, -(-q_rows // 64), dtype=torch.int32, device=q.device)
    tensors = tensors_of(q, block.k, block.v, block.mask.bounds(q.device), gradients) | dict(turns=turns)
    how = rules(block, tiles_for("backward", q, block.v)) | dict(accumulate=accumulate)
    yield Launch(attention_backward, backward_arguments, tensors, how)


def again(known: Known, accumulate: bool | str, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, gradients: Gradients) -> None:
    into_sums(gradients, accumulate, lambda sums: known.launch(tensors_of(q, k, v, bounds, sums)))


def tensors_of(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, gradients: Gradients) -> dict[str, Any]:
    return dict(q=q, k=k, v=v, turns=None, mask=mask_argument(bounds), **gradients._asdict())
