"""The backward for Hopper (sm_90), in Gluon: one pass with five products, where the portable one makes two passes with seven.

A program keeps BLOCK_N keys and streams the queries that see them, 64 at a time, over all heads of the group. Four parties
work beside each other and wait for nothing but each other's tiles in shared memory:

    produce      one warp: the TMA brings q and dout, the warp lse and delta (hopper_queries.py)
    consume      two warpgroups: scores, weights and their gradients dS; dk and dv stay in their registers (hopper_keys.py and,
                 above head dim 128, hopper_roles.py)
    collect      a warpgroup: dq = dS k needs the keys of both; the TMA adds it to an fp32 dq in memory (hopper_dq.py)

What passes through shared memory is what limits them. So lse and delta come as one more product, 16 wide, and not once for each
key: exp2(q k - lse) and dout v - delta are what the tensor cores leave.

With documents a program's 128 keys begin where one does, or some multiple of 128 behind: a piece of work is what is between two
such borders (hopper_common.py). That is one tile of keys, or two, one after the other, or none.

Of 128 keys a consumer takes 64, and leaves out tiles whose queries see none of them; the two alternate in working out scores,
so that one's products run beside the other's exponentials. (Neither at small head dims, where scores run a tile ahead.) Above
head dim 128 its registers cannot hold their dk and dv: then a program has 64 keys, and of dk and dv a consumer has half of the
columns. One consumer works out weights, the other their gradients, and they hand these to each other.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.hopper.arguments import backward_arguments
from ringspan.kernels.backends.hopper.backward_consumer import share_keys
from ringspan.kernels.backends.hopper.backward_consumer_wide import derive, weigh
from ringspan.kernels.backends.hopper.backward_dq import collect
from ringspan.kernels.backends.hopper.backward_producer import produce
from ringspan.kernels.backends.hopper.common import barriers, border, fetchable, first_of_two, forget, in_turn, without_padding
from ringspan.kernels.backends.hopper.tile_sizes import tiles_for
from ringspan.kernels.backends.triton.arguments import mask_argument, rules
from ringspan.kernels.backends.triton.backward import add_up
from ringspan.kernels.backends.triton.common import ANY_SIZE, document, position, queries_of, row_count, rows_below, tile_range
from ringspan.kernels.mask import Bounds
from ringspan.kernels.runtime.call_cache import Replay
from ringspan.kernels.runtime.launch import CachedLaunch, Launch
from ringspan.kernels.runtime.triton_compat import tma_load


@gluon.jit(**ANY_SIZE)
def attention_backward(
    dout, q, k, v, dq, lse, delta, dk, dk_tiles, dv, dv_tiles, turns,
    lse_strides, delta_strides, dk_strides, dv_strides, turns_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, together, scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, DQ_WIDTH: gl.constexpr,
    TIGHT: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dout, q, k, v, dq, dk_tiles and dv_tiles are descriptors of (batch, head, row, column).

    Without dk_tiles and dv_tiles, and where a tile ends within 64 rows, registers are written to dk and dv themselves; where
    neither is so these are left out.
    """
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
    # Apart only where dk and dv leave through shared memory: elsewhere registers are short, and this is arithmetic with them.
    sequence, turn = in_turn(gl.program_id(0), num_tiles, num_sequences, together, dk_tiles is not None)
    first_key = turn * BLOCK_N  # the first keys, which most queries see under a causal mask, first
    b, kv_head = sequence // num_heads, sequence % num_heads
    inputs = (dout, q, k, v, lse, delta, lse_strides, delta_strides)
    outputs = (dq, dk, dk_tiles, dv, dv_tiles, dk_strides, dv_strides)
    memory = (k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_tile, stats, lse_tile, facts, rows)
    taking_turns = (turns, turns_strides, turn)
    options = (mask, q_at, k_at, scale, softcap)
    # Not with 64 keys: there the parties would spill in their loops.
    FROM_DOCUMENTS: gl.constexpr = mask[2] is not None and turns is None and BLOCK_N == 128
    if FROM_DOCUMENTS:
        behind = gl.minimum(border(first_key + BLOCK_N, b, mask, k_at, BLOCK_N), row_count(k_at))
        first_key = border(first_key, b, mask, k_at, BLOCK_N)
        while first_key < behind:
            until = first_of_two(first_key, behind, BLOCK_N)
            work_on(
                inputs, outputs, memory, taking_turns, options, b, kv_head, first_key, until,
                D, DV, TIGHT, GROUP, ADD, FROM_DOCUMENTS,
            )  # fmt: skip
            first_key = until
    else:
        work_on(
            inputs, outputs, memory, taking_turns, options, b, kv_head, first_key, row_count(k_at),
            D, DV, TIGHT, GROUP, ADD, FROM_DOCUMENTS,
        )  # fmt: skip


