"""FlashAttention-2's forward in portable Triton: one tile of queries stays on the chip and streams the keys it can see.

Promises: any segments, interval masks, GQA, carry, softcap, dropout by coordinates; fp32, bf16, fp16; head dims 16 to 256.
The online softmax starts from the carry (out, lse) if there is one, and divides once at the end. Tiles that the mask splits
come first, in a loop of their own; the tiles seen whole follow without any compare. The latest query tiles, which see most
under a causal mask, start first so that the grid's tail is short.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mask import Mask
from .philox import keep_tile
from .reference import Carry, new_outputs
from .segments import Segment, ascending_runs, num_rows
from .triton_common import (
    LN2,
    LOG2E,
    Launch,
    aligned,
    exponents,
    head_offset,
    keys_of,
    load_tile,
    mask_arguments,
    option_arguments,
    position,
    quads,
    row_count,
    rows_of,
    segment_arguments,
    store_tile,
    strides,
    tile_range,
)
from .triton_tiles import tiles_for


@triton.jit
def attention_forward(
    q, k, v, out, lse, carry_out, carry_lse, seed,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, out_b, out_s, out_h, lse_b, lse_h, lse_s,
    carry_out_b, carry_out_s, carry_out_h, carry_lse_b, carry_lse_h, carry_lse_s,
    left, right, starts, ends, length, doc_stride, prefix, prefix_stride,
    q_at, k_at, rows, num_sequences, num_heads, group, head_start, scale, softcap, keep_rate, keep_limit, seed_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TWO_Q: tl.constexpr, TWO_K: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # heads fastest, so that the heads of a group read the same keys together; the last tile of queries first
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    n = row_count(q_at, TWO_Q)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < n
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if starts is not None:
        starts += b * doc_stride
        ends += b * doc_stride
    if prefix is not None:
        prefix += b * prefix_stride
    if keep_limit is not None:
        seed = tl.load(seed + b * seed_stride)
    drop_batch = tl.where(seed_stride == 0, b, 0).to(tl.int32) if seed_stride is not None else 0
    drop_head = (h + head_start).to(tl.int32)

    p_q = position(row, q_at, TWO_Q)
    lo, hi = keys_of(p_q, left, right, starts, ends, length, prefix)
    first = position(tl.minimum(tile * BLOCK_M, n - 1), q_at, TWO_Q)
    last = position(tl.minimum(tile * BLOCK_M + BLOCK_M, n) - 1, q_at, TWO_Q)
    first_lo, first_hi = keys_of(first, left, right, starts, ends, length, prefix)
    last_lo, last_hi = keys_of(last, left, right, starts, ends, length, prefix)
    HEAD: tl.constexpr = left is not None or starts is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, TWO_K, BLOCK_N, HEAD)
    num_split = tl.where(tile * BLOCK_M < n, full - begin + end - rest, 0)
    rest = tl.where(tile * BLOCK_M < n, rest, full)

    lse += b * lse_b + h * lse_h
    before = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if carry_lse is not None:
        carry_lse += b * carry_lse_b + h * carry_lse_h
        before = tl.load(carry_lse + row.to(tl.int64) * carry_lse_s, mask=row_ok, other=float("-inf"))
    if carry_out is not None:
        carry_out += head_offset(b, carry_out_b, h, carry_out_h)
        acc = load_tile(carry_out, row, carry_out_s, v_columns, row_ok, DV, BLOCK_DV)
    m = before * LOG2E
    total = tl.where(before == float("-inf"), 0.0, 1.0)

    q_tile = load_tile(q + head_offset(b, q_b, h, q_h), row, q_s, columns, row_ok, D, BLOCK_D)
    k += head_offset(b, k_b, h // group, k_h)
    v += head_offset(b, v_b, h // group, v_h)

    for i in range(0, num_split):
        at = tl.where(begin + i < full, begin + i, rest + i - (full - begin)) * BLOCK_N
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, at, p_q, lo, hi, k_s, v_s, columns, v_columns, starts, ends, length, k_at,
            scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, TWO_K, PRESCALED, QUADS, PRECISION, True, HEAD,
        )  # fmt: skip
    for i in range(full, rest):
        acc, m, total = attend(
            acc, m, total, q_tile, k, v, i * BLOCK_N, p_q, lo, hi, k_s, v_s, columns, v_columns, starts, ends, length, k_at,
            scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, TWO_K, PRESCALED, QUADS, PRECISION, False, HEAD,
        )  # fmt: skip

    empty = (total == 0) | (row >= n)
    divisor = tl.where(empty, 1.0, total)
    acc = tl.where(empty[:, None], 0.0, acc / divisor[:, None])
    # a row that this block gave nothing keeps its lse to the last bit, which base 2 and back would not
    stats = tl.where((m == before * LOG2E) & (total == 1), before, m * LN2 + tl.log(divisor))
    stats = tl.where(empty, float("-inf"), stats)
    tl.store(lse + row.to(tl.int64) * lse_s, stats, mask=row < rows)
    store_tile(out + head_offset(b, out_b, h, out_h), acc, row, out_s, v_columns, row < rows, DV, False)


@triton.jit
def attend(
    acc, m, total, q_tile, k, v, at, p_q, lo, hi, k_s, v_s, columns, v_columns, starts, ends, length, k_at,
    scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, TWO_K: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys of the tile that begins at row `at`. SPLIT: the mask goes through it."""
    key = at + tl.arange(0, BLOCK_N)
    key_ok = None
    if SPLIT:
        key_ok = rows_of(key, k_at, starts, ends, length, TWO_K)
    k_tile = load_tile(k, key, k_s, columns, key_ok, D, BLOCK_D)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p_k = position(key, k_at, TWO_K)
    if SPLIT:
        visible = (p_k[None, :] <= hi[:, None]) & key_ok[None, :]
        if HEAD:
            visible &= p_k[None, :] >= lo[:, None]
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = m_new
    if SPLIT:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: exp2(-inf - 0) is 0, not NaN
    p = tl.exp2(s * factor - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    total = total * shrink + tl.sum(p, 1)
    if keep_limit is not None:
        keep = keep_tile(seed, keep_limit, drop_batch, drop_head, p_q[:, None], p_k[None, :], QUADS)
        p = tl.where(keep, p / keep_rate, 0.0)
    v_tile = load_tile(v, key, v_s, v_columns, key_ok, DV, BLOCK_DV)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
    return acc, m_new, total


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    q_at: list[Segment],
    k_at: list[Segment],
    carry: Carry | None = None,
    last: bool = True,
    head_start: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = into or new_outputs(q, v, last)
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    q, k, v = aligned(q), aligned(k), aligned(v)
    if carry is not None and carry[0] is not None:
        carry = aligned(carry[0]), carry[1]
    options = option_arguments(head_start, scale, softcap, dropout, seed)
    for call in forward_launches(q, k, v, mask, q_at, k_at, carry, out, lse, options):
        call()
    return out, lse


def forward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    q_at: list[Segment],
    k_at: list[Segment],
    carry: Carry | None,
    out: Tensor,
    lse: Tensor,
    options: dict,
) -> Iterator[Launch]:
    """One launch, unless a list has more segments than a kernel takes: then queries split and keys carry on."""
    n = num_rows(q_at)
    carry_out, carry_lse = carry or (None, None)
    if n < q.shape[1]:
        out[:, n:], lse[:, :, n:] = 0, -float("inf")
    if n == 0:
        return
    if num_rows(k_at) == 0:
        out[:, :n] = 0 if carry_out is None else carry_out[:, :n]
        lse[:, :, :n] = -float("inf") if carry_lse is None else carry_lse[:, :, :n]
        return
    key_runs = ascending_runs(k_at)
    for q_first, q_run in ascending_runs(q_at):
        rows = slice(q_first, q_first + num_rows(q_run))
        so_far = carry if carry is None else (carry_out if carry_out is None else carry_out[:, rows], carry_lse[:, :, rows])
        for index, (k_first, k_run) in enumerate(key_runs):
            keys = slice(k_first, k_first + num_rows(k_run))
            target = out[:, rows], lse[:, :, rows]
            if index < len(key_runs) - 1 and out.dtype != lse.dtype:  # more keys follow: carry in fp32
                target = torch.empty_like(target[0], dtype=lse.dtype), target[1]
            yield _launch(q[:, rows], k[:, keys], v[:, keys], mask, q_run, k_run, so_far, *target, options)
            so_far = target


