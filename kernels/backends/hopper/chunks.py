"""Head dims that are a sum of two powers of two, such as 96 = 64 + 32 and 192 = 128 + 64, in two chunks.

Blocks in Triton are powers of two. Instead of padding such a head dim to the next one, the kernels hold the columns of each
operand in two blocks, and sum or keep the matmuls of both:

    q = (q0, q1), k = (k0, k1)       scores = q0 k0ᵀ + q1 k1ᵀ
    v = (v0, v1)                     (out0, out1) = (p v0, p v1)

A tuple of one or two chunks stands for TMA descriptors, tiles in shared memory, operands or accumulators. BLOCK_* are the
columns of the first chunk and TAIL_* those of the second, 0 if there is none. Head dims 104 and 112 are padded to one chunk of
128 columns, but sums over columns leave out the last 16.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ringspan.kernels.backends.hopper.common import accumulator_layout
from ringspan.kernels.runtime.triton_compat import tma_load


@gluon.jit
def allocate_tiles(descriptors, NUM: gl.constexpr):
    """Allocate shared memory for NUM blocks of these descriptors."""
    first = allocate_chunk(descriptors[0], NUM)
    if len(descriptors) == 1:
        return (first,)
    else:
        return first, allocate_chunk(descriptors[1], NUM)


@gluon.jit
def allocate_chunk(descriptor, NUM: gl.constexpr):
    """Allocate shared memory for NUM blocks of one chunk."""
    ROWS: gl.constexpr = descriptor.block_type.shape[2]
    COLUMNS: gl.constexpr = descriptor.block_type.shape[3]
    return gl.allocate_shared_memory(descriptor.dtype, [NUM, 1, 1, ROWS, COLUMNS], descriptor.layout)


@gluon.constexpr_function
def block_bytes(descriptors):
    """Bytes of a block of all chunks."""
    return sum([descriptor.block_type.nbytes for descriptor in descriptors])


@gluon.jit
def load_tiles(descriptors, b, h, row, full, tiles, slot):
    """Load rows of all chunks into a slot by TMA."""
    tma_load(descriptors[0], [b, h, row, 0], full, tiles[0].index(slot))
    if len(descriptors) == 2:
        tma_load(descriptors[1], [b, h, row, descriptors[0].block_type.shape[3]], full, tiles[1].index(slot))


@gluon.jit
def select(tiles, slot):
    """Return the chunks of a slot as matrices (rows, columns)."""
    first = as_matrix(tiles[0].index(slot))
    if len(tiles) == 1:
        return (first,)
    else:
        return first, as_matrix(tiles[1].index(slot))


@gluon.jit
def as_matrix(tile):
    """Drop the dimensions batch and head of a block."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def select_rows(tiles, slot, FIRST: gl.constexpr):
    """Return 64 rows of the chunks of a slot."""
    matrices = select(tiles, slot)
    if len(tiles) == 1:
        return (matrices[0].slice(FIRST, 64),)
    else:
        return matrices[0].slice(FIRST, 64), matrices[1].slice(FIRST, 64)


@gluon.jit
def narrow(matrices, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Return WIDTH columns of the first chunk, and the second chunk."""
    if len(matrices) == 1:
        return (matrices[0].slice(FIRST, WIDTH, dim=1),)
    else:
        return matrices[0].slice(FIRST, WIDTH, dim=1), matrices[1]


@gluon.jit
def load_operand(matrices, LAYOUT: gl.constexpr):
    """Load the chunks into registers, as the left operand of a matmul."""
    if len(matrices) == 1:
        return (matrices[0].load(LAYOUT),)
    else:
        return matrices[0].load(LAYOUT), matrices[1].load(LAYOUT)


@gluon.jit
def zero_accumulators(BLOCK: gl.constexpr, TAIL: gl.constexpr):
    """Return zeros (64, BLOCK) and (64, TAIL)."""
    LAYOUT: gl.constexpr = accumulator_layout(BLOCK)
    first = gl.zeros([64, BLOCK], gl.float32, LAYOUT)
    if TAIL == 0:
        return (first,)
    else:
        TAIL_LAYOUT: gl.constexpr = accumulator_layout(TAIL)
        return first, gl.zeros([64, TAIL], gl.float32, TAIL_LAYOUT)


@gluon.constexpr_function
def skips_padding(WIDTH):
    """Whether multiply_transposed leaves out the last 16 columns of a chunk of 128."""
    return 96 < WIDTH <= 112


@gluon.jit
def multiply_transposed(left, right, zero, WIDTH: gl.constexpr):
    """Start left · rightᵀ (64, rows of right), the sum over the WIDTH columns of all chunks, in one to three matmuls."""
    if skips_padding(WIDTH):  # 112 = 64 + 32 + 16
        left, right = left[0], right[0]
        product = warpgroup_mma(left.slice(0, 64, 1), right.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma(left.slice(64, 32, 1), right.slice(64, 32, 1).permute((1, 0)), product, is_async=True)
        return warpgroup_mma(left.slice(96, 16, 1), right.slice(96, 16, 1).permute((1, 0)), product, is_async=True)
    else:
        product = warpgroup_mma(left[0], right[0].permute((1, 0)), zero, use_acc=False, is_async=True)
        if len(left) == 2:
            product = warpgroup_mma(left[1], right[1].permute((1, 0)), product, is_async=True)
        return product


@gluon.jit
def accumulate(weights, right, acc):
    """Start acc + weights · right for each chunk of columns; weights (64, rows of right) are in registers."""
    first = accumulate_chunk(weights, right[0], acc[0])
    if len(acc) == 1:
        return (first,)
    else:
        return first, accumulate_chunk(weights, right[1], acc[1])


@gluon.jit
def accumulate_chunk(weights, right, acc):
    """Start acc + weights · right for one chunk."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(weights, OPERAND), right, acc, is_async=True)


@builtin
def wait_matmuls(pending: Any, *values: Any, _semantic: Any = None) -> Any:
    """Wait until at most `pending` later matmuls run; return the values, matmul results or tuples of them."""
    results = [x for value in values for x in (value if isinstance(value, gl.tuple) else (value,))]
    done = warpgroup_mma_wait(pending, deps=results, _semantic=_semantic)
    remaining = iter(done if len(results) > 1 else (done,))
    waited = [
        gl.tuple([next(remaining) for _ in value]) if isinstance(value, gl.tuple) else next(remaining) for value in values
    ]
    return gl.tuple(waited) if len(waited) > 1 else waited[0]
