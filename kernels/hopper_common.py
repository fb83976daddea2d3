"""What both Hopper kernels share: how tensors are described to the TMA, and what the TMA must never read."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .mask import Mask
from .segments import Segment, positions
from .triton_common import aligned, split_tile

CACHE = (
    16 * 2**20
)  # bytes of the L2 cache that the heads in work may fill; 8 and 32 MiB were no faster, everything at once was slower
WARPGROUP_ROWS = 64  # what one warpgroup multiplies at a time


@gluon.jit
def barriers(NUM: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """NUM pairs: "full", which takes all writers, and "free", which takes all readers."""
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(free.index(i), count=READERS)
    return full, free


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


def shared_layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=4)


def descriptor(x: Tensor, rows: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """(B, S, H, D) as (batch, head, row, column). Rows from `rows` on, and columns from D on, are read as zeros."""
    batch, _, heads, width = x.shape
    # the stride of a dimension of size 1 can be anything, which the TMA would not take
    strides = [x.stride(dim) if x.shape[dim] > 1 else block_columns for dim in (0, 2, 1)]
    block = [1, 1, block_rows, block_columns]
    return TensorDescriptor(x, [batch, heads, rows, width], [*strides, 1], block, shared_layout(x.dtype))


def fetchable(x: Tensor) -> Tensor:
    """The tensor, or a copy that the TMA can read: rows of 16 bytes and more, nothing expanded."""
    x = aligned(x)
    return x.contiguous() if any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)) else x


def without_padding(x: Tensor, mask: Mask, at: list[Segment]) -> Tensor:
    """x with zeros where documents have padding, whose memory may hold NaN: the TMA reads whole tiles, and 0 · NaN is NaN."""
    if not mask.has_padding:
        return x
    lo, hi = mask.interval(positions(at, x.device))
    padding = (lo > hi).expand(x.shape[0], -1)
    filled = x.clone(memory_format=torch.contiguous_format)
    filled[:, : padding.shape[1]].masked_fill_(padding[..., None, None], 0)
    return filled


def heads_together(streamed: int, group: int) -> int:
    """How many heads to work on at a time, so that what they stream, `streamed` bytes for each group, stays in the L2 cache."""
    return group * max(2, CACHE // max(1, streamed))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(device: torch.device) -> int:
    """One for each multiprocessor."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 132
