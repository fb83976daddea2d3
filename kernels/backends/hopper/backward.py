"""The backward for Hopper (sm_90) in Gluon: one pass with five matmuls; the portable backward needs two passes with seven.

    producer (1 warp)            shared memory                 2 consumer warpgroups            dq warpgroup
    TMA, loads  ── q_full ───▶   q, dout, stats × STAGES  ──▶  p = exp2(q k - lse)
    wait_free   ◀─ q_free ────                                 dS = p (dout v - delta)
                                 dS × DS_STAGES  ◀─ ds_full ─  dk += dS q, dv += p dout ─ ds ─▶ dq = dS k
    k, v loaded once, kv_full                                  dk, dv to memory at the end      TMA reduce-add, fp32

A thread block owns BLOCK_N keys and streams the queries that see them, 64 at a time, over all query heads of its KV head, or
over some of them if there would be too few thread blocks for the GPU (`num_head_splits`).
Scores are (keys, queries): p and dS are matmul operands straight from registers. Shared memory bandwidth is the limit, so
lse and delta are subtracted by one more matmul, 16 wide, instead of being loaded for each key.

    keys   head dims                                    consumers
    128    up to 128                                    backward_consumer.py
    128    129 to 160, and to 192 with 128 for v        backward_consumer_dq.py, no dq warpgroup
     64    others; above 128 also with softcap          backward_consumer_wide.py
           or ordered sums of dq
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
from ringspan.kernels.backends.hopper.argument_tuples import (
    BackwardFlags,
    BackwardInputs,
    BackwardMemory,
    BackwardOutputs,
    Barriers,
    KeyTile,
    Rules,
    Turns,
)
from ringspan.kernels.backends.hopper.arguments import backward_arguments, head_split_counts, num_head_splits
from ringspan.kernels.backends.hopper.backward_consumer import consume_keys
from ringspan.kernels.backends.hopper.backward_consumer_dq import consume_keys_and_dq
from ringspan.kernels.backends.hopper.backward_consumer_wide import consume_ds, consume_weights
from ringspan.kernels.backends.hopper.backward_dq import collect_dq
from ringspan.kernels.backends.hopper.backward_producer import produce
from ringspan.kernels.backends.hopper.chunks import allocate_tiles, block_bytes, load_tiles
from ringspan.kernels.backends.hopper.common import (
    invalidate_barriers,
    make_barriers,
    next_tile_end,
    scheduled_tile,
    tile_border,
    tma_readable,
    zero_padding,
)
from ringspan.kernels.backends.hopper.tile_sizes import tiles_for
from ringspan.kernels.backends.triton.arguments import common_arguments, mask_argument
from ringspan.kernels.backends.triton.backward import run_backward
from ringspan.kernels.backends.triton.common import (
    ANY_SIZE,
    document_interval,
    position,
    row_count,
    rows_below,
    tile_range,
    visible_queries,
)
from ringspan.kernels.backends.triton.sum_gradients import Summand, sum_gradients
from ringspan.kernels.mask import Bounds
from ringspan.kernels.runtime.call_cache import Replay
from ringspan.kernels.runtime.launch import CachedLaunch, Launch


@gluon.jit(**ANY_SIZE)
def attention_backward(
    dout, dout_tail, q, q_tail, k, k_tail, v, v_tail, dq, lse, delta, dk, dk_tiles, dv, dv_tiles, turns,
    lse_strides, delta_strides, dk_strides, dv_strides, turns_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, head_splits, concurrent_heads, stagger, scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    TAIL_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    DQ_WIDTH: gl.constexpr, DQ_WARPGROUP: gl.constexpr, TIGHT: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Accumulate dq and write (ADD: accumulate) dk and dv of one tile of keys, or of a document piece's tiles.

    dout, q, k, v, their tails (chunks.py), dq, dk_tiles and dv_tiles are TMA descriptors of (batch, head, row, column).
    Without dk_tiles and dv_tiles, and where a tile ends within 64 rows, registers are stored to dk and dv directly. If
    neither applies, dk and dv are None.
    """
    dout = (dout,) if dout_tail is None else (dout, dout_tail)
    q = (q,) if q_tail is None else (q, q_tail)
    k = (k,) if k_tail is None else (k, k_tail)
    v = (v,) if v_tail is None else (v, v_tail)
    # With TIGHT, weights wait for dS as fp16: finer than bf16, but its smallest number is 6e-8. So they are scaled by 2¹⁴, and
    # so are dq, dk and dv until they are stored; a power of two rounds nothing. A weight of 4 would overflow: lse must cover
    # all keys, as in any backward. With fp16 inputs dS would overflow, so only the waiting weights are scaled (BIAS 0).
    BIAS: gl.constexpr = 14 if TIGHT and q[0].dtype == gl.bfloat16 else 0
    flags: gl.constexpr = BackwardFlags(
        D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_N, STAGES, DS_STAGES, DQ_STAGES, DQ_WIDTH, DQ_WARPGROUP, TIGHT,
        BIAS, ADD
    )  # fmt: skip
    inputs = BackwardInputs(dout, q, k, v, lse, delta, turns, lse_strides, delta_strides, turns_strides)
    outputs = BackwardOutputs(dq, dk, dk_tiles, dv, dv_tiles, dk_strides, dv_strides)
    rules = Rules(mask, q_at, k_at, scale, softcap, stagger)
    memory = allocate_memory(inputs, dq, softcap, flags)
    # DEFER_LAST only where dk and dv are stored by TMA: elsewhere registers are scarce, and it needs some.
    sequence, tile = scheduled_tile(gl.program_id(0), num_tiles, num_sequences, concurrent_heads, dk_tiles is not None)
    first_key = tile * BLOCK_N  # the first keys, visible to most queries under a causal mask, first
    b, kv_head = sequence // num_heads, sequence % num_heads
    # With documents tiles begin at borders, as in forward_producer.py: zero, one or two tiles per thread block. Not above head
    # dim 128: the loops would spill (more) registers.
    FROM_DOCUMENTS: gl.constexpr = mask.starts is not None and turns is None and BLOCK_N == 128 and DQ_WARPGROUP
    if FROM_DOCUMENTS:
        piece_end = gl.minimum(tile_border(first_key + BLOCK_N, b, mask, k_at, BLOCK_N), row_count(k_at))
        first_key = tile_border(first_key, b, mask, k_at, BLOCK_N)
        while first_key < piece_end:
            end_key = next_tile_end(first_key, piece_end, BLOCK_N)
            process_key_tile(
                inputs, outputs, memory, rules, flags, b, kv_head, group, head_splits, first_key, end_key, FROM_DOCUMENTS
            )
            first_key = end_key
    else:
        end_key = row_count(k_at)
        process_key_tile(
            inputs, outputs, memory, rules, flags, b, kv_head, group, head_splits, first_key, end_key, FROM_DOCUMENTS
        )


