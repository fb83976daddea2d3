"""The online softmax of Hopper's forward: one tile of scores at a time, in registers.

    weight = 2^(score - reference)

    first tile     reference = maximum of the row
    later tiles    compute weights with the current reference, without looking for a maximum;
                   if a thread's sum exceeds SUM_LIMIT, which is rare: raise the reference to the maximum, compute the
                   tile's weights again, and rescale the row's earlier sums

Any reference near a row's maximum works, because weights above 1 are as exact as those below. The sum is needed anyway. A
row's reference depends on its own scores only. Triton has no branch per warp, so this is inline PTX. Four threads share a
row, and each keeps a partial sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringspan.kernels.backends.triton.common import exponents

# Reference of a row without keys and carry so far. Finite, so that weights of hidden keys are 0 and not NaN.
NO_REFERENCE = gl.constexpr(-3e38)
SUM_LIMIT = gl.constexpr(4096.0)  # of a thread's sum over one tile; fp16 holds such weights (its maximum is 65504)
# (row, part): the four threads that share a row hold one part each
LANE_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.jit
def apply_mask(s, tile, is_partial, lo, hi, mask, columns, scale, softcap, BLOCK_N: gl.constexpr):
    """Turn q kᵀ into (scores, factor); hidden scores become -inf in a partial tile."""
    s, factor = exponents(s, scale, softcap, False)
    if is_partial:
        column = columns.load(gl.SliceLayout(0, s.type.layout))[None, :]
        visible = column <= (hi - tile * BLOCK_N)[:, None]  # hi is at most the last key
        if mask.left is not None or mask.starts is not None:
            visible &= column >= (lo - tile * BLOCK_N)[:, None]
        s = gl.where(visible, s, float("-inf"))
    return s, factor


@gluon.jit
def compute_weights(s, factor, reference, DTYPE: gl.constexpr, FIRST: gl.constexpr):
    """Turn scores into (weights, reference, partial sums, rescale, needs_rescale).

    weights: (64, 4, pairs), two 16-bit numbers in an int32. rescale: factor for the row's earlier sums and acc;
    needs_rescale: nonzero if the factor of any row of the warp may differ from 1. These and the others are (64, 4) in
    LANE_LAYOUT. FIRST: the row's first tile.
    """
    PAIRS: gl.constexpr = s.shape[1] // 8
    factors = gl.full([64, 4], 0.0, gl.float32, LANE_LAYOUT) + factor
    even, odd = s.reshape([64, PAIRS, 4, 2]).permute((0, 2, 1, 3)).split()
    outputs = gl.inline_asm_elementwise(
        _weights_ptx(PAIRS, gl.bfloat16 == DTYPE, FIRST), _weights_constraints(PAIRS),
        (reference, factors) + split_pairs(even) + split_pairs(odd),  # noqa: RUF005, Triton has no unpacking
        dtype=_weights_types(PAIRS), is_pure=False, pack=2,
    )  # fmt: skip
    return join_pairs(outputs, 0, PAIRS), outputs[PAIRS], outputs[PAIRS + 1], outputs[PAIRS + 2], outputs[PAIRS + 3]


@gluon.jit
def as_operand(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Unpack weights into a matmul operand. Loop variables of 16 bits would each occupy a full register."""
    left, right = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", (pairs,), dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.join(left, right).permute((0, 2, 1, 3)).reshape([64, 8 * pairs.shape[2]])
    return gl.convert_layout(weights, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def scale_rows(acc, rescale, needs_rescale):
    """Multiply each of the 64 rows of acc by its factor; a warp without needs_rescale skips the multiplications."""
    PACK: gl.constexpr = min(64, acc.shape[1] // 2)  # elements of a thread
    return gl.inline_asm_elementwise(
        _scale_ptx(PACK), _scale_constraints(PACK), (acc, broadcast_rows(rescale, acc), broadcast_rows(needs_rescale, acc)),
        dtype=gl.float32, is_pure=False, pack=PACK,
    )  # fmt: skip


@gluon.jit
def split_pairs(x):
    """Split (64, 4, n) into n tensors (64, 4)."""
    if x.shape[2] == 1:
        return (gl.convert_layout(x.reshape([64, 4]), LANE_LAYOUT, assert_trivial=True),)
    else:
        left, right = x.reshape([64, 4, x.shape[2] // 2, 2]).split()
        return split_pairs(left) + split_pairs(right)


@gluon.jit
def join_pairs(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Join COUNT tensors (64, 4) from index FIRST on into (64, 4, COUNT)."""
    if COUNT == 1:
        return parts[FIRST].reshape([64, 4, 1])
    else:
        left, right = join_pairs(parts, FIRST, COUNT // 2), join_pairs(parts, FIRST + COUNT // 2, COUNT // 2)
        return gl.join(left, right).reshape([64, 4, COUNT])


@gluon.jit
def broadcast_rows(x, like):
    """Expand (64, 4) to the shape and layout of an accumulator: each element gets its thread's value."""
    x = x.reshape([64, 1, 4, 1])
    LAYOUT: gl.constexpr = x.type.layout
    x, _ = gl.broadcast(x, gl.zeros([64, like.shape[1] // 8, 4, 2], gl.int32, LAYOUT))
    return gl.convert_layout(x.reshape([64, like.shape[1]]), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _weights_ptx(n, bf16, first):
    """PTX of compute_weights for a thread's two rows, with n pairs of columns each."""
    weights, state, even, odd = _operands(n)
    reference, part, rescale, needs_rescale, _input, factor = state
    no_reference, limit = f"{NO_REFERENCE.value:e}", f"{SUM_LIMIT.value:e}"
    init, update, weigh, check = [], [], [], []
    for row in (0, 1):
        init.append(
            f"mov.f32 ${part[row]}, 0.0; mov.f32 ${rescale[row]}, 1.0; mov.b32 ${needs_rescale[row]}, 0;"
            f"neg.f32 minus{row}, ${reference[row]}; setp.eq.f32 row{row}, ${reference[row]}, {no_reference};"
            f"xor.pred updated{row}, row{row}, row{row};"
        )
        update.append(f"mov.f32 top, ${even[0][row]};")
        update += [f"max.f32 top, top, ${scores[row]};" for scores in (*even[1:], *odd)]
        for lane in (1, 2):
            update.append(f"shfl.sync.bfly.b32 other, top, {lane}, 31, 0xffffffff; max.f32 top, top, other;")
        update.append(f"mul.f32 top, top, ${factor[row]}; max.f32 top, top, ${reference[row]};")
        if not first:  # if one of a row's four threads exceeds the limit, all four update; other rows keep their reference
            update.append(f"mov.f32 largest, ${part[row]};")
            for lane in (1, 2):
                update.append(f"shfl.sync.bfly.b32 other, largest, {lane}, 31, 0xffffffff; max.f32 largest, largest, other;")
            update.append(
                f"setp.gt.f32 row{row}, largest, {limit}; setp.eq.or.f32 row{row}, ${reference[row]}, {no_reference}, row{row};"
                f"or.pred updated{row}, updated{row}, row{row}; selp.f32 top, top, ${reference[row]}, row{row};"
            )
        update.append(
            f"sub.f32 other, ${reference[row]}, top; ex2.approx.ftz.f32 other, other;"
            f"mul.f32 ${rescale[row]}, ${rescale[row]}, other; mov.b32 ${needs_rescale[row]}, 1;"
            f"mov.f32 ${reference[row]}, top; neg.f32 minus{row}, top;"
        )
        weigh.append(f"mov.f32 evens{row}, 0.0; mov.f32 odds{row}, 0.0;")
        # Update once per tile: above 2²⁷ the maximum is rounded so coarsely that weights may stay above the limit.
        check.append(
            f"add.f32 ${part[row]}, evens{row}, odds{row}; setp.gt.and.f32 row{row}, ${part[row]}, {limit}, !updated{row};"
        )
    for pair in range(n):
        for row in (0, 1):
            for x, scores in (("even", even), ("odd", odd)):
                weigh.append(
                    f"fma.rn.f32 {x}, ${scores[pair][row]}, ${factor[row]}, minus{row}; ex2.approx.ftz.f32 {x}, {x};"
                    f"add.f32 {x}s{row}, {x}s{row}, {x};"
                )
            weigh.append(f"cvt.rn.{'bf16x2' if bf16 else 'f16x2'}.f32 ${weights[pair][row]}, odd, even;")
    vote = "or.pred any, row0, row1; vote.sync.any.pred any, any, 0xffffffff;"
    if first:
        code = [*init, *update, *weigh, *check]
    else:  # a jump into the loop: otherwise the assembler duplicates the computation of the weights
        code = [*init, vote, "retry: @!any bra weigh;", *update, "weigh:", *weigh, *check, vote, "@any bra retry;"]
    registers = "even, odd, evens0, evens1, odds0, odds1, minus0, minus1, top, largest, other"
    return f"{{ .reg .pred row0, row1, updated0, updated1, any; .reg .f32 {registers}; {' '.join(code)} }}"


@gluon.constexpr_function
def _weights_constraints(n):
    """Constraints of outputs, reference (same registers as its output) and inputs. & : written before all inputs are read."""
    outputs = ["=&r"] * (2 * n) + ["=f"] * 2 + ["=&f"] * 4 + ["=&r"] * 2
    return ",".join([*outputs, str(2 * n), str(2 * n + 1), *["f"] * (2 + 4 * n)])


@gluon.constexpr_function
def _weights_types(n):
    return (gl.int32,) * n + (gl.float32,) * 3 + (gl.int32,)


@gluon.constexpr_function
def _operands(n):
    """Operand numbers of both rows: weights; (reference, part, rescale, needs_rescale, input, factor); even and odd scores."""
    rows = [(i, i + 1) for i in range(0, 2 * (3 * n + 6), 2)]
    return rows[:n], rows[n : n + 6], rows[n + 6 : 2 * n + 6], rows[2 * n + 6 :]


@gluon.constexpr_function
def _scale_ptx(n):
    """PTX: multiply n numbers by n factors unless the first flag is 0. The braces give the label a scope."""
    lines = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred none; setp.eq.s32 none, ${3 * n}, 0; @none bra done; {lines} done: }}"


@gluon.constexpr_function
def _scale_constraints(n):
    """Constraints of outputs, inputs (same registers), factors and flags."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)
