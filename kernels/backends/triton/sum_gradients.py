"""Sums of gradients in a ring's backward: up to three, of some rows and heads each, become dk and dv in one pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.triton.common import ANY_SIZE, head_offset, load_tile, store_tile
from ringspan.kernels.runtime.launch import Arguments, Launch
from ringspan.kernels.tensors import is_aligned

BLOCK_M = 32
NAMES = ("one", "two", "three")
MOST_SUMMANDS = len(NAMES)
ENDS = ("row", "row_end", "head", "head_end")
# Where a summand begins and ends. (In a tuple Triton would tell such numbers apart, and compile the kernel again.)
BORDERS = [f"{name}_{end}" for name in NAMES for end in ENDS]


class Summand(NamedTuple):
    """Gradients of some rows and heads, dK and dV side by side, and where those belong."""

    of: Tensor  # (rows, B, heads, D + Dv)
    row: int = 0
    head: int = 0

    @property
    def place(self) -> tuple[slice, slice]:
        """Rows and heads of the whole."""
        return slice(self.row, self.row + self.of.shape[0]), slice(self.head, self.head + self.of.shape[2])


@triton.jit
def columns_of(summand, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    x, strides, first_row, row_end, first_head, head_end = summand
    there = (row >= first_row) & (row < row_end) & (h >= first_head) & (h < head_end)
    x += column + head_offset(b, h - first_head, strides)
    return load_tile(x, row - first_row, strides, there, WIDTH, BLOCK)


@triton.jit
def sum_of(one, two, three, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    value = columns_of(one, b, h, row, column, WIDTH, BLOCK)
    if two[0] is not None:
        value += columns_of(two, b, h, row, column, WIDTH, BLOCK)
    if three[0] is not None:
        value += columns_of(three, b, h, row, column, WIDTH, BLOCK)
    return value


@triton.jit(do_not_specialize=(*ANY_SIZE["do_not_specialize"], *BORDERS))
def sum_and_cast(
    one, two, three, dk, dv, one_strides, two_strides, three_strides, dk_strides, dv_strides, rows, num_heads,
    one_row, one_row_end, one_head, one_head_end, two_row, two_row_end, two_head, two_head_end,
    three_row, three_row_end, three_head, three_head_end,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some rows of one head."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    one = (one, one_strides, one_row, one_row_end, one_head, one_head_end)
    two = (two, two_strides, two_row, two_row_end, two_head, two_head_end)
    three = (three, three_strides, three_row, three_row_end, three_head, three_head_end)
    value = sum_of(one, two, three, b, h, row, 0, D, BLOCK_D)
    store_tile(dk + head_offset(b, h, dk_strides), value, row, dk_strides, row < rows, D, BLOCK_D, False)
    value = sum_of(one, two, three, b, h, row, D, DV, BLOCK_DV)
    store_tile(dv + head_offset(b, h, dv_strides), value, row, dv_strides, row < rows, DV, BLOCK_DV, False)


def sum_gradients(summands: Sequence[Summand], dk: Tensor, dv: Tensor, backend: str = "auto") -> None:
    """dk and dv (B, rows, heads, D) become the sums of up to three; zeros where there is none.

    They may be the columns of the first, if that has all rows and heads. Where a summand has them all, it may be overwritten.
    """
    first = summands[0]
    _, rows, heads, width = dk.shape
    assert len(summands) <= MOST_SUMMANDS and all(its.of.dtype == first.of.dtype for its in summands)
    assert all(r.stop <= rows and h.stop <= heads for r, h in (its.place for its in summands)), "they do not belong there"
    readable = width % 8 == 0 and all(map(is_aligned, (*(its.of for its in summands), dk, dv)))
    if readable and dk.is_cuda and first.of.dtype == torch.float32 and backend not in ("reference", "chunked"):
        launch(summands, dk, dv)()
        return
    everywhere = slice(0, rows), slice(0, heads)
    base = next((its for its in summands if its.place == everywhere), None)
    whole = first.of.new_zeros(rows, dk.shape[0], heads, width + dv.shape[3]) if base is None else base.of
    for its in summands:
        if its is not base:
            at_rows, at_heads = its.place
            whole[at_rows, :, at_heads] += its.of
    for grad, x in zip((dk, dv), whole.transpose(0, 1).split((width, dv.shape[3]), 3), strict=True):
        grad.copy_(x)


def launch(summands: Sequence[Summand], dk: Tensor, dv: Tensor) -> Launch:
    tensors: dict[str, Any] = dict.fromkeys(NAMES) | dict(dk=dk, dv=dv)
    borders = dict.fromkeys(BORDERS, 0)
    for name, its in zip(NAMES, summands, strict=False):
        rows, heads = its.place
        tensors[name] = its.of
        borders |= {f"{name}_{end}": n for end, n in zip(ENDS, (rows.start, rows.stop, heads.start, heads.stop), strict=True)}
    return Launch(sum_and_cast, _arguments, tensors, borders)


def _arguments(one: Tensor, two: Tensor | None, three: Tensor | None, dk: Tensor, dv: Tensor, **borders: int) -> Arguments:
    batch, rows, heads, width = dk.shape
    given = dict(one=one, two=two, three=three, dk=dk, dv=dv, dk_strides=dk.stride()[:3], dv_strides=dv.stride()[:3])
    for name, x in zip(NAMES, (one, two, three), strict=True):
        given[f"{name}_strides"] = None if x is None else x.transpose(0, 1).stride()[:3]
    given |= dict(rows=rows, num_heads=heads, D=width, DV=dv.shape[3], BLOCK_M=BLOCK_M, **borders)
    given |= dict(BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(dv.shape[3]))
    return batch * heads * -(-rows // BLOCK_M), given
