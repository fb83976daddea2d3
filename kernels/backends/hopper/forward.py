"""The forward for Hopper (sm_90), in Gluon: one warp fetches tiles through the TMA while two or three warpgroups compute.

Promises what the portable forward does, except fp32, dropout and scales below 1e-30. Each consumer warpgroup owns 64 queries.
While the tensor cores multiply the last tile's weights with v and this tile's keys with q, its other units work on a softmax.
(Not where there are three consumers: these keep the tensor cores busy for each other.)
What is multiplied at the same time travels together: a slot of shared memory holds keys, and the values of the keys before.

The grid is as large as the chip. A program takes a query tile, heaviest first, and when that is fetched the next one that
nobody has (`taken` counts), so programs end together whatever the mask; the next tile's first product runs while the last
tile is written. The producer (hopper_fetch.py) works out where a tile is and what it sees, and leaves that in shared memory.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ringspan.kernels.backends.block import Block, Carry
from ringspan.kernels.backends.hopper.arguments import forward_arguments, most_keys
from ringspan.kernels.backends.hopper.common import (
    arrive,
    barriers,
    fetchable,
    nth_tile,
    product_layout,
    wait_full,
    without_padding,
)
from ringspan.kernels.backends.hopper.forward_producer import produce, receive
from ringspan.kernels.backends.hopper.online_softmax import LANES, NOTHING, as_operand, hide, scale_rows, take_weights
from ringspan.kernels.backends.hopper.tile_sizes import tiles_for
from ringspan.kernels.backends.triton.arguments import mask_argument, rules
from ringspan.kernels.backends.triton.common import ANY_SIZE, LN2, LOG2E, keys_of, position, row_count, rows_below
from ringspan.kernels.backends.triton.forward import forward_launches, readable
from ringspan.kernels.mask import Bounds
from ringspan.kernels.runtime.call_cache import Replay
from ringspan.kernels.runtime.launch import CachedLaunch, Launch
from ringspan.kernels.runtime.triton_compat import tma_store

# A carry weighs no more. Below that a row's reference is the largest score of its first tile, whose weight is then an exact 1,
# as without a carry, and not rounded to 16 bits; above, these scores say nothing.
LOG2_CARRY = gl.constexpr(64.0)
CARRY = gl.constexpr(2.0**64)


@gluon.jit(**ANY_SIZE)
def attention_forward(
    q, k, v, out, out_tiles, lse, carry_out, carry_lse, taken,
    out_strides, lse_strides, carry_out_strides, carry_lse_strides,
    mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, together, scale, softcap,
    DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    """q, k, v and out_tiles are descriptors of (batch, head, row, column); blocks of q and out_tiles are 64 rows,
    those of out_tiles in fp32 with half the columns.

    Without out_tiles, and where a tile ends within a block, registers are written to out themselves. num_tiles is that of the
    pieces that work comes in (hopper_fetch.py).
    """
    q_tile = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS, 1, 1, 64, BLOCK_D], q.layout)
    k_tile = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v.layout)
    o_tile = q_tile  # stands in where there is none
    if out_tiles is not None:
        o_tile = gl.allocate_shared_memory(
            out_tiles.dtype, [CONSUMERS, 1, 1, 64, out_tiles.block_type.shape[3]], out_tiles.layout
        )
    next_tile = gl.allocate_shared_memory(gl.int32, [32, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # 0 … BLOCK_N - 1 in memory: as constants the compiler would keep them in registers that the loop needs
    columns = gl.allocate_shared_memory(gl.int32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns.store(gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0])))
    READERS: gl.constexpr = CONSUMERS if IN_STEP else CONSUMERS * 128
    q_full, q_free = barriers(Q_STAGES, 1, READERS)
    kv_full, kv_free = barriers(STAGES, 1, READERS)
    next_full, next_free = barriers(2, 1, READERS)
    tiles = (q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns)
    queue = (next_tile, next_full, next_free)
    work = (mask, q_at, k_at, num_tiles, num_sequences, num_heads, group, together)
    memory = (
        out, out_tiles, lse, carry_out, carry_lse, out_strides, lse_strides, carry_out_strides, carry_lse_strides,
        scale, softcap,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (tiles, queue, work, memory, 0, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, memory, 1, DV, CONSUMERS, IN_STEP)),
            (produce, (q, k, v, tiles, queue, taken, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (tiles, queue, work, memory, 0, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, memory, 1, DV, CONSUMERS, IN_STEP)),
            (consume, (tiles, queue, work, memory, 2, DV, CONSUMERS, IN_STEP)),
            (produce, (q, k, v, tiles, queue, taken, work, BLOCK_N, CONSUMERS, Q_STAGES, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


@gluon.jit
def consume(
    tiles, queue, work, memory, ME: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, IN_STEP: gl.constexpr,
):  # fmt: skip
    q_tile, k_tile, v_tile, o_tile, q_full, q_free, kv_full, kv_free, columns = tiles
    STAGES: gl.constexpr = k_tile.shape[0]
    BLOCK_N: gl.constexpr = k_tile.shape[3]
    BLOCK_D: gl.constexpr = k_tile.shape[4]
    BLOCK_DV: gl.constexpr = v_tile.shape[4]
    Q_STAGES: gl.constexpr = q_tile.shape[0] // CONSUMERS
    mask, q_at, k_at, _num_tiles, _num_sequences, _num_heads, _group, _together = work
    scale, softcap = memory[9], memory[10]
    DOCUMENTS: gl.constexpr = mask[2] is not None  # then a tile's last rows may be the next one's, and a program may have none
    S_LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = product_layout(BLOCK_DV)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Then whole tiles come in an order of the producer's own, and `tile` is not the one that is there: it only tells whole ones
    # from a last one of few keys.
    UNMASKED: gl.constexpr = mask[0] is None and mask[1] is None and mask[2] is None
    CARRIES: gl.constexpr = memory[4] is not None
    OVERLAP: gl.constexpr = CONSUMERS == 2  # one's softmax and one's own product with v; beside three, others' products run
    gl.static_assert(STAGES > 1 or not OVERLAP, "a slot is waited for while another is still in use")
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    i = 0
    slots = 0  # so far
    until, b, h, first_row, begin, full, rest, end, origin = receive(queue, i, DOCUMENTS, IN_STEP)
    row, lo, hi = reach(first_row + ME * 64, origin, b, mask, q_at, k_at, ROWS)
    if (until != 0) if DOCUMENTS else True:
        wait_full(q_full, i, Q_STAGES)
    q_place = i
    place = wait_full(kv_full, slots, STAGES)
    s = scores(q_tile.index(q_place * CONSUMERS + ME), k_tile.index(place), no_scores, BLOCK_D, BLOCK_N)
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(kv_free.index(place), IN_STEP)
    while until != 0:
        acc = gl.zeros([64, BLOCK_DV], gl.float32, O_LAYOUT)
        least = gl.full([64, 4], NOTHING, gl.float32, LANES)  # of a row's reference
        if CARRIES:
            row_ok = row < (until if DOCUMENTS else row_count(q_at))
            acc, base = carried(memory, b, h, row, row_ok, acc, DV)
            least = gl.maximum(base - LOG2_CARRY, least)
        q_mine = q_tile.index(q_place * CONSUMERS + ME)

        tile = nth_tile(0, begin, full, rest, end)
        s, factor = hide(s, tile, True, lo, hi, mask, columns, scale, softcap, BLOCK_N)
        weights, reference, total, _shrink, late = take_weights(s, factor, least, v_tile.dtype, True)
        if CARRIES:  # now, so that the first weights do not wait for it
            weight = gl.where((reference == least) & (least < base), CARRY, gl.exp2(base - reference))
            total += weight / 4  # each of a row's four threads has a part
            if memory[3] is not None:
                acc = scale_rows(acc, weight, late)
        slots += 1
        place = wait_full(kv_full, slots, STAGES)
        num_split = full - begin + end - rest
        for j in range(1, end - begin):
            s = scores(q_mine, k_tile.index(place), no_scores, BLOCK_D, BLOCK_N)
            acc = weighted(weights, v_tile.index(place), acc)
            s = warpgroup_mma_wait(1, deps=(s,))
            tile = nth_tile(j, begin, full, rest, end)
            split = j < num_split if not UNMASKED else False  # a last tile of few keys was the first to be worked on
            s, factor = hide(s, tile, split, lo, hi, mask, columns, scale, softcap, BLOCK_N)
            before = place
            slots += 1
            if OVERLAP:
                new, reference, part, shrink, late = take_weights(s, factor, reference, v_tile.dtype, False)
                # Behind the branch that waiting for a slot is, the compiler leaves the next line's wait where it stands;
                # else it would move it to before the softmax, which is to run while the product with v does.
                place = wait_full(kv_full, slots, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            arrive(kv_free.index(before), IN_STEP)
            if not OVERLAP:  # the last weights' registers are free now
                new, reference, part, shrink, late = take_weights(s, factor, reference, v_tile.dtype, False)
            acc = scale_rows(acc, shrink, late)
            total = total * shrink + part
            weights = new
            if not OVERLAP:
                place = wait_full(kv_full, slots, STAGES)
        arrive(q_free.index(q_place), IN_STEP)
        # The last product with v, and already the next query tile's first scores. Behind the last tile these are scores of
        # whatever is there, and nobody reads them.
        i += 1
        this_b, this_h, this_first, this_row, this_until = b, h, first_row + ME * 64, row, until
        until, b, h, first_row, begin, full, rest, end, origin = receive(queue, i, DOCUMENTS, IN_STEP)
        row, lo, hi = reach(first_row + ME * 64, origin, b, mask, q_at, k_at, ROWS)
        if until != 0:
            wait_full(q_full, i, Q_STAGES)
        q_place = i % Q_STAGES
        acc = weighted(weights, v_tile.index(place), acc)
        s = scores(q_tile.index(q_place * CONSUMERS + ME), k_tile.index(place), no_scores, BLOCK_D, BLOCK_N)
        acc = warpgroup_mma_wait(1, deps=(acc,))

        finish(
            acc, reference, total, this_b, this_h, this_first, this_row, this_until, row_count(q_at), memory, o_tile.index(ME),
            DOCUMENTS, DV, BLOCK_DV, O_LAYOUT,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s,))
        arrive(kv_free.index(place), IN_STEP)

    if memory[1] is not None:
        tma.store_wait(0)


@gluon.jit
def reach(first_row, origin, b, mask, q_at, k_at, ROWS: gl.constexpr):
    """64 rows, and the first and last row of k that each of them sees, counted from `origin`."""
    row = first_row + gl.arange(0, 64, ROWS)
    lo, hi = keys_of(position(row, q_at), mask, b)
    return row, rows_below(lo, k_at) - origin, rows_below(hi + 1, k_at) - 1 - origin


@gluon.jit
def carried(memory, b, h, row, row_ok, acc, DV: gl.constexpr):
    """The carry, with which a row begins: its out, and its lse in base 2."""
    carry_out, carry_lse, carry_out_strides, carry_lse_strides = memory[3], memory[4], memory[7], memory[8]
    b, h = b.to(gl.int64), h.to(gl.int64)
    before = gl.load(
        carry_lse + b * carry_lse_strides[0] + h * carry_lse_strides[1] + row.to(gl.int64) * carry_lse_strides[2],
        mask=row_ok, other=float("-inf"),
    )  # fmt: skip
    if carry_out is not None:
        O_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        ok = gl.convert_layout(row_ok, O_ROWS)[:, None] & (column < DV)[None, :]
        at = carry_out + b * carry_out_strides[0] + h * carry_out_strides[2]
        o_row = gl.convert_layout(row, O_ROWS).to(gl.int64)
        acc = gl.load(at + o_row[:, None] * carry_out_strides[1] + column[None, :], mask=ok, other=0.0)
    base = gl.convert_layout(before * LOG2E, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None]
    return acc, base + gl.full([64, 4], 0.0, gl.float32, LANES)


@gluon.jit
def finish(
    acc, reference, total, b, h, first_row, row, until, num_rows, memory, o_tile,
    DOCUMENTS: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The softmax divides, rows of out and lse are written: those before `until`."""
    out, out_tiles, lse, _carry_out, carry_lse, out_strides, lse_strides, _carry_out_strides, carry_lse_strides = memory[:9]
    b_wide, h_wide = b.to(gl.int64), h.to(gl.int64)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    row_ok = row < (until if DOCUMENTS else num_rows)  # the same rows; but `until` everywhere compiles to other code, not timed
    total = gl.convert_layout(gl.sum(total, 1), row.type.layout, assert_trivial=True)
    m = gl.convert_layout(gl.max(reference, 1), row.type.layout, assert_trivial=True)
    empty = total == 0
    divisor = gl.where(empty, 1.0, total)
    stats = gl.where(empty, float("-inf"), m * LN2 + gl.log(divisor))
    if carry_lse is not None:  # a row that this block gave nothing keeps its lse to the last bit
        at = carry_lse + b_wide * carry_lse_strides[0] + h_wide * carry_lse_strides[1]
        before = gl.load(at + row.to(gl.int64) * carry_lse_strides[2], mask=row_ok, other=float("-inf"))
        stats = gl.where(total == CARRY, before, stats)
    at = lse + b_wide * lse_strides[0] + h_wide * lse_strides[1]
    gl.store(at + row.to(gl.int64) * lse_strides[2], stats, mask=row_ok)
    acc *= gl.convert_layout(gl.where(empty, 0.0, 1 / divisor), O_ROWS)[:, None]
    column = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, O_LAYOUT))
    o_row = gl.convert_layout(row, O_ROWS).to(gl.int64)
    o_ok = gl.convert_layout(row_ok, O_ROWS)[:, None] & (column < DV)[None, :]
    out += b_wide * out_strides[0] + h_wide * out_strides[2]
    if out_tiles is None:
        gl.store(out + o_row[:, None] * out_strides[1] + column[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
    elif DOCUMENTS:
        if (first_row + 64 <= until) | (until == num_rows):
            write(acc, out_tiles, b, h, first_row, o_tile, BLOCK_DV)
        else:
            gl.store(out + o_row[:, None] * out_strides[1] + column[None, :], acc.to(out.dtype.element_ty), mask=o_ok)
    else:
        write(acc, out_tiles, b, h, first_row, o_tile, BLOCK_DV)


@gluon.jit
def write(rows, out_tiles, b, h, first_row, o_tile, BLOCK_DV: gl.constexpr):
    """Through shared memory, in two halves where there is room for only one. What lies behind the tensor's end goes nowhere."""
    COLUMNS: gl.constexpr = o_tile.shape[3]
    if COLUMNS == BLOCK_DV:
        write_columns(rows, out_tiles, b, h, first_row, 0, o_tile)
    else:
        left, right = rows.reshape([64, 2, COLUMNS]).permute((0, 2, 1)).split()
        write_columns(left, out_tiles, b, h, first_row, 0, o_tile)
        write_columns(right, out_tiles, b, h, first_row, COLUMNS, o_tile)


@gluon.jit
def write_columns(columns, out_tiles, b, h, first_row, first_column, o_tile):
    """Once what was in the shared tile has been read."""
    tma.store_wait(0)
    o_tile.reshape([o_tile.shape[2], o_tile.shape[3]]).store(columns.to(out_tiles.dtype))
    fence_async_shared()
    tma_store(out_tiles, [b, h, first_row, first_column], o_tile)


@gluon.jit
def scores(q_mine, k_tile, no_scores, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr):
    q_mine, k_tile = q_mine.reshape([64, BLOCK_D]), k_tile.reshape([BLOCK_N, BLOCK_D])
    return warpgroup_mma(q_mine, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)


@gluon.jit
def weighted(weights, v_tile, acc):
    """acc and a product with v."""
    v_tile = v_tile.reshape([v_tile.shape[2], v_tile.shape[3]])
    return warpgroup_mma(
        as_operand(weights, v_tile.dtype, gl.DotOperandLayout(0, acc.type.layout, 2)), v_tile, acc, is_async=True
    )


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Replay | None:
    v = without_padding(block.v, block.mask, block.k_at)
    read = block.read_from(fetchable(block.q), fetchable(block.k), fetchable(v))
    given, carry = carry, readable(carry)
    known = [call() for call in forward_launches(read, carry, out, lse, launch, most_keys(read.mask, read.q, read.k, read.v))]
    as_it_is = read is block and carry is given and block.is_one_run and len(known) == 1
    return partial(replay, known[0]) if as_it_is and known[0] is not None else None


def launch(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> Launch:
    q, k, v = block.q, block.k, block.v
    tensors = tensors_of(q, k, v, block.mask.bounds(q.device), carry, out, lse)
    return Launch(attention_forward, forward_arguments, tensors, rules(block, tiles_for("forward", q, v)))


def replay(known: CachedLaunch, *given: Any) -> None:
    known.launch(tensors_of(*given))


def tensors_of(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, carry: Carry | None, out: Tensor, lse: Tensor
) -> dict[str, Any]:
    carry_out, carry_lse = carry or (None, None)
    tensors = dict(q=q, k=k, v=v, out=out, out_tiles=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse)
    return tensors | dict(mask=mask_argument(bounds), taken=torch.zeros((), dtype=torch.int32, device=q.device))
