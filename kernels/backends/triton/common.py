"""Device functions that all kernels share: positions of rows, visible keys and queries, tile ranges, loads and stores.

Kernels take groups of arguments as tuples. An element that is None is a compile-time constant and costs nothing.

    q_at, k_at = (start0, step0, count0, start1, step1, count1, start1 - count0 * step1)
                 one or two segments; positions ascend with rows
    mask       = (left, right, starts, ends, length, prefix, batch stride of starts and ends, batch stride of prefix)
                 starts, ends: first and last position of the document at each position
    drop       = (seed, batch stride of seed, 1 - rate, limit, head_start)
    *_strides  = (batch, row, head) of a (B, S, H, D) tensor; columns are contiguous
"""

from typing import Any

import triton
import triton.language as tl

from ringspan.kernels.dropout import keep_tile

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MAX_POSITION: tl.constexpr = tl.constexpr(2**30)  # larger than every position; adding a position does not overflow
MIN_POSITION: tl.constexpr = tl.constexpr(-(2**30))
ALIGN: tl.constexpr = tl.constexpr(8)  # elements; tensors.aligned guarantees that strides are multiples of it
# Sizes used only as counts, and tensors of which a thread loads single elements. Specialised, each mix of 1, multiples of 16
# and other values, and each slice that begins at another row, would compile a kernel of its own; see launch.any_sizes.
ANY_SIZE: Any = dict(
    do_not_specialize=("rows", "num_tiles", "num_sequences", "num_heads", "group", "concurrent_heads"),
    do_not_specialize_on_alignment=("lse", "delta", "carry_lse"),
)


@triton.jit
def position(row, segments):
    """Global position of a local row; positions keep ascending past the last row."""
    p = segments[0] + row * segments[1]
    if segments[3] is not None:
        p = tl.where(row < segments[2], p, segments[6] + row * segments[4])
    return p


