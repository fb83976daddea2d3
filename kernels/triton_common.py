"""What the portable forward and backward kernels share: positions, intervals, scores, and how they are launched.

A `_at` tuple is (start0, step0, count0, start1, step1, count1): at most two ascending segments. TWO says that the second
one is there. A mask arrives as (left, right, starts, ends, prefix); what is None costs nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mask import SENTINEL, Mask
from .philox import threshold
from .segments import Segment

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
EVERYWHERE: tl.constexpr = tl.constexpr(2**30)  # above every position, and positions can still be added to it
ALIGN: tl.constexpr = tl.constexpr(8)  # elements: what `aligned` makes sure of
NOWHERE: tl.constexpr = tl.constexpr(-(2**30))


@triton.jit
def position(row, at, TWO: tl.constexpr):
    """Global position of a local row; rows behind the end go on ascending."""
    p = at[0] + row * at[1]
    if TWO:
        p = tl.where(row < at[2], p, at[3] + (row - at[2]) * at[4])
    return p


@triton.jit
def rows_below(p, at, TWO: tl.constexpr):
    """How many local rows stand before position p: turns an interval of positions into one of rows."""
    n = tl.minimum(tl.maximum((tl.maximum(p - at[0], 0) + at[1] - 1) // at[1], 0), at[2])
    if TWO:
        n += tl.minimum(tl.maximum((tl.maximum(p - at[3], 0) + at[4] - 1) // at[4], 0), at[5])
    return n


@triton.jit
def row_count(at, TWO: tl.constexpr):
    if TWO:
        return at[2] + at[5]
    else:
        return at[2]


@triton.jit
def rows_of(row, at, starts, ends, length, TWO: tl.constexpr):
    """Which rows exist and are not padding. Padding may hold anything, and 0 · NaN is NaN, so it is never loaded."""
    ok = row < row_count(at, TWO)
    if starts is not None:
        first, last = document(position(row, at, TWO), starts, ends, length)
        ok &= first <= last
    return ok


@triton.jit
def document(p, starts, ends, length):
    """First and last position of the document at p; behind the end, an empty interval that keeps ascending."""
    inside = (p >= 0) & (p < length)
    first = tl.load(starts + p, mask=inside, other=0)
    last = tl.load(ends + p, mask=inside, other=-1)
    return tl.where(p >= length, length, first), tl.where(p >= length, length - 1, last)


@triton.jit
def keys_of(p, left, right, starts, ends, length, prefix):
    """lo and hi: the keys that the query at p sees."""
    lo = p * 0
    hi = p * 0 + EVERYWHERE
    if starts is not None:
        lo, hi = document(p, starts, ends, length)
    if left is not None:
        lo = tl.maximum(lo, p - left)
    if right is not None:
        reach = p + right
        if prefix is not None:
            reach = tl.maximum(reach, tl.load(prefix) - 1)
        hi = tl.minimum(hi, reach)
    return lo, hi


@triton.jit
def queries_of(p, left, right, starts, ends, length, prefix):
    """The other way: first and last position of the queries that see the key at p."""
    lo = p * 0 + NOWHERE
    hi = p * 0 + EVERYWHERE
    if starts is not None:
        lo, hi = document(p, starts, ends, length)
    if left is not None:
        hi = tl.minimum(hi, p + left)
    if right is not None:
        reach = p - right
        if prefix is not None:
            reach = tl.where(p < tl.load(prefix), NOWHERE, reach)
        lo = tl.maximum(lo, reach)
    return lo, hi


@triton.jit
def tile_range(first_lo, last_lo, first_hi, last_hi, at, TWO: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr):
    """Tiles [begin, full) and [rest, end) need the compare, tiles [full, rest) are seen whole.

    first_lo … last_hi bound the intervals of a tile's first and last row. Without HEAD nothing is masked at the low end.
    """
    first_row = rows_below(first_lo, at, TWO)
    behind = rows_below(last_hi + 1, at, TWO)
    begin = first_row // BLOCK
    end = tl.maximum((behind + BLOCK - 1) // BLOCK, begin)
    full = begin
    if HEAD:
        full = tl.minimum((rows_below(last_lo, at, TWO) + BLOCK - 1) // BLOCK, end)
    rest = tl.maximum(tl.minimum(rows_below(first_hi + 1, at, TWO) // BLOCK, end), full)
    return begin, full, rest, end


@triton.jit
def head_offset(b, b_stride, h, h_stride):
    """Where a head begins. The hint (see `aligned`) is what lets loads be 16 bytes wide: Triton sees only multiples of 16."""
    return tl.multiple_of(b * b_stride + h * h_stride, ALIGN)


@triton.jit
def load_tile(ptr, rows, row_stride, columns, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, BLOCK) from memory; row_ok None if every row exists. Offsets are 64 bits wide: strides may pass 2**31."""
    at = ptr + tl.multiple_of(rows.to(tl.int64) * row_stride, ALIGN)[:, None] + columns[None, :]
    if WIDTH != BLOCK:
        if row_ok is not None:
            return tl.load(at, mask=row_ok[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        if row_ok is not None:
            return tl.load(at, mask=row_ok[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_tile(ptr, value, rows, row_stride, columns, row_ok, WIDTH: tl.constexpr, ADD: tl.constexpr):
    at = ptr + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    ok = row_ok[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        value += tl.load(at, mask=ok, other=0.0)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def tanh(x):
    """Odd and exact near 0, where 1 - exp(-2x) would cancel."""
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - t) / (1 + t)
    x2 = x * x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def exponents(s, scale, softcap, PRESCALED: tl.constexpr):
    """Raw products → (scores, factor) such that the weights are exp2(scores * factor - …). With softcap the scores are the tanh.

    A positive scale is left to the exponential's own multiply-add; PRESCALED is for the others.
    """
    if softcap is not None:
        return tanh(s * (scale / softcap)), softcap * LOG2E
    elif PRESCALED:
        return s * (scale * LOG2E), 1.0
    else:
        return s, scale * LOG2E


@dataclass
class Launch:
    """A kernel, its grid and its arguments by name: run it, or compile it ahead of time without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def __call__(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments)


def segment_arguments(segments: list[Segment]) -> tuple[tuple[int, ...], bool]:
    """The `_at` tuple and TWO of one ascending run."""
    assert 1 <= len(segments) <= 2
    second = segments[1] if len(segments) == 2 else (0, 1, 0)
    return (*segments[0], *second), len(segments) == 2


def mask_arguments(mask: Mask, device: torch.device) -> dict[str, Any]:
    """A mask's numbers, and the stride from one batch row to the next; what is unbounded is None."""
    left, right, starts, ends, prefix = mask.bounds(device)
    return dict(
        left=None if left == SENTINEL else left,
        right=None if right == SENTINEL else right,
        starts=starts,
        ends=ends,
        length=None if starts is None else starts.shape[-1],
        doc_stride=None if starts is None else batch_stride(starts, 2),
        prefix=prefix,
        prefix_stride=None if prefix is None else batch_stride(prefix, 1),
    )


def option_arguments(head_start: int, scale: float, softcap: float, dropout: float, seed: Tensor | None) -> dict[str, Any]:
    return dict(
        head_start=head_start,
        scale=scale,
        softcap=softcap or None,
        seed=seed if dropout else None,
        keep_rate=1 - dropout if dropout else None,
        keep_limit=threshold(dropout) if dropout else None,
        seed_stride=batch_stride(seed, 1) if dropout else None,
        PRESCALED=scale <= 0,
    )


def batch_stride(tensor: Tensor, dims: int) -> int:
    """0 where one row serves the whole batch."""
    return tensor.stride(0) if tensor.ndim == dims and tensor.shape[0] > 1 else 0


def strides(name: str, tensor: Tensor | None, axes: str = "bsh") -> dict[str, int | None]:
    """Of all dimensions but the last of (B, S, H, D), whose stride is 1."""
    return {f"{name}_{axis}": None if tensor is None else tensor.stride(i) for i, axis in enumerate(axes)}


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with consecutive columns, and rows that begin at multiples of 8 elements and of 16 bytes.

    Triton knows of a stride only whether it is a multiple of 16, so kernels are told of the 8. Otherwise they would load
    element by element, which is slow, and which Triton 3.6 gets wrong on sm_90 (seen with D 248, Dv 24).
    """
    even = all(stride % ALIGN.value == 0 for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1)
    whole = tensor.stride(-1) == 1 and even and (tensor.is_meta or tensor.data_ptr() % 16 == 0)
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def quads(k_at: list[Segment], block: int) -> bool:
    """Whether every tile of keys is consecutive and starts at a multiple of 4 (see philox.keep_tile)."""
    return all(step == 1 and start % 4 == 0 for start, step, _ in k_at) and (len(k_at) == 1 or k_at[0][2] % block == 0)
