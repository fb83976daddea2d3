"""Device functions that all kernels share: positions of rows, visible keys and queries, tile ranges, loads and stores.

Kernels take groups of arguments as named tuples: q_at and k_at, mask, drop, *_strides. An element that is None is a
compile-time constant and costs nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ringspan.kernels.dropout import keep_tile

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MAX_POSITION: tl.constexpr = tl.constexpr(2**30)  # larger than every position; adding a position does not overflow
MIN_POSITION: tl.constexpr = tl.constexpr(-(2**30))
ALIGN: tl.constexpr = tl.constexpr(8)  # elements; tensors.aligned guarantees that strides are multiples of it
# Sizes used only as counts, and statistics of rows. Specialised, each mix of 1, multiples of 16 and other values, and each
# slice that begins at another row, would compile a kernel of its own; see launch.any_sizes.
ANY_SIZE: Any = dict(
    do_not_specialize=("rows", "num_tiles", "num_sequences", "num_heads", "group", "head_splits", "concurrent_heads"),
    do_not_specialize_on_alignment=("lse", "delta", "carry_lse"),
)


class SegmentsArgument(NamedTuple):
    """One or two segments; positions ascend with rows."""

    start: int
    step: int
    num_rows: int
    second_start: int | None
    second_step: int | None
    second_num_rows: int | None
    second_origin: int | None  # position that row 0 would have in the second segment


class MaskArgument(NamedTuple):
    """A mask's bounds; None for a bound that it does not have."""

    left: int | None
    right: int | None
    starts: Any  # pointer to the first position of the document at each position
    ends: Any  # pointer to the last one
    length: int | None  # of starts and ends
    prefix: Any
    document_stride: int | None  # batch stride of starts and ends
    prefix_stride: int | None  # batch stride of prefix


class DropoutArgument(NamedTuple):
    """A dropout (see dropout.py)."""

    seed: Any
    seed_stride: int  # batch stride of seed
    keep_rate: float
    limit: int
    head_start: int


class Strides(NamedTuple):
    """Strides of a (B, S, H, D) tensor; columns are contiguous."""

    batch: Any
    row: Any
    head: Any


class StatsStrides(NamedTuple):
    """Strides of a (B, H, S) tensor, such as lse."""

    batch: Any
    head: Any
    row: Any


@triton.jit
def position(row, segments):
    """Global position of a local row; positions keep ascending past the last row."""
    p = segments.start + row * segments.step
    if segments.second_start is not None:
        p = tl.where(row < segments.num_rows, p, segments.second_origin + row * segments.second_step)
    return p


