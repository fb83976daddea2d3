"""Sum of up to three gradient buffers in one pass: reduces a ring's partial dK/dV into dk and dv.

buffer x0      rows 0 … S, heads 0 … H  ─┐
buffer x1      some rows, some heads    ─┼─ fp32 sum ── cast ── dk, dv
buffer x2      some rows, some heads    ─┘
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.triton.arguments import strides_argument
from ringspan.kernels.backends.triton.common import ANY_SIZE, head_offset, load_tile, store_tile
from ringspan.kernels.runtime.launch import Arguments, Launch
from ringspan.kernels.tensors import is_aligned

BLOCK_M = 32
OPERANDS = ("x0", "x1", "x2")  # the kernel's arguments
MAX_SUMMANDS = len(OPERANDS)
EXTENT_FIELDS = ("row", "row_end", "head", "head_end")
# One argument per bound: `do_not_specialize` does not reach into tuples, so other bounds would compile another kernel.
EXTENTS = [f"{name}_{field}" for name in OPERANDS for field in EXTENT_FIELDS]


class Summand(NamedTuple):
    """Gradients of a range of rows and heads; dK and dV are adjacent columns."""

    grads: Tensor  # (rows, B, heads, D + Dv)
    row: int = 0  # first row and first head within the sum
    head: int = 0

    @property
    def extent(self) -> tuple[slice, slice]:
        """Ranges of rows and heads that it covers in the sum."""
        return slice(self.row, self.row + self.grads.shape[0]), slice(self.head, self.head + self.grads.shape[2])


class Operand(NamedTuple):
    """A summand within the kernel."""

    grads: Any
    strides: Any
    row: Any
    row_end: Any
    head: Any
    head_end: Any


@triton.jit
def load_summand(x, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (rows, BLOCK) of one summand; zeros outside of its rows and heads."""
    inside = (row >= x.row) & (row < x.row_end) & (h >= x.head) & (h < x.head_end)
    grads = x.grads + (column + head_offset(b, h - x.head, x.strides))
    return load_tile(grads, row - x.row, x.strides, inside, WIDTH, BLOCK)


@triton.jit
def sum_tile(x0, x1, x2, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum up to three summands over one tile, WIDTH columns from `column` on."""
    value = load_summand(x0, b, h, row, column, WIDTH, BLOCK)
    if x1.grads is not None:
        value += load_summand(x1, b, h, row, column, WIDTH, BLOCK)
    if x2.grads is not None:
        value += load_summand(x2, b, h, row, column, WIDTH, BLOCK)
    return value


@triton.jit(do_not_specialize=(*ANY_SIZE["do_not_specialize"], *EXTENTS))
def sum_and_cast(
    x0, x1, x2, dk, dv, x0_strides, x1_strides, x2_strides, dk_strides, dv_strides, rows, num_heads,
    x0_row, x0_row_end, x0_head, x0_head_end, x1_row, x1_row_end, x1_head, x1_head_end,
    x2_row, x2_row_end, x2_head, x2_head_end,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum and cast one tile of rows of one head."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x0 = Operand(x0, x0_strides, x0_row, x0_row_end, x0_head, x0_head_end)
    x1 = Operand(x1, x1_strides, x1_row, x1_row_end, x1_head, x1_head_end)
    x2 = Operand(x2, x2_strides, x2_row, x2_row_end, x2_head, x2_head_end)
    value = sum_tile(x0, x1, x2, b, h, row, 0, D, BLOCK_D)
    store_tile(dk + head_offset(b, h, dk_strides), value, row, dk_strides, row < rows, D, BLOCK_D, False)
    value = sum_tile(x0, x1, x2, b, h, row, D, DV, BLOCK_DV)
    store_tile(dv + head_offset(b, h, dv_strides), value, row, dv_strides, row < rows, DV, BLOCK_DV, False)


def sum_gradients(summands: Sequence[Summand], dk: Tensor, dv: Tensor, backend: str = "auto") -> None:
    """Write the sum of up to three summands to dk and dv; elements that no summand covers become 0.

    Args:
        summands: At most MAX_SUMMANDS, all of one dtype. A summand that covers all rows and heads may be overwritten.
        dk: (B, rows, heads, D). It may be the first D columns of the first summand, if that covers all rows and heads.
        dv: (B, rows, heads, Dv). Likewise for the other columns.
        backend: "reference" and "chunked" sum with torch; otherwise a CUDA device uses the kernel where it can.
    """
    first = summands[0]
    _, rows, heads, width = dk.shape
    assert len(summands) <= MAX_SUMMANDS and all(summand.grads.dtype == first.grads.dtype for summand in summands)
    in_range = all(r.stop <= rows and h.stop <= heads for r, h in (summand.extent for summand in summands))
    assert in_range, "a summand exceeds the rows or heads of dk and dv"
    readable = width % 8 == 0 and all(map(is_aligned, (*(summand.grads for summand in summands), dk, dv)))
    if readable and dk.is_cuda and first.grads.dtype == torch.float32 and backend not in ("reference", "chunked"):
        launch(summands, dk, dv)()
        return
    all_rows_and_heads = slice(0, rows), slice(0, heads)
    base = next((summand for summand in summands if summand.extent == all_rows_and_heads), None)
    total = first.grads.new_zeros(rows, dk.shape[0], heads, width + dv.shape[3]) if base is None else base.grads
    for summand in summands:
        if summand is not base:
            row_range, head_range = summand.extent
            total[row_range, :, head_range] += summand.grads
    for grad, x in zip((dk, dv), total.transpose(0, 1).split((width, dv.shape[3]), 3), strict=True):
        grad.copy_(x)


def launch(summands: Sequence[Summand], dk: Tensor, dv: Tensor) -> Launch:
    """Return the kernel's launch for these summands (see sum_gradients)."""
    tensors: dict[str, Any] = dict.fromkeys(OPERANDS) | dict(dk=dk, dv=dv)
    extents = dict.fromkeys(EXTENTS, 0)
    for name, summand in zip(OPERANDS, summands, strict=False):
        rows, heads = summand.extent
        bounds = rows.start, rows.stop, heads.start, heads.stop
        tensors[name] = summand.grads
        extents |= {f"{name}_{field}": bound for field, bound in zip(EXTENT_FIELDS, bounds, strict=True)}
    return Launch(sum_and_cast, _arguments, tensors, extents)


def _arguments(x0: Tensor, x1: Tensor | None, x2: Tensor | None, dk: Tensor, dv: Tensor, **extents: int) -> Arguments:
    batch, rows, heads, width = dk.shape
    args: dict[str, Any] = dict(
        x0=x0, x1=x1, x2=x2, dk=dk, dv=dv, dk_strides=strides_argument(dk), dv_strides=strides_argument(dv)
    )
    for name, x in zip(OPERANDS, (x0, x1, x2), strict=True):
        args[f"{name}_strides"] = None if x is None else strides_argument(x.transpose(0, 1))
    args |= dict(rows=rows, num_heads=heads, D=width, DV=dv.shape[3], BLOCK_M=BLOCK_M, **extents)
    args |= dict(BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(dv.shape[3]))
    return batch * heads * -(-rows // BLOCK_M), args