@gluon.jit
def allocate_memory(inputs, dq, softcap, flags: gl.constexpr):
    """Allocate the shared memory, except mbarriers."""
    STAGES: gl.constexpr = flags.STAGES
    k_tile = allocate_tiles(inputs.k, 1)
    v_tile = allocate_tiles(inputs.v, flags.BLOCK_N // 64)
    q_tile = allocate_tiles(inputs.q, STAGES)
    dout_tile = allocate_tiles(inputs.dout, STAGES)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DS_SHAPE: gl.constexpr = [flags.DS_STAGES, flags.BLOCK_N, 64] if flags.DQ_WARPGROUP else [2 * flags.DS_STAGES - 1, 64, 64]
    ds_tile = gl.allocate_shared_memory(inputs.q[0].dtype, DS_SHAPE, DS_LAYOUT)
    dq_tile = gl.allocate_shared_memory(gl.float32, [flags.DQ_STAGES, 1, 1, 64, flags.DQ_WIDTH], dq.layout)
    stats = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 16], gl.NVMMASharedLayout(32, 16, 2))  # lse, delta
    lse_tile = stats  # not read without softcap: there the matmul subtracts lse
    if softcap is not None:
        lse_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Per slot: head, first row and marks. Marks: 1 if the tile is partial; with TIGHT, 128 keys and a dq warpgroup also 2 and 4
    # if its queries see keys of consumer 0 and 1. One int32 for all marks, because loads from shared memory are slow while
    # matmuls read it.
    tile_info = gl.allocate_shared_memory(gl.int32, [3 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row_offsets = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # 0 … 63 in shared memory: constants would occupy registers, which the loop needs
    row_offsets.store(gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0])))
    return BackwardMemory(k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_tile, stats, lse_tile, tile_info, row_offsets)


