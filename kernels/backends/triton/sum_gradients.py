"""Sum of gradient buffers in one pass: reduces a ring's partial dK/dV into dk and dv.

summand 0   rows 0 … S   ─┐
summand 1   some rows    ─┼─ fp32 sum ── cast ── dk, dv
summand 2   some rows    ─┘
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
MAX_SUMMANDS = 6  # each number of summands is a kernel of its own


class Summand(NamedTuple):
    """Gradients of a range of rows; dK and dV are adjacent columns."""

    grads: Tensor  # (rows, B, heads, D + Dv)
    row: int = 0  # first row within the sum

    @property
    def rows(self) -> slice:
        """Rows of the sum that it has gradients of."""
        return slice(self.row, self.row + self.grads.shape[0])


@triton.jit
def load_summand(grads, strides, start, end, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (rows, BLOCK) of a summand with rows start … end; zeros outside of them."""
    first = grads + (column + head_offset(b, h, strides))
    return load_tile(first, row - start, strides, (row >= start) & (row < end), WIDTH, BLOCK)


@triton.jit
def sum_tile(grads, grads_strides, rows_of, b, h, row, column: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum one tile of rows, WIDTH columns from `column` on. rows_of: first row and end of each summand."""
    value = load_summand(grads[0], grads_strides[0], rows_of[0], rows_of[1], b, h, row, column, WIDTH, BLOCK)
    for i in tl.static_range(1, len(grads)):
        start, end = rows_of[2 * i], rows_of[2 * i + 1]
        value += load_summand(grads[i], grads_strides[i], start, end, b, h, row, column, WIDTH, BLOCK)
    return value


@triton.jit(**ANY_SIZE)
def sum_and_cast(
    grads, dk, dv, grads_strides, dk_strides, dv_strides, rows_of, rows, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum and cast one tile of rows of one head."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    value = sum_tile(grads, grads_strides, rows_of, b, h, row, 0, D, BLOCK_D)
    store_tile(dk + head_offset(b, h, dk_strides), value, row, dk_strides, row < rows, D, BLOCK_D, False)
    value = sum_tile(grads, grads_strides, rows_of, b, h, row, D, DV, BLOCK_DV)
    store_tile(dv + head_offset(b, h, dv_strides), value, row, dv_strides, row < rows, DV, BLOCK_DV, False)


def sum_gradients(summands: Sequence[Summand], dk: Tensor, dv: Tensor, backend: str = "auto", min_summands: int = 1) -> None:
    """Write the sum of summands to dk and dv; rows that no summand covers become 0.

    Args:
        summands: One to MAX_SUMMANDS, of one dtype. One that covers all rows may be overwritten.
        dk: (B, rows, heads, D). It may contain the first D columns of the first summand, at that summand's rows.
        dv: (B, rows, heads, Dv). Likewise for the other columns.
        backend: "reference" and "chunked" sum with torch; otherwise a CUDA device uses the kernel where it can.
        min_summands: Fewer summands use the kernel for this number, so that they do not compile another one.
    """
    first = summands[0].grads
    _, rows, heads, width = dk.shape
    assert len(summands) <= MAX_SUMMANDS and all(x.grads.dtype == first.dtype for x in summands)
    assert all(x.rows.stop <= rows and x.grads.shape[2] == heads for x in summands), "a summand has other rows or heads"
    readable = width % 8 == 0 and all(map(is_aligned, (*(x.grads for x in summands), dk, dv)))
    has_kernel = dk.device.type in ("cuda", "meta") and first.dtype == torch.float32
    if readable and has_kernel and backend not in ("reference", "chunked"):
        launch(summands, dk, dv, min_summands)()
        return
    base = next((x for x in summands if x.rows == slice(0, rows)), None)
    total = first.new_zeros(rows, *first.shape[1:]) if base is None else base.grads
    for x in summands:
        if x is not base:
            total[x.rows] += x.grads
    for grad, columns in zip((dk, dv), total.transpose(0, 1).split((width, dv.shape[3]), 3), strict=True):
        grad.copy_(columns)


def launch(summands: Sequence[Summand], dk: Tensor, dv: Tensor, min_summands: int = 1) -> Launch:
    """Return the kernel's launch for these summands (see sum_gradients)."""
    num_missing = max(0, min_summands - len(summands))
    grads = *(x.grads for x in summands), *[summands[0].grads] * num_missing
    rows_of = *(border for x in summands for border in (x.rows.start, x.rows.stop)), *[0] * 2 * num_missing
    return Launch(sum_and_cast, _arguments, dict(grads=grads, dk=dk, dv=dv), dict(rows_of=rows_of))


def _arguments(grads: tuple[Tensor, ...], dk: Tensor, dv: Tensor, rows_of: tuple[int, ...]) -> Arguments:
    batch, rows, heads, width = dk.shape
    args: dict[str, Any] = dict(grads=grads, grads_strides=tuple(strides_argument(x.transpose(0, 1)) for x in grads))
    args |= dict(dk=dk, dv=dv, dk_strides=strides_argument(dk), dv_strides=strides_argument(dv))
    args |= dict(rows_of=rows_of, rows=rows, num_heads=heads, BLOCK_M=BLOCK_M, D=width, DV=dv.shape[3])
    args |= dict(BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(dv.shape[3]))
    return batch * heads * -(-rows // BLOCK_M), args