@triton.jit
def rows_below(p, segments):
    """Number of local rows before position p: converts an interval of positions into one of rows."""
    n = tl.minimum((tl.maximum(p - segments[0], 0) + segments[1] - 1) // segments[1], segments[2])
    if segments[3] is not None:
        n += tl.minimum((tl.maximum(p - segments[3], 0) + segments[4] - 1) // segments[4], segments[5])
    return n


@triton.jit
def row_count(segments):
    if segments[3] is not None:
        return segments[2] + segments[5]
    else:
        return segments[2]


@triton.jit
def valid_rows(row, segments, mask, b):
    """Mask of rows that exist and are not padding. Padding may hold NaN, and 0 · NaN is NaN, so it is never loaded."""
    ok = row < row_count(segments)
    if mask[2] is not None:
        first, last = document_interval(position(row, segments), mask, b)
        ok &= first <= last
    return ok


@triton.jit
def document_interval(p, mask, b):
    """First and last position of the document at p; past the end an empty interval, whose bounds keep ascending."""
    length = mask[4]
    inside = (p >= 0) & (p < length)
    row = b.to(tl.int64) * mask[6]
    first = tl.load(mask[2] + row + p, mask=inside, other=0)
    last = tl.load(mask[3] + row + p, mask=inside, other=-1)
    return tl.where(p >= length, length, first), tl.where(p >= length, length - 1, last)


@triton.jit
def visible_keys(p, mask, b):
    """First and last position, lo and hi, of the keys visible to the query at p."""
    lo = p * 0
    hi = p * 0 + MAX_POSITION
    if mask[2] is not None:
        lo, hi = document_interval(p, mask, b)
    if mask[0] is not None:
        lo = tl.maximum(lo, p - mask[0])
    if mask[1] is not None:
        limit = p + mask[1]
        if mask[5] is not None:
            limit = tl.maximum(limit, tl.load(mask[5] + b * mask[7]) - 1)
        hi = tl.minimum(hi, limit)
    return lo, hi


@triton.jit
def visible_queries(p, mask, b):
    """First and last position, lo and hi, of the queries to which the key at p is visible."""
    lo = p * 0 + MIN_POSITION
    hi = p * 0 + MAX_POSITION
    if mask[2] is not None:
        lo, hi = document_interval(p, mask, b)
    if mask[0] is not None:
        hi = tl.minimum(hi, p + mask[0])
    if mask[1] is not None:
        limit = p - mask[1]
        if mask[5] is not None:
            limit = tl.where(p < tl.load(mask[5] + b * mask[7]), MIN_POSITION, limit)
        lo = tl.maximum(lo, limit)
    return lo, hi


@triton.jit
def tile_range(first_lo, last_lo, first_hi, last_hi, segments, first_row, BLOCK: tl.constexpr, LOW_BOUND: tl.constexpr):
    """Return (begin, full_begin, full_end, end): the tiles to visit, and which of them are full (need no mask).

        tiles      begin    full_begin        full_end    end
                     | partial |      full       | partial |

    (first_lo, first_hi) and (last_lo, last_hi) are the visible intervals of the first and last row of the own tile.
    Without LOW_BOUND the mask has no lower bound. Tiles are counted from first_row, before which no row is visible.
    """
    begin = (rows_below(first_lo, segments) - first_row) // BLOCK
    end = tl.maximum(tl.cdiv(rows_below(last_hi + 1, segments) - first_row, BLOCK), begin)
    full_begin = begin
    if LOW_BOUND:
        full_begin = tl.minimum(tl.cdiv(rows_below(last_lo, segments) - first_row, BLOCK), end)
    full_end = tl.maximum(tl.minimum((rows_below(first_hi + 1, segments) - first_row) // BLOCK, end), full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def partial_tile(i, begin, full_begin, full_end):
    """The i-th partial tile: those before `full_begin`, then those from `full_end` on."""
    return tl.where(begin + i < full_begin, begin + i, full_end + i - (full_begin - begin))


@triton.jit
def head_offset(b, h, strides):
    """Offset of a head. The hint allows loads of 16 bytes: Triton detects only strides that are multiples of 16."""
    return tl.multiple_of(b * strides[0] + h * strides[2], ALIGN)


@triton.jit
def load_tile(ptr, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (rows, BLOCK); row_ok is None if every row exists. Offsets have 64 bits because they may exceed 2³¹."""
    columns = tl.arange(0, BLOCK)
    pointers = ptr + tl.multiple_of(rows.to(tl.int64) * strides[1], ALIGN)[:, None] + columns[None, :]
    if WIDTH != BLOCK:
        if row_ok is not None:
            return tl.load(pointers, mask=row_ok[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        if row_ok is not None:
            return tl.load(pointers, mask=row_ok[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(ptr, value, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Store (rows, BLOCK), or add to memory without atomics."""
    columns = tl.arange(0, BLOCK)
    pointers = ptr + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :]
    ok = row_ok[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        value += tl.load(pointers, mask=ok, other=0.0)
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def load_row_stats(ptr, rows, b, h, strides, row_ok):
    """Load rows of lse or delta (B, H, S); strides in this order."""
    pointers = ptr + b * strides[0] + h * strides[1] + rows.to(tl.int64) * strides[2]
    if row_ok is not None:
        return tl.load(pointers, mask=row_ok, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dropout_keep(drop, b, h, p_q, p_k, QUADS: tl.constexpr):
    """Mask of the weights that dropout keeps. With one seed per sequence the batch index is 0 (see dropout.py)."""
    seed = tl.load(drop[0] + b * drop[1])
    batch = tl.where(drop[1] == 0, b, 0).to(tl.int32)
    return keep_tile(seed, drop[3], batch, (h + drop[4]).to(tl.int32), p_q[:, None], p_k[None, :], QUADS)


@triton.jit
def tanh(x):
    """tanh as an odd function; a polynomial near 0, where 1 - exp(-2x) cancels."""
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - t) / (1 + t)
    x2 = x * x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def exponents(s, scale, softcap, PRESCALED: tl.constexpr):
    """Turn q kᵀ into (scores, factor), so that weights are exp2(scores · factor - …). With softcap, scores are the tanh.

    A positive scale goes into the multiply-add of the exponential; PRESCALED covers scales ≤ 0.
    """
    if softcap is not None:
        return tanh(s * (scale / softcap)), softcap * LOG2E
    elif PRESCALED:
        return s * (scale * LOG2E), 1.0
    else:
        return s, scale * LOG2E
