"""The end of a ring's backward: two sums in fp32, one of which may be of some rows and heads, become dk and dv in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from .blocks import choose_backend
from .launches import Arguments, Launch
from .triton_common import ANY_SIZE, head_offset, is_aligned, load_tile, store_tile

BLOCK_M = 32


@triton.jit(do_not_specialize=(*ANY_SIZE["do_not_specialize"], "first", "end", "first_head", "end_head"))
def sum_and_cast(
    total, more, dk, dv, total_strides, more_strides, dk_strides, dv_strides,
    rows, num_heads, first, end, first_head, end_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some rows of one head. `more` has the rows first … end - 1 of the heads first_head … end_head - 1."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (row >= first) & (row < end) & (h >= first_head) & (h < end_head)
    total += head_offset(b, h, total_strides)
    more += head_offset(b, h - first_head, more_strides)
    value = load_tile(total, row, total_strides, row < rows, D, BLOCK_D)
    value += load_tile(more, row - first, more_strides, there, D, BLOCK_D)
    store_tile(dk + head_offset(b, h, dk_strides), value, row, dk_strides, row < rows, D, BLOCK_D, False)
    value = load_tile(total + D, row, total_strides, row < rows, DV, BLOCK_DV)
    value += load_tile(more + D, row - first, more_strides, there, DV, BLOCK_DV)
    store_tile(dv + head_offset(b, h, dv_strides), value, row, dv_strides, row < rows, DV, BLOCK_DV, False)


def finish_gradients(
    total: Tensor, more: Tensor, first: int, first_head: int, dk: Tensor, dv: Tensor, backend: str = "auto"
) -> None:
    """dk and dv (B, rows, heads, D) become `total`, plus `more` from a row and a head of it on.

    Both sums are (rows, B, heads, D + Dv), with dK and dV side by side. What is in `total` is lost.
    """
    readable = dk.shape[3] % 8 == 0 and all(map(is_aligned, (total, more, dk, dv)))
    if readable and total.is_cuda and choose_backend(backend, dk, dv) in ("triton", "hopper"):
        launch(total, more, first, first_head, dk, dv)()
        return
    total[first : first + more.shape[0], :, first_head : first_head + more.shape[2]] += more
    for grad, x in zip((dk, dv), total.transpose(0, 1).split((dk.shape[3], dv.shape[3]), 3), strict=True):
        grad.copy_(x)


def launch(total: Tensor, more: Tensor, first: int, first_head: int, dk: Tensor, dv: Tensor) -> Launch:
    return Launch(
        sum_and_cast, _arguments, dict(total=total, more=more, dk=dk, dv=dv), dict(first=first, first_head=first_head)
    )


def _arguments(total: Tensor, more: Tensor, dk: Tensor, dv: Tensor, first: int, first_head: int) -> Arguments:
    batch, rows, heads, width = dk.shape
    given = dict(total=total, more=more, dk=dk, dv=dv, dk_strides=dk.stride()[:3], dv_strides=dv.stride()[:3])
    given |= {f"{name}_strides": x.transpose(0, 1).stride()[:3] for name, x in (("total", total), ("more", more))}
    given |= dict(rows=rows, num_heads=heads, first=first, end=first + more.shape[0])
    given |= dict(first_head=first_head, end_head=first_head + more.shape[2], D=width, DV=dv.shape[3], BLOCK_M=BLOCK_M)
    given |= dict(BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=triton.next_power_of_2(dv.shape[3]))
    return batch * heads * -(-rows // BLOCK_M), given
