"""The softmax of Hopper's forward, a tile of scores at a time, in registers.

A row's maximum is looked for in every tile, but followed only when it has grown a lot; each thread adds up its own part of a
row's sum; and a warp whose rows did not grow multiplies nothing of what was added up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .triton_common import exponents

GROWTH = gl.constexpr(8.0)  # how far, as a power of two: weights are up to 256, which fp16 can hold too
# of (row, part): the four threads that share a row have a part each
LANES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.jit
def follow(
    s, m, tile, split, lo, hi, mask, columns, scale, softcap, BLOCK_N: gl.constexpr, IN_PAIRS: gl.constexpr,
):  # fmt: skip
    """Scores → (scores, their factor, m, what is taken from them, whose m has grown). split: the mask goes through the tile.

    m follows the maximum only when that is far above it, which it seldom is after the first tiles. Till then weights above 1
    are as exact as those below, and what was added up needs no scaling.
    """
    s, factor = exponents(s, scale, softcap, False)
    if split:
        column = columns.load(gl.SliceLayout(0, s.type.layout))[None, :]
        visible = column <= (hi - tile * BLOCK_N)[:, None]  # hi ends with the keys
        if mask[0] is not None or mask[2] is not None:
            visible &= column >= (lo - tile * BLOCK_N)[:, None]
        s = gl.where(visible, s, float("-inf"))
    some = s
    if IN_PAIRS:  # else one after another, each waiting for the one before, which fills the time of other consumers
        left, right = s.reshape([64, 2, BLOCK_N // 2]).permute((0, 2, 1)).split()
        some = gl.maximum(left, right)
    m_new = gl.maximum(m, gl.convert_layout(gl.max(some, 1), m.type.layout, assert_trivial=True) * factor)
    grown = m_new > m + GROWTH
    m_new = gl.where(grown, m_new, m)
    return s, factor, m_new, gl.where(m_new == float("-inf"), 0.0, m_new), grown


@gluon.jit
def weigh(s, factor, shift, total, before_m, grown):
    """Scores → (weights, total, what was added up before shrinks by). Of a row's sum each thread keeps its own part to the end:
    nothing waits for it."""
    p = gl.exp2(s * factor - shift[:, None])
    shrink = shrunk(before_m, shift, grown)
    parts = gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)
    total *= gl.convert_layout(shrink, gl.SliceLayout(1, LANES), assert_trivial=True)[:, None]
    total += gl.convert_layout(parts, LANES, assert_trivial=True)
    return p, total, shrink


@gluon.jit
def shrunk(before_m, shift, grown):
    return gl.where(grown, gl.exp2(before_m - shift), 1.0)


@gluon.constexpr_function
def _scale_if(n):
    """PTX: n numbers times n factors, unless the first flag is 0. Labels in braces are their own."""
    lines = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred none; setp.eq.s32 none, ${3 * n}, 0; @none bra done; {lines} done: }}"


@gluon.constexpr_function
def _scale_if_operands(n):
    """Outputs, the same registers as inputs, factors, flags."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def scale_rows(acc, factor, AT_ONCE: gl.constexpr = 32):
    """acc, a warpgroup's 64 rows, times a factor for each; a warp whose factors are all 1 multiplies nothing.

    A thread has two rows, so a pack of two is all that it has to vote for. Every warp votes and branches for itself, and no
    compiler may move that: it is not pure.
    """
    gl.static_assert(
        acc.shape[0] == 64 and acc.shape[1] * 64 // 128 % AT_ONCE == 0, "two rows a thread, and whole packs of them"
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    some = gl.inline_asm_elementwise(
        "{ .reg .pred a, b; setp.neu.f32 a, $2, 0f3F800000; setp.neu.f32 b, $3, 0f3F800000; or.pred a, a, b; "
        "vote.sync.any.pred a, a, 0xffffffff; selp.s32 $0, 1, 0, a; selp.s32 $1, 1, 0, a; }",
        "=r,=r,f,f", [factor], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    given = [acc, gl.convert_layout(factor, ROWS)[:, None], gl.convert_layout(some, ROWS)[:, None]]
    return gl.inline_asm_elementwise(
        _scale_if(AT_ONCE), _scale_if_operands(AT_ONCE), given, dtype=gl.float32, is_pure=False, pack=AT_ONCE
    )