@gluon.jit
def process_key_tile(
    inputs, outputs, memory, rules, flags: gl.constexpr, b, kv_head, group, head_splits, first_key, end_key,
    FROM_DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Process the keys before `end_key` of one tile, with all queries that see some of them."""
    k, v = inputs.k, inputs.v
    NUM_HALVES: gl.constexpr = flags.BLOCK_N // 64
    kv_full, kv_free = make_barriers(1, 1, 1)  # loaded once, so never freed
    # Between the consumers: which one computes scores next or, with 64 keys, that a tile is written and read; not used where
    # they compute dq. Two allocations: with one, Triton would synchronise a warpgroup between its wait and its arrival.
    exchange_0, unused_0 = make_barriers(flags.DS_STAGES if flags.BLOCK_N == 64 else 1, 128, 1)
    exchange_1, unused_1 = make_barriers(flags.DS_STAGES if flags.BLOCK_N == 64 else 1, 128, 1)
    # the producer arrives twice: TMA bytes expected; stats written
    q_full, q_free = make_barriers(flags.STAGES, 2, 3 * 128 if flags.DQ_WARPGROUP else 2 * 128)
    if flags.DQ_WARPGROUP:
        ds_full, ds_free = make_barriers(flags.DS_STAGES, NUM_HALVES * 128, 128)
    else:  # one ring for each consumer's dS
        ds_full_0, ds_free_0 = make_barriers(flags.DS_STAGES, 128, 2 * 128)
        ds_full_1, ds_free_1 = make_barriers(flags.DS_STAGES - 1, 128, 2 * 128)
        ds_full, ds_free = (ds_full_0, ds_full_1), (ds_free_0, ds_free_1)
    barriers = Barriers(kv_full, (exchange_0, exchange_1), q_full, q_free, ds_full, ds_free)

    # these loads overlap the computation of the query tiles
    mbarrier.expect(kv_full.index(0), block_bytes(k) + NUM_HALVES * block_bytes(v))
    source_head = kv_head  # of k and v
    if head_splits is not None:
        source_head = kv_head // head_splits
    load_tiles(k, b, source_head, first_key, kv_full.index(0), memory.k, 0)
    for half in gl.static_range(NUM_HALVES):
        load_tiles(v, b, source_head, first_key + half * 64, kv_full.index(0), memory.v, half)
    query_tiles = visible_query_tiles(rules, flags, b, first_key, end_key, FROM_DOCUMENTS)
    tile = KeyTile(b, kv_head, group, first_key, end_key, *query_tiles)
    borders = (None, None)
    if flags.TIGHT and flags.BLOCK_N == 128 and flags.DQ_WARPGROUP:
        borders = skip_borders(rules, b, first_key)
    dq_turns = Turns(None, None, None, None)
    if inputs.turns is not None:
        dq_turns = turns_of_sequence(inputs, rules, flags, b, first_key)
    if flags.DQ_WARPGROUP:
        # per thread; consumers of 64 keys need fewer, and the dq warpgroup keeps dS in the registers that remain
        REGISTERS: gl.constexpr = 208 if flags.BLOCK_N == 128 else 200
        gl.warp_specialize([
            (consume, (memory, barriers, tile, outputs, rules, flags, 0)),
            (consume, (memory, barriers, tile, outputs, rules, flags, 1)),
            (collect_dq, (outputs.dq, memory, barriers, dq_turns, tile, rules.scale * 2.0**-flags.BIAS, flags)),
            (produce, (inputs, memory, barriers, tile, borders, rules, row_count(rules.q_at), flags)),
        ], [4, 4, 1], [REGISTERS, 72 + 2 * (208 - REGISTERS), 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (memory, barriers, tile, outputs, rules, flags, 0)),
            (consume, (memory, barriers, tile, outputs, rules, flags, 1)),
            (produce, (inputs, memory, barriers, tile, borders, rules, row_count(rules.q_at), flags)),
        ], [4, 1], [240, 24])  # fmt: skip
    if FROM_DOCUMENTS:  # the next tile allocates new barriers
        invalidate_barriers(kv_full, kv_free)
        invalidate_barriers(exchange_0, unused_0)
        invalidate_barriers(exchange_1, unused_1)
        invalidate_barriers(q_full, q_free)
        invalidate_barriers(ds_full, ds_free)


@gluon.jit
def visible_query_tiles(rules, flags: gl.constexpr, b, first_key, end_key, FROM_DOCUMENTS: gl.constexpr):
    """Return (first row of query tile 0, and the tile_range of the queries that see some of the keys)."""
    mask, q_at, k_at = rules.mask, rules.q_at, rules.k_at
    first_lo, first_hi = visible_queries(position(first_key, k_at), mask, b)
    last_lo, last_hi = visible_queries(position(gl.minimum(first_key + flags.BLOCK_N, end_key) - 1, k_at), mask, b)
    origin = 0
    if FROM_DOCUMENTS:
        first, _ = document_interval(position(first_key, k_at), mask, b)
        origin = rows_below(first, q_at)
    begin, full_begin, full_end, end = tile_range(
        first_lo, last_lo, first_hi, last_hi, q_at, origin, 64, mask.right is not None or mask.starts is not None
    )
    if first_key + flags.BLOCK_N > end_key:  # rows past the last key: every tile needs the mask
        full_begin = end
        full_end = end
    return origin, begin, full_begin, full_end, end


@gluon.jit
def skip_borders(rules, b, first_key):
    """Return (end of the queries that see the lower 64 keys, begin of those that see the upper 64)."""
    _, lower_hi = visible_queries(position(first_key + 63, rules.k_at), rules.mask, b)
    upper_lo, _ = visible_queries(position(first_key + 64, rules.k_at), rules.mask, b)
    return rows_below(lower_hi + 1, rules.q_at), rows_below(upper_lo, rules.q_at)


@gluon.jit
def turns_of_sequence(inputs, rules, flags: gl.constexpr, b, first_key):
    """Return the Turns of one sequence, for a dq that is added in order."""
    _, prev_hi = visible_queries(position(gl.maximum(first_key, 1) - 1, rules.k_at), rules.mask, b)
    prev_end = gl.where(first_key > 0, rows_below(prev_hi + 1, rules.q_at), 0)
    counters = inputs.turns + b.to(gl.int64) * inputs.turns_strides.batch
    return Turns(counters, inputs.turns_strides.head, first_key // flags.BLOCK_N, prev_end)


@gluon.jit
def consume(memory, barriers, tile, outputs, rules, flags: gl.constexpr, CONSUMER_ID: gl.constexpr):
    """Role of a consumer warpgroup: by keys with 128 of them, by columns of dk and dv with 64."""
    if not flags.DQ_WARPGROUP:
        consume_keys_and_dq(memory, barriers, tile, outputs, rules, flags, CONSUMER_ID)
    elif flags.BLOCK_N == 128:
        consume_keys(memory, barriers, tile, outputs, rules, flags, CONSUMER_ID)
    elif CONSUMER_ID == 0:
        consume_weights(memory, barriers, tile, outputs, rules, flags)
    else:
        consume_ds(memory, barriers, tile, outputs, rules, flags)


Result = TypeVar("Result")
ADDS_DQ_ALONE = True  # dq is always accumulated; ADD concerns dk and dv (see block.py)
ADDS_DQ_ATOMICALLY = True  # by TMA reduce-add; in any order unless the backward is deterministic


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> Replay | None:
    """Write or accumulate dq, dk and dv of a block (see block.py).

    Returns:
        A function that repeats the launch for tensors of the same signature; None if it took copies or several launches, or
        if the backward is deterministic.
    """
    dout, q = (tma_readable(zero_padding(x, block.mask, block.q_at)) for x in (gradients.dout, block.q))
    k, v = (tma_readable(zero_padding(x, block.mask, block.k_at)) for x in (block.k, block.v))
    source = block.with_tensors(q, k, v)
    head_splits = 1
    if accumulate is not True:
        mask = mask_argument(block.mask.bounds(q.device))
        head_splits = num_head_splits(q, k, mask, backward_tiles(block)["BLOCK_N"])
    cached = with_fp32_sums(
        gradients,
        accumulate,
        head_splits,
        lambda sums: run_backward(source, sums._replace(dout=dout), accumulate or "dq", launches),
    )
    is_replayable = source is block and dout is gradients.dout and block.is_single_range and not block.deterministic
    return partial(replay, cached[0], accumulate, head_splits) if is_replayable and cached[0] is not None else None


def with_fp32_sums(
    gradients: Gradients, accumulate: bool | str, head_splits: int, run: Callable[[Gradients], Result]
) -> Result:
    """Call `run` with fp32 sums where the kernel needs them, then write the gradients.

    The TMA adds to dq in fp32: to gradients.dq itself, or to zeros that are then cast. With head splits each thread block
    writes dk and dv of its own query heads, which are then added.
    """
    dq, dk, dv = gradients[3:]
    sums = gradients._replace(dq=dq if accumulate else torch.zeros_like(dq, dtype=gradients.lse.dtype))
    if head_splits > 1:
        batch, rows, heads, width = dk.shape
        parts = gradients.lse.new_empty((rows, batch, heads * head_splits, width + dv.shape[3]))
        own_dk, own_dv = parts.transpose(0, 1).split((width, dv.shape[3]), 3)
        sums = sums._replace(dk=own_dk, dv=own_dv)
    result = run(sums)
    if head_splits > 1:
        summands = [Summand(part) for part in parts.unflatten(2, (heads, head_splits)).unbind(3)]
        # the number depends on the length, the kernel only on the number of query heads per KV head
        sum_gradients(summands, dk, dv, "hopper", min_summands=head_split_counts(dq.shape[2] // heads)[-1])
    if sums.dq is not dq:
        dq.copy_(sums.dq)
    return result


def launches(block: Block, gradients: Gradients, accumulate: bool | str) -> Iterator[Launch]:
    """Yield the launch for a block that is one ascending range, with tensors that the TMA can read."""
    q, turns = block.q, None
    batch, q_rows, heads, _ = q.shape
    if block.deterministic:
        turns = torch.zeros(batch, heads, -(-q_rows // 64), dtype=torch.int32, device=q.device)
    tensors = kernel_tensors(q, block.k, block.v, block.mask.bounds(q.device), gradients) | dict(turns=turns)
    options = common_arguments(block, backward_tiles(block)) | dict(accumulate=accumulate)
    yield Launch(attention_backward, backward_arguments, tensors, options)


def backward_tiles(block: Block) -> dict[str, Any]:
    """Return the tile sizes. With softcap or ordered sums of dq, consumers have no registers to compute dq."""
    return tiles_for("backward", block.q, block.v, needs_registers=bool(block.softcap) or block.deterministic)


def replay(
    cached: CachedLaunch,
    accumulate: bool | str,
    head_splits: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    gradients: Gradients,
) -> None:
    """Repeat a launch for tensors of the same signature."""
    with_fp32_sums(gradients, accumulate, head_splits, lambda sums: cached.launch(kernel_tensors(q, k, v, bounds, sums)))


def kernel_tensors(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, gradients: Gradients) -> dict[str, Any]:
    """Return the tensors among the kernel's arguments."""
    outputs = gradients._asdict() | dict(dk_tiles=gradients.dk, dv_tiles=gradients.dv, dout_tail=gradients.dout)
    return dict(q=q, q_tail=q, k=k, k_tail=k, v=v, v_tail=v, turns=None, mask=mask_argument(bounds), **outputs)