@triton.jit
def rows_below(p, segments):
    """Number of local rows before position p: converts an interval of positions into one of rows."""
    n = tl.minimum((tl.maximum(p - segments.start, 0) + segments.step - 1) // segments.step, segments.num_rows)
    if segments.second_start is not None:
        offset = tl.maximum(p - segments.second_start, 0)
        n += tl.minimum((offset + segments.second_step - 1) // segments.second_step, segments.second_num_rows)
    return n


@triton.jit
def row_count(segments):
    if segments.second_start is not None:
        return segments.num_rows + segments.second_num_rows
    else:
        return segments.num_rows


@triton.jit
def last_position(segments):
    """Position of the last row. Limited to it, an interval of visible positions excludes `bounded_position` of later rows."""
    return position(row_count(segments) - 1, segments)


@triton.jit
def bounded_position(row, segments):
    """Position of a row; rows after the last one have the next position, because their own may exceed 32 bits."""
    return position(tl.minimum(row, row_count(segments)), segments)


@triton.jit
def valid_rows(row, segments, mask, b):
    """Mask of rows that exist and are not padding. Padding may hold NaN, and 0 · NaN is NaN, so it is never loaded."""
    ok = row < row_count(segments)
    if mask.starts is not None:
        first, last = document_interval(position(row, segments), mask, b)
        ok &= first <= last
    return ok


@triton.jit
def document_interval(p, mask, b):
    """First and last position of the document at p; past the end an empty interval, whose bounds keep ascending."""
    length = mask.length
    inside = (p >= 0) & (p < length)
    row = b.to(tl.int64) * mask.document_stride
    first = tl.load(mask.starts + row + p, mask=inside, other=0)
    last = tl.load(mask.ends + row + p, mask=inside, other=-1)
    return tl.where(p >= length, length, first), tl.where(p >= length, length - 1, last)


@triton.jit
def visible_keys(p, mask, b):
    """First and last position, lo and hi, of the keys visible to the query at p."""
    lo = p * 0
    hi = p * 0 + MAX_POSITION
    if mask.starts is not None:
        lo, hi = document_interval(p, mask, b)
    if mask.left is not None:
        lo = tl.maximum(lo, p - mask.left)
    if mask.right is not None:
        limit = p + mask.right
        if mask.prefix is not None:
            limit = tl.maximum(limit, tl.load(mask.prefix + b * mask.prefix_stride) - 1)
        hi = tl.minimum(hi, limit)
    return lo, hi


@triton.jit
def visible_queries(p, mask, b):
    """First and last position, lo and hi, of the queries to which the key at p is visible."""
    lo = p * 0 + MIN_POSITION
    hi = p * 0 + MAX_POSITION
    if mask.starts is not None:
        lo, hi = document_interval(p, mask, b)
    if mask.left is not None:
        hi = tl.minimum(hi, p + mask.left)
    if mask.right is not None:
        limit = p - mask.right
        if mask.prefix is not None:
            limit = tl.where(p < tl.load(mask.prefix + b * mask.prefix_stride), MIN_POSITION, limit)
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
    return tl.multiple_of(b * strides.batch + h * strides.head, ALIGN)


@triton.jit
def load_tile(ptr, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (rows, BLOCK); row_ok is None if every row exists. Offsets have 64 bits because they may exceed 2³¹."""
    columns = tl.arange(0, BLOCK)
    pointers = ptr + tl.multiple_of(rows.to(tl.int64) * strides.row, ALIGN)[:, None] + columns[None, :]
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
    pointers = ptr + rows.to(tl.int64)[:, None] * strides.row + columns[None, :]
    ok = row_ok[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        value += tl.load(pointers, mask=ok, other=0.0)
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def load_chunks(ptr, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Load (rows, WIDTH) as a tuple of chunks with BLOCK and, unless TAIL is 0, TAIL columns."""
    if TAIL == 0:
        return (load_tile(ptr, rows, strides, row_ok, WIDTH, BLOCK),)
    else:
        first = load_tile(ptr, rows, strides, row_ok, BLOCK, BLOCK)
        return first, load_tile(ptr + BLOCK, rows, strides, row_ok, WIDTH - BLOCK, TAIL)


@triton.jit
def store_chunks(ptr, values, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Store chunks, or add them to memory without atomics."""
    store_tile(ptr, values[0], rows, strides, row_ok, WIDTH, BLOCK, ADD)
    if len(values) == 2:
        store_tile(ptr + BLOCK, values[1], rows, strides, row_ok, WIDTH - BLOCK, values[1].shape[1], ADD)


@triton.jit
def zero_chunks(ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """Return accumulators of BLOCK and TAIL columns."""
    first = tl.zeros([ROWS, BLOCK], tl.float32)
    if TAIL == 0:
        return (first,)
    else:
        return first, tl.zeros([ROWS, TAIL], tl.float32)


@triton.jit
def scale_chunks(chunks, factor):
    """Multiply chunks by a factor, which may be one per row."""
    if len(chunks) == 1:
        return (chunks[0] * factor,)
    else:
        return chunks[0] * factor, chunks[1] * factor


@triton.jit
def dot_transposed(left, right, PRECISION: tl.constexpr):
    """Return left · rightᵀ, the sum over all chunks of columns."""
    product = tl.dot(left[0], tl.trans(right[0]), input_precision=PRECISION)
    if len(left) == 2:
        product = tl.dot(left[1], tl.trans(right[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def accumulate_chunks(weights, right, acc, PRECISION: tl.constexpr):
    """Return acc + weights · right for each chunk of columns."""
    weights = weights.to(right[0].dtype)
    first = tl.dot(weights, right[0], acc[0], input_precision=PRECISION)
    if len(acc) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, right[1], acc[1], input_precision=PRECISION)


@triton.jit
def load_row_stats(ptr, rows, b, h, strides, num_rows):
    """Load rows of lse or delta (B, H, S), each head of which begins at a multiple of 16 bytes (tensors.aligned_stats).

    num_rows is None if every row exists. Whole vectors are loaded: up to three rows after the last one have any value. A mask
    that may differ within a vector would load values one by one, and the kernel would spill registers.
    """
    pointers = tl.multiple_of(ptr + b * strides.batch + h * strides.head, 16) + rows.to(tl.int64) * strides.row
    if num_rows is not None:
        return tl.load(pointers, mask=tl.max_constancy(rows < num_rows, 4), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dropout_keep(drop, b, h, p_q, p_k, QUADS: tl.constexpr):
    """Mask of the weights that dropout keeps. With one seed per sequence the batch index is 0 (see dropout.py)."""
    seed = tl.load(drop.seed + b * drop.seed_stride)
    batch = tl.where(drop.seed_stride == 0, b, 0).to(tl.int32)
    return keep_tile(seed, drop.limit, batch, (h + drop.head_start).to(tl.int32), p_q[:, None], p_k[None, :], QUADS)


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
