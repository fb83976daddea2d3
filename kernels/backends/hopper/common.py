"""What the Hopper kernels are made of: barriers and places, the order of work, tensors as the TMA reads them."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringspan.kernels.backends.triton.common import document, position, rows_below, split_tile
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import Segments, positions
from ringspan.kernels.tensors import aligned

WARPGROUP_ROWS = 64  # what one warpgroup multiplies at a time


@gluon.constexpr_function
def product_layout(columns):
    """How a warpgroup's threads hold its rows of a product."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def barriers(NUM: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """NUM pairs: "full", which takes all writers, and "free", which takes all readers; for `arrive_each` these are threads."""
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(free.index(i), count=READERS)
    return full, free


@gluon.jit
def forget(full, free):
    """So that their memory can hold other barriers."""
    NUM: gl.constexpr = full.shape[0]
    for i in gl.static_range(NUM):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(free.index(i))


@gluon.jit
def arrive_each(barrier):
    """As `mbarrier.arrive`, but each thread for itself, so a warpgroup counts 128.

    There one thread does it for all, and Triton 3.6 and 3.7 stop the warpgroup before and after. (This is the arrival that
    follows a thread's asynchronous copies. There are none here, so nothing is waited for.) It orders nothing by itself: before
    it stand a fence, a product's wait, or loads that end in the order in which they began.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def arrive(barrier, IN_STEP: gl.constexpr):
    """A warpgroup frees a place: as one, its warps in step, or each thread for itself. What is faster is measured."""
    if IN_STEP:
        mbarrier.arrive(barrier, count=1)
    else:
        arrive_each(barrier)


@gluon.jit
def wait_full(full, nth, NUM: gl.constexpr):
    """The place in a ring of NUM of the nth thing that comes by, once it is there."""
    place = nth % NUM
    mbarrier.wait(full.index(place), (nth // NUM) & 1)
    return place


@gluon.jit
def wait_free(free, nth, NUM: gl.constexpr):
    """The place where the nth thing goes, once it is free."""
    place = nth % NUM
    mbarrier.wait(free.index(place), ((nth // NUM) & 1) ^ 1)
    return place


@gluon.jit
def nth_tile(j, begin, full, rest, end):
    """The j-th tile to work on: first those that the mask splits, then those seen whole."""
    num_split = full - begin + end - rest
    return gl.where(j < num_split, split_tile(j, begin, full, rest), full + j - num_split)


@gluon.jit
def number(numbers, n):
    """A number that the producer left in shared memory for a warpgroup."""
    return gl.max(numbers.index(n).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def in_turn(index, num_tiles, num_sequences, together, LAST_APART: gl.constexpr):
    """Number of a piece of work → (sequence, which of its tiles).

    `together` heads at a time; of these heads go fastest, so that a group's read the same at the same time and find it in the
    L2 cache. Tiles that take longest under a causal mask come first. If LAST_APART each head's last, the shortest, waits until
    all others have been given out, and fills what these leave idle at the end. A head's tiles come in order all the same.
    """
    first_turn = 0
    if LAST_APART:
        apart = (num_tiles - 1) * num_sequences
        first_turn = gl.where(index < apart, 0, num_tiles - 1)
        num_tiles = gl.where(index < apart, num_tiles - 1, 1)
        index = gl.where(index < apart, index, index - apart)
    first_sequence = index // (num_tiles * together) * together
    index -= first_sequence * num_tiles
    num_together = gl.minimum(together, num_sequences - first_sequence)
    return first_sequence + index % num_together, first_turn + index // num_together


@gluon.jit
def border(row, b, mask, at, ROWS: gl.constexpr):
    """The first border from `row` on; `row` itself where no document is: in padding, or before or behind all documents."""
    if mask[2] is not None:
        first, last = document(position(row, at), mask, b)
        begin, end = gl.minimum(rows_below(first, at), row), rows_below(last + 1, at)
        return gl.maximum(gl.minimum(begin + gl.cdiv(row - begin, ROWS) * ROWS, end), row)
    else:
        return row


@gluon.jit
def first_of_two(row, behind, ROWS: gl.constexpr):
    """Where a piece's next tile ends. Of two tiles the second has all its rows; as a rule it is where a document begins."""
    return gl.where(behind - row > ROWS, behind - ROWS, behind)


def fetchable(x: Tensor) -> Tensor:
    """The tensor, or a copy that the TMA can read: rows of 16 bytes and more, nothing expanded."""
    x = aligned(x)
    return x.contiguous() if 0 in x.stride() else x


def without_padding(x: Tensor, mask: Mask, at: Segments) -> Tensor:
    """x with zeros where documents have padding, whose memory may hold NaN: the TMA reads whole tiles, and 0 · NaN is NaN."""
    if not mask.has_padding:
        return x
    lo, hi = mask.interval(positions(at, x.device))
    padding = (lo > hi).expand(x.shape[0], -1)
    filled = x.clone(memory_format=torch.contiguous_format)
    filled[:, : padding.shape[1]].masked_fill_(padding[..., None, None], 0)
    return filled
