"""What the portable kernels share: where rows stand, who sees whom, how tiles are read, and what all of them are told.

Kernels take their long lists as tuples; an element that is None costs nothing, it is not there when the kernel compiles.

    at    = (start0, step0, count0, start1, step1, count1, start1 - count0 * step1)
            one or two ascending segments, so rows ascend in position
    mask  = (left, right, starts, ends, length, prefix, stride of documents, stride of prefix from one sequence to the next)
    drop  = (seed, stride of seed, 1 - rate, limit, head_start)
    *_strides = of batch, row and head; columns are consecutive
"""

import triton
import triton.language as tl

from ringspan.kernels.dropout import keep_tile

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
EVERYWHERE: tl.constexpr = tl.constexpr(2**30)  # above every position, and positions can still be added to it
NOWHERE: tl.constexpr = tl.constexpr(-(2**30))
ALIGN: tl.constexpr = tl.constexpr(8)  # elements: what `aligned` makes sure of
# Sizes that a kernel only counts with: Triton would compile it again for each mix of ones, multiples of 16 and others.
ANY_SIZE = dict(do_not_specialize=("rows", "num_tiles", "num_sequences", "num_heads", "group", "together"))


@triton.jit
def position(row, at):
    """Global position of a local row; rows behind the end go on ascending."""
    p = at[0] + row * at[1]
    if at[3] is not None:
        p = tl.where(row < at[2], p, at[6] + row * at[4])
    return p


@triton.jit
def rows_below(p, at):
    """How many local rows stand before position p: turns an interval of positions into one of rows."""
    n = tl.minimum((tl.maximum(p - at[0], 0) + at[1] - 1) // at[1], at[2])
    if at[3] is not None:
        n += tl.minimum((tl.maximum(p - at[3], 0) + at[4] - 1) // at[4], at[5])
    return n


@triton.jit
def row_count(at):
    if at[3] is not None:
        return at[2] + at[5]
    else:
        return at[2]


@triton.jit
def rows_of(row, at, mask, b):
    """Which rows exist and are not padding. Padding may hold anything, and 0 · NaN is NaN, so it is never loaded."""
    ok = row < row_count(at)
    if mask[2] is not None:
        first, last = document(position(row, at), mask, b)
        ok &= first <= last
    return ok


@triton.jit
def document(p, mask, b):
    """First and last position of the document at p; behind the end, an empty interval that keeps ascending."""
    length = mask[4]
    inside = (p >= 0) & (p < length)
    row = b.to(tl.int64) * mask[6]
    first = tl.load(mask[2] + row + p, mask=inside, other=0)
    last = tl.load(mask[3] + row + p, mask=inside, other=-1)
    return tl.where(p >= length, length, first), tl.where(p >= length, length - 1, last)


@triton.jit
def keys_of(p, mask, b):
    """lo and hi: the keys that the query at p sees."""
    lo = p * 0
    hi = p * 0 + EVERYWHERE
    if mask[2] is not None:
        lo, hi = document(p, mask, b)
    if mask[0] is not None:
        lo = tl.maximum(lo, p - mask[0])
    if mask[1] is not None:
        reach = p + mask[1]
        if mask[5] is not None:
            reach = tl.maximum(reach, tl.load(mask[5] + b * mask[7]) - 1)
        hi = tl.minimum(hi, reach)
    return lo, hi


@triton.jit
def queries_of(p, mask, b):
    """The other way: first and last position of the queries that see the key at p."""
    lo = p * 0 + NOWHERE
    hi = p * 0 + EVERYWHERE
    if mask[2] is not None:
        lo, hi = document(p, mask, b)
    if mask[0] is not None:
        hi = tl.minimum(hi, p + mask[0])
    if mask[1] is not None:
        reach = p - mask[1]
        if mask[5] is not None:
            reach = tl.where(p < tl.load(mask[5] + b * mask[7]), NOWHERE, reach)
        lo = tl.maximum(lo, reach)
    return lo, hi


@triton.jit
def tile_range(first_lo, last_lo, first_hi, last_hi, at, first_row, BLOCK: tl.constexpr, HEAD: tl.constexpr):
    """Tiles [begin, full) and [rest, end) need the compare, tiles [full, rest) are seen whole.

    first_lo … last_hi bound the intervals of a tile's first and last row. Without HEAD nothing is masked at the low end.
    Tiles are counted from first_row, before which nothing is seen.
    """
    begin = (rows_below(first_lo, at) - first_row) // BLOCK
    end = tl.maximum(tl.cdiv(rows_below(last_hi + 1, at) - first_row, BLOCK), begin)
    full = begin
    if HEAD:
        full = tl.minimum(tl.cdiv(rows_below(last_lo, at) - first_row, BLOCK), end)
    rest = tl.maximum(tl.minimum((rows_below(first_hi + 1, at) - first_row) // BLOCK, end), full)
    return begin, full, rest, end


@triton.jit
def split_tile(i, begin, full, rest):
    """The i-th of the tiles that need the compare: those before `full`, then those from `rest` on."""
    return tl.where(begin + i < full, begin + i, rest + i - (full - begin))


@triton.jit
def head_offset(b, h, strides):
    """Where a head begins. The hint is what lets loads be 16 bytes wide: of strides Triton sees only multiples of 16."""
    return tl.multiple_of(b * strides[0] + h * strides[2], ALIGN)


@triton.jit
def load_tile(ptr, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, BLOCK) from memory; row_ok None if every row exists. Offsets are 64 bits wide: strides may pass 2**31."""
    columns = tl.arange(0, BLOCK)
    at = ptr + tl.multiple_of(rows.to(tl.int64) * strides[1], ALIGN)[:, None] + columns[None, :]
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
def store_tile(ptr, value, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at = ptr + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :]
    ok = row_ok[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        value += tl.load(at, mask=ok, other=0.0)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def load_rows(ptr, rows, b, h, strides, row_ok):
    """lse and delta: (B, H, S), strides in that order."""
    at = ptr + b * strides[0] + h * strides[1] + rows.to(tl.int64) * strides[2]
    if row_ok is not None:
        return tl.load(at, mask=row_ok, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def kept(drop, b, h, p_q, p_k, QUADS: tl.constexpr):
    """Which weights of a tile dropout keeps; (B,) seeds replace the batch index (see philox)."""
    seed = tl.load(drop[0] + b * drop[1])
    batch = tl.where(drop[1] == 0, b, 0).to(tl.int32)
    return keep_tile(seed, drop[3], batch, (h + drop[4]).to(tl.int32), p_q[:, None], p_k[None, :], QUADS)


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
    """Raw products → (scores, factor) such that weights are exp2(scores * factor - …). With softcap the scores are the tanh.

    A positive scale is left to the exponential's own multiply-add; PRESCALED is for the others.
    """
    if softcap is not None:
        return tanh(s * (scale / softcap)), softcap * LOG2E
    elif PRESCALED:
        return s * (scale * LOG2E), 1.0
    else:
        return s, scale * LOG2E