@gluon.jit
def work_on(
    inputs, outputs, memory, taking_turns, options, b, kv_head, first_key, until,
    D: gl.constexpr, DV: gl.constexpr, TIGHT: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
    FROM_DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """A tile of keys, those before `until`, with all queries that see some of them."""
    dout, q, k, v, lse, delta, lse_strides, delta_strides = inputs
    dq, dk, dk_tiles, dv, dv_tiles, dk_strides, dv_strides = outputs
    k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_tile, stats, lse_tile, facts, rows = memory
    mask, q_at, k_at, scale, softcap = options
    BLOCK_N: gl.constexpr = k_tile.shape[3]
    BLOCK_D: gl.constexpr = k_tile.shape[4]
    BLOCK_DV: gl.constexpr = v_tile.shape[4]
    STAGES: gl.constexpr = q_tile.shape[0]
    DS_STAGES: gl.constexpr = ds_tile.shape[0]
    DQ_STAGES: gl.constexpr = dq_tile.shape[0]
    DQ_WIDTH: gl.constexpr = dq_tile.shape[4]
    kv_full, kv_free = barriers(1, 1, 1)  # fetched once, so nobody frees it
    # From consumer to consumer: whose turn it is with scores or, above head dim 128, what has been handed over, and taken. Each
    # in memory of its own: of the same, Triton would stop a warpgroup between wait and arrival.
    between_0, free_0 = barriers(DS_STAGES if BLOCK_N == 64 else 1, 128, 1)
    between_1, free_1 = barriers(DS_STAGES if BLOCK_N == 64 else 1, 128, 1)
    between = (between_0, between_1)
    full_at, free_at = barriers(STAGES, 2, 3 * 128)  # the producer arrives twice: bytes are coming, and statistics are there
    ds_full, ds_free = barriers(DS_STAGES, BLOCK_N // 64 * 128, 128)
    flags = (kv_full, between, full_at, free_at, ds_full, ds_free)

    # on their way while the tiles of queries are looked up
    mbarrier.expect(kv_full.index(0), k.block_type.nbytes + BLOCK_N // 64 * v.block_type.nbytes)
    tma_load(k, [b, kv_head, first_key, 0], kv_full.index(0), k_tile.index(0))
    for half in gl.static_range(BLOCK_N // 64):
        tma_load(v, [b, kv_head, first_key + half * 64, 0], kv_full.index(0), v_tile.index(half))
    first_lo, first_hi = queries_of(position(first_key, k_at), mask, b)
    last_lo, last_hi = queries_of(position(gl.minimum(first_key + BLOCK_N, until) - 1, k_at), mask, b)
    origin = 0  # where the first tile of queries begins
    if FROM_DOCUMENTS:
        first, _ = document(position(first_key, k_at), mask, b)
        origin = rows_below(first, q_at)
    begin, full, rest, end = tile_range(
        first_lo, last_lo, first_hi, last_hi, q_at, origin, 64, mask[1] is not None or mask[2] is not None
    )
    if first_key + BLOCK_N > until:  # behind the last key lse has nothing to say: every tile needs the compare
        full = end
        rest = end
    LEAVES_OUT: gl.constexpr = TIGHT and BLOCK_N == 128
    borders = (None, None)  # or: where queries of the lower 64 keys end, and where those of the upper begin
    if LEAVES_OUT:
        _, lower_hi = queries_of(position(first_key + 63, k_at), mask, b)
        upper_lo, _ = queries_of(position(first_key + 64, k_at), mask, b)
        borders = (rows_below(lower_hi + 1, q_at), rows_below(upper_lo, q_at))
    turns, turns_strides, turn = taking_turns
    taking_turns = (None, None, None, None)  # or: whose turn, its stride of heads, ours, rows that the one before sees
    if turns is not None:
        _, before_hi = queries_of(position(gl.maximum(first_key, 1) - 1, k_at), mask, b)
        before_end = gl.where(turn > 0, rows_below(before_hi + 1, q_at), 0)
        taking_turns = (turns + b.to(gl.int64) * turns_strides[0], turns_strides[1], turn, before_end)
    consumed = (k_tile, v_tile, q_tile, dout_tile, ds_tile, stats, lse_tile, facts, rows)
    keys = (b, kv_head, first_key, until, begin, end)
    gradients = (dk, dk_tiles, dv, dv_tiles, dk_strides, dv_strides)
    statistics = (lse, delta, lse_strides, delta_strides, stats, lse_tile, facts, row_count(q_at), scale, softcap)
    # Where registers are tight weights wait as fp16, which is finer than the products' bf16 but ends at 6e-8: so they are kept
    # 2**14 times too large, as are dq, dk and dv until they are handed on. Powers of two, so nothing is rounded. (A weight of
    # 4 would be too large for it: lse has to be that of all keys, as it is in a backward.) With fp16 inputs, whose dS would
    # overflow, they are large only while they wait.
    BIAS: gl.constexpr = 14 if TIGHT and q.dtype == gl.bfloat16 else 0
    # registers a thread; consumers of 64 keys need fewer, and the collector holds dS in what they leave
    CONSUMES: gl.constexpr = 208 if BLOCK_N == 128 else 200
    gl.warp_specialize([
        (consume, (
            consumed, flags, keys, gradients, options, 0,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, DS_STAGES, TIGHT, BIAS, GROUP, ADD,
        )),
        (consume, (
            consumed, flags, keys, gradients, options, 1,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, DS_STAGES, TIGHT, BIAS, GROUP, ADD,
        )),
        (collect, (
            dq, k_tile, ds_tile, dq_tile, facts, flags, taking_turns, b, begin, end, scale * 2.0**-BIAS,
            BLOCK_D, BLOCK_N, STAGES, DS_STAGES, DQ_STAGES, DQ_WIDTH, GROUP,
        )),
        (produce, (
            q, dout, q_tile, dout_tile, statistics, flags,
            b, kv_head, origin, begin, full, rest, end, borders, STAGES, BIAS, GROUP,
        )),
    ], [4, 4, 1], [CONSUMES, 72 + 2 * (208 - CONSUMES), 24])  # fmt: skip
    if FROM_DOCUMENTS:  # barriers are made anew for another tile
        forget(kv_full, kv_free)
        forget(between_0, free_0)
        forget(between_1, free_1)
        forget(full_at, free_at)
        forget(ds_full, ds_free)


@gluon.jit
def consume(
    tiles, flags, keys, gradients, options, ME: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, TIGHT: gl.constexpr, BIAS: gl.constexpr,
    GROUP: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    if BLOCK_N == 128:
        share_keys(
            tiles, flags, keys, gradients, options, ME,
            D, DV, BLOCK_D, BLOCK_DV, STAGES, DS_STAGES, TIGHT, BIAS, GROUP, ADD,
        )  # fmt: skip
    elif ME == 0:
        weigh(tiles, flags, keys, gradients, options, D, DV, BLOCK_D, BLOCK_DV, STAGES, DS_STAGES, BIAS, GROUP, ADD)
    else:
        derive(tiles, flags, keys, gradients, options, D, DV, BLOCK_D, BLOCK_DV, STAGES, DS_STAGES, BIAS, GROUP, ADD)


Result = TypeVar("Result")
ADDS_DQ_ALONE = True  # dq adds up in any case; ADD is about dk and dv
ADDS_DQ_IN_MEMORY = True  # by the TMA, and in any order unless programs take turns


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> Replay | None:
    dout, q = (fetchable(without_padding(x, block.mask, block.q_at)) for x in (gradients.dout, block.q))
    k, v = (fetchable(without_padding(x, block.mask, block.k_at)) for x in (block.k, block.v))
    read = block.read_from(q, k, v)
    known = into_sums(gradients, accumulate, lambda sums: add_up(read, sums._replace(dout=dout), accumulate or "dq", launches))
    as_it_is = read is block and dout is gradients.dout and block.is_one_run and not block.deterministic
    return partial(replay, known[0], accumulate) if as_it_is and known[0] is not None else None


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


def replay(
    known: CachedLaunch, accumulate: bool | str, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, gradients: Gradients
) -> None:
    into_sums(gradients, accumulate, lambda sums: known.launch(tensors_of(q, k, v, bounds, sums)))


def tensors_of(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, gradients: Gradients) -> dict[str, Any]:
    own = gradients._asdict() | dict(dk_tiles=gradients.dk, dv_tiles=gradients.dv)
    return dict(q=q, k=k, v=v, turns=None, mask=mask_argument(bounds), **own)
