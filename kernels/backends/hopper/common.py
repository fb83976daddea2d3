"""Building blocks of the Hopper kernels: mbarriers of buffer slots, tile order, document borders, inputs for the TMA.

A ring of NUM slots in shared memory connects a producer and consumers. Item i uses slot i % NUM; each slot has two mbarriers:

    producer: wait_free → write the slot → arrive at full          consumer: wait_full → read the slot → arrive at free

    full  completes when all writers have arrived (and the TMA has delivered its bytes)
    free  completes when all readers have arrived
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringspan.kernels.backends.triton.common import document_interval, partial_tile, position, rows_below
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import Segments, positions
from ringspan.kernels.tensors import aligned

WARPGROUP_ROWS = 64  # rows of a warpgroup's matmul


@gluon.constexpr_function
def accumulator_layout(columns):
    """Register layout of a warpgroup's 64-row matmul accumulator."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def make_barriers(NUM: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Allocate NUM (full, free) pairs of mbarriers with these arrival counts; `arrive_per_thread` counts threads."""
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(free.index(i), count=READERS)
    return full, free


@gluon.jit
def invalidate_barriers(full, free):
    """Invalidate mbarriers so that their memory can be reused."""
    NUM: gl.constexpr = full.shape[0]
    for i in gl.static_range(NUM):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(free.index(i))


@gluon.jit
def arrive_per_thread(barrier):
    """Arrive once per thread; a warpgroup counts 128.

    With `mbarrier.arrive` one thread arrives for all, and Triton 3.6 and 3.7 synchronise the warpgroup before and after.
    This instruction also waits for the thread's cp.async copies; the kernels have none. It orders no memory accesses: callers
    precede it with a fence, a wait for a matmul, or loads that complete in program order.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def arrive(barrier, IN_STEP: gl.constexpr):
    """Free a slot: once per warpgroup, whose warps synchronise, or once per thread. The tile table has the faster one."""
    if IN_STEP:
        mbarrier.arrive(barrier, count=1)
    else:
        arrive_per_thread(barrier)


@gluon.jit
def wait_full(full, index, NUM: gl.constexpr):
    """Wait until item `index` is in its slot of the ring; return the slot."""
    slot = index % NUM
    mbarrier.wait(full.index(slot), (index // NUM) & 1)
    return slot


@gluon.jit
def wait_free(free, index, NUM: gl.constexpr):
    """Wait until the slot of item `index` is free; return the slot."""
    slot = index % NUM
    mbarrier.wait(free.index(slot), ((index // NUM) & 1) ^ 1)
    return slot


@gluon.jit
def nth_tile(j, begin, full_begin, full_end, end):
    """The j-th tile to process: partial tiles first, then full ones."""
    num_partial = full_begin - begin + end - full_end
    return gl.where(j < num_partial, partial_tile(j, begin, full_begin, full_end), full_begin + j - num_partial)


@gluon.jit
def start_in_window(piece, stagger):
    """Return the place in a window at which a piece of work begins, in 1/65536 of the window."""
    return piece // stagger.pieces_per_start % stagger.num_starts * 65536 // stagger.num_starts


@gluon.jit
def staggered_tile(tile, end, start, stagger):
    """Return the tile to load instead of `tile`, one of the tiles 0 … end - 1. A later one, which is partial, stays.

        window 0            window 1
        0 1 2 3 4 5 6 7     8 9 10 …        pieces 0 … 7     (window 8, num_starts 2)
        4 5 6 7 0 1 2 3     12 13 14 …      pieces 8 … 15

    Pieces of work that run concurrently read the same keys; in the backward, the same queries. If all read the same tile at a
    time, all would wait for DRAM with the first one. So some (here eight) begin at one tile and the next at another: each reads
    a part of the window from DRAM and finds the rest in the L2 cache, which holds one window of each head in progress. The
    order depends on the piece, not on the thread block: thread blocks get other pieces in each run, and the order of sums must
    not change.
    """
    first = tile & -stagger.window
    length = gl.minimum(stagger.window, end - first)
    shifted = tile + start * length // 65536
    return gl.where(tile < end, gl.where(shifted < first + length, shifted, shifted - length), tile)


@gluon.jit
def load_int(values, index):
    """Load an int32 that the producer stored in shared memory."""
    return gl.max(values.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def scheduled_tile(index, num_tiles, num_sequences, concurrent_heads, DEFER_LAST: gl.constexpr):
    """Map a work index to (sequence, tile).

    `concurrent_heads` heads are processed at a time, and heads vary fastest: the heads of a group read the same rows
    concurrently and find them in the L2 cache. Tiles that take longest under a causal mask come first. With DEFER_LAST the
    last tile of each head, the shortest, is scheduled after all others and fills the last wave. A head's tiles stay in order.
    """
    first_tile = 0
    if DEFER_LAST:
        num_early = (num_tiles - 1) * num_sequences
        first_tile = gl.where(index < num_early, 0, num_tiles - 1)
        num_tiles = gl.where(index < num_early, num_tiles - 1, 1)
        index = gl.where(index < num_early, index, index - num_early)
    first_sequence = index // (num_tiles * concurrent_heads) * concurrent_heads
    index -= first_sequence * num_tiles
    num_concurrent = gl.minimum(concurrent_heads, num_sequences - first_sequence)
    return first_sequence + index % num_concurrent, first_tile + index // num_concurrent


@gluon.jit
def num_steps(tile):
    """Return the number of query tiles of a KeyTile, over all of its query heads."""
    steps = tile.end - tile.begin
    if tile.group is not None:
        steps *= tile.group
    return steps


@gluon.jit
def tile_border(row, b, mask, segments, ROWS: gl.constexpr):
    """First tile border at or after `row`; `row` itself outside of documents (padding, before the first, after the last).

    Borders are at a document's first row plus multiples of ROWS, and at its end.
    """
    if mask.starts is not None:
        first, last = document_interval(position(row, segments), mask, b)
        begin, end = gl.minimum(rows_below(first, segments), row), rows_below(last + 1, segments)
        return gl.maximum(gl.minimum(begin + gl.cdiv(row - begin, ROWS) * ROWS, end), row)
    else:
        return row


@gluon.jit
def next_tile_end(row, piece_end, ROWS: gl.constexpr):
    """End of the next tile of a piece, which has one or two tiles.

    Of two tiles the second has all its rows; it usually starts at the first row of a document.
    """
    return gl.where(piece_end - row > ROWS, piece_end - ROWS, piece_end)


def tma_readable(x: Tensor) -> Tensor:
    """Return x, or a copy that the TMA can read: 16-byte aligned, no expanded dimension."""
    x = aligned(x)
    return x.contiguous() if 0 in x.stride() else x


def zero_padding(x: Tensor, mask: Mask, segments: Segments) -> Tensor:
    """Return x (B, S, H, D) with zeros in padding rows. Padding may hold NaN; the TMA reads whole tiles, and 0 · NaN is NaN."""
    if not mask.has_padding:
        return x
    lo, hi = mask.interval(positions(segments, x.device))
    padding = (lo > hi).expand(x.shape[0], -1)
    result = x.clone(memory_format=torch.contiguous_format)
    result[:, : padding.shape[1]].masked_fill_(padding[..., None, None], 0)
    return result
