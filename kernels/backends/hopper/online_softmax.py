"""The softmax of Hopper's forward, a tile of scores at a time, in registers.

A weight is exp2(score - reference), and any reference near a row's maximum will do: weights above 1 are as exact as those
below. So a row's maximum is looked for in its first tile only. Later weights are taken boldly, above the reference so far,
and their sum, which is needed anyway, says whether it has become too low. Then, which is seldom, a warp looks for the maximum,
takes that tile's weights again, and what was added up before shrinks. Whatever the scores, a row's reference depends on its
own alone.

Triton has no branch for one warp, so this is PTX. Each thread adds up its own part of a row's sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringspan.kernels.backends.triton.common import exponents

NOTHING = gl.constexpr(-3e38)  # the reference of a row without key or carry yet. Finite: what is hidden is then 0, and not NaN
LIMIT = gl.constexpr(4096.0)  # of a thread's part of a tile's sum; fp16, which ends at 65504, can hold such weights too
# of (row, part): the four threads that share a row have a part each
LANES = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.jit
def hide(s, tile, split, lo, hi, mask, columns, scale, softcap, BLOCK_N: gl.constexpr):
    """Scores → (scores, those that the mask hides -inf; their factor). split: the mask goes through the tile."""
    s, factor = exponents(s, scale, softcap, False)
    if split:
        column = columns.load(gl.SliceLayout(0, s.type.layout))[None, :]
        visible = column <= (hi - tile * BLOCK_N)[:, None]  # hi ends with the keys
        if mask[0] is not None or mask[2] is not None:
            visible &= column >= (lo - tile * BLOCK_N)[:, None]
        s = gl.where(visible, s, float("-inf"))
    return s, factor


@gluon.jit
def take_weights(s, factor, reference, DTYPE: gl.constexpr, FIRST: gl.constexpr):
    """Scores → (weights in pairs, reference, each thread's part of their sum, what was added up before shrinks by, whether any
    of a warp's does). All but the weights (64, 4), as LANES has them."""
    PAIRS: gl.constexpr = s.shape[1] // 8
    factors = gl.full([64, 4], 0.0, gl.float32, LANES) + factor
    even, odd = s.reshape([64, PAIRS, 4, 2]).permute((0, 2, 1, 3)).split()
    found = gl.inline_asm_elementwise(
        _take_weights(PAIRS, gl.bfloat16 == DTYPE, FIRST), _take_weights_operands(PAIRS),
        (reference, factors) + apart(even) + apart(odd),  # noqa: RUF005, Triton has no stars
        dtype=_take_weights_types(PAIRS), is_pure=False, pack=2,
    )  # fmt: skip
    return together(found, 0, PAIRS), found[PAIRS], found[PAIRS + 1], found[PAIRS + 2], found[PAIRS + 3]


@gluon.jit
def as_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights for a product. As 16-bit numbers in a loop's variables each would take a register of its own."""
    left, right = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", (pairs,), dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.join(left, right).permute((0, 2, 1, 3)).reshape([64, 8 * pairs.shape[2]])
    return gl.convert_layout(weights, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def scale_rows(acc, shrink, late):
    """acc, a warpgroup's 64 rows, times a factor for each; a warp of which none is late multiplies nothing."""
    AT_ONCE: gl.constexpr = min(64, acc.shape[1] // 2)  # of a thread's numbers
    return gl.inline_asm_elementwise(
        _scale_if(AT_ONCE), _scale_if_operands(AT_ONCE), (acc, spread(shrink, acc), spread(late, acc)),
        dtype=gl.float32, is_pure=False, pack=AT_ONCE,
    )  # fmt: skip


@gluon.jit
def apart(x):
    """(64, 4, n) → n times (64, 4)."""
    if x.shape[2] == 1:
        return (gl.convert_layout(x.reshape([64, 4]), LANES, assert_trivial=True),)
    else:
        left, right = x.reshape([64, 4, x.shape[2] // 2, 2]).split()
        return apart(left) + apart(right)


@gluon.jit
def together(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """And back."""
    if COUNT == 1:
        return parts[FIRST].reshape([64, 4, 1])
    else:
        left, right = together(parts, FIRST, COUNT // 2), together(parts, FIRST + COUNT // 2, COUNT // 2)
        return gl.join(left, right).reshape([64, 4, COUNT])


@gluon.jit
def spread(x, like):
    """(64, 4) → for each number of a product's 64 rows what its thread has."""
    x = x.reshape([64, 1, 4, 1])
    LAYOUT: gl.constexpr = x.type.layout
    x, _ = gl.broadcast(x, gl.zeros([64, like.shape[1] // 8, 4, 2], gl.int32, LAYOUT))
    return gl.convert_layout(x.reshape([64, like.shape[1]]), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _take_weights(n, bf16, first):
    """PTX for a thread's two rows, with n pairs of columns each."""
    weights, others, even, odd = _numbered(n)
    reference, part, shrink, late, _again, factor = others
    nothing, limit = f"{NOTHING.value:e}", f"{LIMIT.value:e}"
    begin, follow, take, check = [], [], [], []
    for row in (0, 1):
        begin.append(
            f"mov.f32 ${part[row]}, 0.0; mov.f32 ${shrink[row]}, 1.0; mov.b32 ${late[row]}, 0;"
            f"neg.f32 minus{row}, ${reference[row]}; setp.eq.f32 row{row}, ${reference[row]}, {nothing};"
            f"xor.pred followed{row}, row{row}, row{row};"
        )
        follow.append(f"mov.f32 top, ${even[0][row]};")
        follow += [f"max.f32 top, top, ${scores[row]};" for scores in (*even[1:], *odd)]
        for lane in (1, 2):
            follow.append(f"shfl.sync.bfly.b32 other, top, {lane}, 31, 0xffffffff; max.f32 top, top, other;")
        follow.append(f"mul.f32 top, top, ${factor[row]}; max.f32 top, top, ${reference[row]};")
        if not first:  # other rows of the warp stay as they are; a row's four threads follow if one has to
            follow.append(f"mov.f32 most, ${part[row]};")
            for lane in (1, 2):
                follow.append(f"shfl.sync.bfly.b32 other, most, {lane}, 31, 0xffffffff; max.f32 most, most, other;")
            follow.append(
                f"setp.gt.f32 row{row}, most, {limit}; setp.eq.or.f32 row{row}, ${reference[row]}, {nothing}, row{row};"
                f"or.pred followed{row}, followed{row}, row{row}; selp.f32 top, top, ${reference[row]}, row{row};"
            )
        follow.append(
            f"sub.f32 other, ${reference[row]}, top; ex2.approx.ftz.f32 other, other;"
            f"mul.f32 ${shrink[row]}, ${shrink[row]}, other; mov.b32 ${late[row]}, 1;"
            f"mov.f32 ${reference[row]}, top; neg.f32 minus{row}, top;"
        )
        take.append(f"mov.f32 evens{row}, 0.0; mov.f32 odds{row}, 0.0;")
        # Once: of scores above 2**27 the maximum itself is rounded so far that weights stay above the limit.
        check.append(
            f"add.f32 ${part[row]}, evens{row}, odds{row}; setp.gt.and.f32 row{row}, ${part[row]}, {limit}, !followed{row};"
        )
    for pair in range(n):
        for row in (0, 1):
            for x, scores in (("even", even), ("odd", odd)):
                take.append(
                    f"fma.rn.f32 {x}, ${scores[pair][row]}, ${factor[row]}, minus{row}; ex2.approx.ftz.f32 {x}, {x};"
                    f"add.f32 {x}s{row}, {x}s{row}, {x};"
                )
            take.append(f"cvt.rn.{'bf16x2' if bf16 else 'f16x2'}.f32 ${weights[pair][row]}, odd, even;")
    vote = "or.pred any, row0, row1; vote.sync.any.pred any, any, 0xffffffff;"
    if first:
        code = [*begin, *follow, *take, *check]
    else:  # a jump into the middle of a loop, else the assembler would write two copies of what takes weights
        code = [*begin, vote, "again: @!any bra boldly;", *follow, "boldly:", *take, *check, vote, "@any bra again;"]
    registers = "even, odd, evens0, evens1, odds0, odds1, minus0, minus1, top, most, other"
    return f"{{ .reg .pred row0, row1, followed0, followed1, any; .reg .f32 {registers}; {' '.join(code)} }}"


@gluon.constexpr_function
def _take_weights_operands(n):
    """Outputs, the reference in the same registers as before, and inputs. Outputs are written before all inputs are read."""
    outputs = ["=&r"] * (2 * n) + ["=f"] * 2 + ["=&f"] * 4 + ["=&r"] * 2
    return ",".join([*outputs, str(2 * n), str(2 * n + 1), *["f"] * (2 + 4 * n)])


@gluon.constexpr_function
def _take_weights_types(n):
    return (gl.int32,) * n + (gl.float32,) * 3 + (gl.int32,)


@gluon.constexpr_function
def _numbered(n):
    """Operands of both rows: weights; reference, part, shrink, late, reference again and factor; even and odd scores."""
    rows = [(i, i + 1) for i in range(0, 2 * (3 * n + 6), 2)]
    return rows[:n], rows[n : n + 6], rows[n + 6 : 2 * n + 6], rows[2 * n + 6 :]


@gluon.constexpr_function
def _scale_if(n):
    """PTX: n numbers times n factors, unless the first flag is 0. Labels in braces are their own."""
    lines = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred none; setp.eq.s32 none, ${3 * n}, 0; @none bra done; {lines} done: }}"


@gluon.constexpr_function
def _scale_if_operands(n):
    """Outputs, the same registers as inputs, factors, flags."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)
