"""Loads of the carry and stores of out and lse of Hopper's forward (see forward.py).

    carry ── load_carry ──▶  acc, total of a query tile  ── all its keys ──▶  acc / total  ── registers, or TMA ──▶  out, lse

`out` is stored from registers, or through shared memory by TMA where the tile table says STAGED. The TMA stores 64 rows and
the first chunk of columns (chunks.py). The second chunk, and a tile that ends within 64 rows, are stored from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ringspan.kernels.backends.hopper.online_softmax import LANE_LAYOUT
from ringspan.kernels.backends.triton.common import LN2, LOG2E
from ringspan.kernels.runtime.triton_compat import tma_store

# Upper limit of a carry's weight. Below the limit the row's reference is the largest score of its first tile, so the weight
# of that score is exactly 1, as without a carry, and is not rounded to 16 bits. At the limit these scores are negligible.
LOG2_MAX_CARRY_WEIGHT = gl.constexpr(64.0)
MAX_CARRY_WEIGHT = gl.constexpr(2.0**64)


@gluon.jit
def load_carry(outputs, b, h, row, row_ok, acc, DV: gl.constexpr):
    """Return the carry, which initialises a row: its out, and its lse in base 2."""
    b, h = b.to(gl.int64), h.to(gl.int64)
    strides = outputs.carry_lse_strides
    lse_row = gl.load(
        outputs.carry_lse + b * strides.batch + h * strides.head + row.to(gl.int64) * strides.row,
        mask=row_ok, other=float("-inf"),
    )  # fmt: skip
    if outputs.carry_out is not None:
        acc = load_carry_out(outputs.carry_out, outputs.carry_out_strides, b, h, row, row_ok, acc, DV)
    carry_exponent = gl.convert_layout(lse_row * LOG2E, gl.SliceLayout(1, LANE_LAYOUT), assert_trivial=True)[:, None]
    return acc, carry_exponent + gl.full([64, 4], 0.0, gl.float32, LANE_LAYOUT)


@gluon.jit
def load_carry_out(carry_out, strides, b, h, row, row_ok, acc, DV: gl.constexpr):
    """Return the carry's out as initial accumulators."""
    first = load_carry_chunk(carry_out, strides, b, h, row, row_ok, acc[0], 0, DV)
    if len(acc) == 1:
        return (first,)
    else:
        return first, load_carry_chunk(carry_out, strides, b, h, row, row_ok, acc[1], first.shape[1], DV)


@gluon.jit
def load_carry_chunk(carry_out, strides, b, h, row, row_ok, like, FIRST: gl.constexpr, DV: gl.constexpr):
    """Load the columns from FIRST on, in the shape and layout of an accumulator."""
    O_ROWS: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    column = FIRST + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    is_valid = gl.convert_layout(row_ok, O_ROWS)[:, None] & (column < DV)[None, :]
    pointers = carry_out + b * strides.batch + h * strides.head
    o_row = gl.convert_layout(row, O_ROWS).to(gl.int64)
    return gl.load(pointers + o_row[:, None] * strides.row + column[None, :], mask=is_valid, other=0.0)


@gluon.jit
def store_result(
    acc, reference, total, tile, row, num_rows, outputs, o_tile, CONSUMER_ID: gl.constexpr,
    DOCUMENTS: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Divide by the softmax sum; store a consumer's rows of out and lse before the tile's end."""
    b, h = tile.b.to(gl.int64), tile.h.to(gl.int64)
    # `end_row` selects the same rows without documents, but compiles to other code, which is not timed
    row_ok = row < (tile.end_row if DOCUMENTS else num_rows)
    total = gl.convert_layout(gl.sum(total, 1), row.type.layout, assert_trivial=True)
    reference_row = gl.convert_layout(gl.max(reference, 1), row.type.layout, assert_trivial=True)
    empty = total == 0
    divisor = gl.where(empty, 1.0, total)
    lse_row = gl.where(empty, float("-inf"), reference_row * LN2 + gl.log(divisor))
    if outputs.carry_lse is not None:  # a row without a visible key keeps the carry's lse bit for bit
        strides = outputs.carry_lse_strides
        pointers = outputs.carry_lse + b * strides.batch + h * strides.head
        carry_lse_row = gl.load(pointers + row.to(gl.int64) * strides.row, mask=row_ok, other=float("-inf"))
        lse_row = gl.where(total == MAX_CARRY_WEIGHT, carry_lse_row, lse_row)
    pointers = outputs.lse + b * outputs.lse_strides.batch + h * outputs.lse_strides.head
    gl.store(pointers + row.to(gl.int64) * outputs.lse_strides.row, lse_row, mask=row_ok)
    factor = gl.where(empty, 0.0, 1 / divisor)
    first = acc[0]
    first *= gl.convert_layout(factor, gl.SliceLayout(1, first.type.layout))[:, None]
    out = outputs.out + (b * outputs.out_strides.batch + h * outputs.out_strides.head)
    first_row = tile.first_row + CONSUMER_ID * 64
    if outputs.out_tiles is None:
        store_out_chunk(out, outputs.out_strides.row, row, row_ok, first, 0, DV)
    elif DOCUMENTS:
        if (first_row + 64 <= tile.end_row) | (tile.end_row == num_rows):
            store_out(first, outputs.out_tiles, tile.b, tile.h, first_row, o_tile.index(CONSUMER_ID))
        else:
            store_out_chunk(out, outputs.out_strides.row, row, row_ok, first, 0, DV)
    else:
        store_out(first, outputs.out_tiles, tile.b, tile.h, first_row, o_tile.index(CONSUMER_ID))
    if len(acc) == 2:
        second = acc[1]
        second *= gl.convert_layout(factor, gl.SliceLayout(1, second.type.layout))[:, None]
        store_out_chunk(out, outputs.out_strides.row, row, row_ok, second, first.shape[1], DV)


@gluon.jit
def store_out_chunk(out, stride, row, row_ok, acc, FIRST: gl.constexpr, DV: gl.constexpr):
    """Store the columns of out from FIRST on."""
    O_LAYOUT: gl.constexpr = acc.type.layout
    column = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, O_LAYOUT))
    o_row = gl.convert_layout(row, gl.SliceLayout(1, O_LAYOUT)).to(gl.int64)
    o_ok = gl.convert_layout(row_ok, gl.SliceLayout(1, O_LAYOUT))[:, None] & (column < DV)[None, :]
    gl.store(out + o_row[:, None] * stride + column[None, :], acc.to(out.dtype.element_ty), mask=o_ok)


@gluon.jit
def store_out(rows, out_tiles, b, h, first_row, o_tile):
    """Store rows of out by TMA, in two halves if the buffer holds only half. The TMA drops rows past the end of the tensor."""
    COLUMNS: gl.constexpr = o_tile.shape[3]
    if rows.shape[1] == COLUMNS:
        store_out_columns(rows, out_tiles, b, h, first_row, 0, o_tile)
    else:
        left, right = rows.reshape([64, 2, COLUMNS]).permute((0, 2, 1)).split()
        store_out_columns(left, out_tiles, b, h, first_row, 0, o_tile)
        store_out_columns(right, out_tiles, b, h, first_row, COLUMNS, o_tile)


@gluon.jit
def store_out_columns(columns, out_tiles, b, h, first_row, first_column, o_tile):
    """Wait until the TMA has read the buffer, refill it and start the next store."""
    tma.store_wait(0)
    o_tile.reshape([o_tile.shape[2], o_tile.shape[3]]).store(columns.to(out_tiles.dtype))
    fence_async_shared()
    tma_store(out_tiles, [b, h, first_row, first_column], o_tile)