def _launch(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, q_at: list[Segment], k_at: list[Segment], carry: Carry | None, out: Tensor, lse: Tensor, options: dict
) -> Launch:
    batch, rows, heads, width = q.shape
    extras = options["keep_limit"] is not None or options["softcap"] is not None
    tiles = tiles_for("forward", q, v, extras)
    carry_out, carry_lse = carry or (None, None)
    q_segments, two_q = segment_arguments(q_at)
    k_segments, two_k = segment_arguments(k_at)
    arguments = dict(
        q=q, k=k, v=v, out=out, lse=lse, carry_out=carry_out, carry_lse=carry_lse,
        **strides("q", q), **strides("k", k), **strides("v", v), **strides("out", out), **strides("lse", lse, "bhs"),
        **strides("carry_out", carry_out), **strides("carry_lse", carry_lse, "bhs"),
        **mask_arguments(mask, q.device), **options, q_at=q_segments, k_at=k_segments,
        rows=rows, num_sequences=batch * heads, num_heads=heads, group=heads // k.shape[2],
        D=width, DV=v.shape[-1], TWO_Q=two_q, TWO_K=two_k, QUADS=quads(k_at, tiles["BLOCK_N"]), **tiles,
    )  # fmt: skip
    return Launch(attention_forward, (-(-rows // tiles["BLOCK_M"]) * batch * heads,), arguments)
