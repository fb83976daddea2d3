"""FlashAttention-2's backward in portable Triton, recomputing the weights from lse; bit-equal over runs.

Two kernels, each of which owns what it sums: `attention_backward_dq` keeps a tile of queries and streams the keys it sees,
`attention_backward_dkdv` keeps a tile of keys and streams the queries that see it, over all heads of its group. That is
seven products instead of the five of a single pass, but nothing is added by atomics, so the result is deterministic and
dq needs no fp32 buffer that every tile of keys reads and writes again. Masks are intervals both ways (mask.py).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mask import Mask
from .philox import keep_tile
from .segments import Segment, ascending_runs, num_rows
from .triton_common import (
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
    queries_of,
    row_count,
    rows_of,
    segment_arguments,
    store_tile,
    strides,
    tile_range,
)
from .triton_tiles import tiles_for


@triton.jit
def attention_backward_dq(
    dout, q, k, v, lse, delta, dq, seed,
    dout_b, dout_s, dout_h, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, 
    lse_b, lse_h, lse_s, delta_b, delta_h, delta_s, dq_b, dq_s, dq_h, 
    left, right, starts, ends, length, doc_stride, prefix, prefix_stride,
    q_at, k_at, rows, num_sequences, num_heads, head_start, scale, softcap, keep_rate, keep_limit, seed_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TWO_Q: tl.constexpr, TWO_K: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    n = row_count(q_at, TWO_Q)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
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
    first = position(tile * BLOCK_M, q_at, TWO_Q)
    last = position(tl.minimum(tile * BLOCK_M + BLOCK_M, n) - 1, q_at, TWO_Q)
    first_lo, first_hi = keys_of(first, left, right, starts, ends, length, prefix)
    last_lo, last_hi = keys_of(last, left, right, starts, ends, length, prefix)
    HEAD: tl.constexpr = left is not None or starts is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, TWO_K, BLOCK_N, HEAD)

    row_ok = rows_of(row, q_at, starts, ends, length, TWO_Q)
    q_tile = load_tile(q + head_offset(b, q_b, h, q_h), row, q_s, columns, row_ok, D, BLOCK_D)
    dout_tile = load_tile(dout + head_offset(b, dout_b, h, dout_h), row, dout_s, v_columns, row_ok, DV, BLOCK_DV)
    lse_row = tl.load(lse + b * lse_b + h * lse_h + row.to(tl.int64) * lse_s, mask=row_ok, other=0.0) * LOG2E
    delta_row = tl.load(delta + b * delta_b + h * delta_h + row.to(tl.int64) * delta_s, mask=row_ok, other=0.0)
    k += head_offset(b, k_b, h // GROUP, k_h)
    v += head_offset(b, v_b, h // GROUP, v_h)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for i in range(0, full - begin + end - rest):
        at = tl.where(begin + i < full, begin + i, rest + i - (full - begin)) * BLOCK_N
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, at, p_q, lo, hi, k_s, v_s, columns, v_columns,
            starts, ends, length, k_at, scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, TWO_K, PRESCALED, QUADS, PRECISION, True, HEAD,
        )  # fmt: skip
    for i in range(full, rest):
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, i * BLOCK_N, p_q, lo, hi, k_s, v_s, columns, v_columns,
            starts, ends, length, k_at, scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, TWO_K, PRESCALED, QUADS, PRECISION, False, HEAD,
        )  # fmt: skip
    store_tile(dq + b * dq_b + h * dq_h, acc * scale, row, dq_s, columns, row < rows, D, ADD)


@triton.jit
def add_dq(
    acc, q_tile, dout_tile, lse_row, delta_row, k, v, at, p_q, lo, hi, k_s, v_s, columns, v_columns,
    starts, ends, length, k_at, scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, TWO_K: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    key = at + tl.arange(0, BLOCK_N)
    key_ok = None
    if SPLIT:
        key_ok = rows_of(key, k_at, starts, ends, length, TWO_K)
    k_tile = load_tile(k, key, k_s, columns, key_ok, D, BLOCK_D)
    v_tile = load_tile(v, key, v_s, v_columns, key_ok, DV, BLOCK_DV)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[:, None])
    p_k = position(key, k_at, TWO_K)
    if keep_limit is not None:
        keep = keep_tile(seed, keep_limit, drop_batch, drop_head, p_q[:, None], p_k[None, :], QUADS)
        dp = tl.where(keep, dp / keep_rate, 0.0)
    ds = p * (dp - delta_row[:, None])
    if softcap is not None:
        ds *= 1 - s * s
    if SPLIT:
        visible = (p_k[None, :] <= hi[:, None]) & key_ok[None, :]
        if HEAD:
            visible &= p_k[None, :] >= lo[:, None]
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit
def attention_backward_dkdv(
    dout, q, k, v, lse, delta, dk, dv, seed,
    dout_b, dout_s, dout_h, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, 
    lse_b, lse_h, lse_s, delta_b, delta_h, delta_s, dk_b, dk_s, dk_h, dv_b, dv_s, dv_h, 
    left, right, starts, ends, length, doc_stride, prefix, prefix_stride,
    q_at, k_at, rows, num_sequences, num_heads, head_start, scale, softcap, keep_rate, keep_limit, seed_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TWO_Q: tl.constexpr, TWO_K: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Everything is transposed: scores are (keys, queries), so that their tiles feed dv and dk as they are."""
    sequence = tl.program_id(0) % num_sequences
    tile = tl.program_id(0) // num_sequences  # the first keys, which most queries see under a causal mask, start first
    b, kv_head = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    n = row_count(k_at, TWO_K)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if starts is not None:
        starts += b * doc_stride
        ends += b * doc_stride
    if prefix is not None:
        prefix += b * prefix_stride
    if keep_limit is not None:
        seed = tl.load(seed + b * seed_stride)
    drop_batch = tl.where(seed_stride == 0, b, 0).to(tl.int32) if seed_stride is not None else 0

    p_k = position(key, k_at, TWO_K)
    lo, hi = queries_of(p_k, left, right, starts, ends, length, prefix)
    first = position(tile * BLOCK_N, k_at, TWO_K)
    last = position(tl.minimum(tile * BLOCK_N + BLOCK_N, n) - 1, k_at, TWO_K)
    first_lo, first_hi = queries_of(first, left, right, starts, ends, length, prefix)
    last_lo, last_hi = queries_of(last, left, right, starts, ends, length, prefix)
    HEAD: tl.constexpr = right is not None or starts is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, q_at, TWO_Q, BLOCK_M, HEAD)

    key_ok = rows_of(key, k_at, starts, ends, length, TWO_K)
    k_tile = load_tile(k + head_offset(b, k_b, kv_head, k_h), key, k_s, columns, key_ok, D, BLOCK_D)
    v_tile = load_tile(v + head_offset(b, v_b, kv_head, v_h), key, v_s, v_columns, key_ok, DV, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # One flat loop over (head of the group, tile): around a nested one Triton keeps k and v in registers, which then spill.
    q += head_offset(b, q_b, kv_head * GROUP, q_h)
    dout += head_offset(b, dout_b, kv_head * GROUP, dout_h)
    lse += b * lse_b + kv_head * GROUP * lse_h
    delta += b * delta_b + kv_head * GROUP * delta_h
    num_split = full - begin + end - rest
    for i in range(0, GROUP * num_split):
        member, tile_of_member = in_group(i, num_split, GROUP)
        at = tl.where(begin + tile_of_member < full, begin + tile_of_member, rest + tile_of_member - (full - begin)) * BLOCK_M
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q + head_offset(member, q_h, 0, 0), dout + head_offset(member, dout_h, 0, 0), lse + member * lse_h, delta + member * delta_h,
            at, p_k, lo, hi, q_s, dout_s, lse_s, delta_s, columns, v_columns, starts, ends, length, q_at,
            scale, softcap, keep_rate, keep_limit, seed, drop_batch, (kv_head * GROUP + member + head_start).to(tl.int32),
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, TWO_Q, PRESCALED, QUADS, PRECISION, True, HEAD,
        )  # fmt: skip
    num_full = rest - full
    for i in range(0, GROUP * num_full):
        member, tile_of_member = in_group(i, num_full, GROUP)
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q + head_offset(member, q_h, 0, 0), dout + head_offset(member, dout_h, 0, 0), lse + member * lse_h, delta + member * delta_h,
            (full + tile_of_member) * BLOCK_M, p_k, lo, hi, q_s, dout_s, lse_s, delta_s, columns, v_columns,
            starts, ends, length, q_at, scale, softcap, keep_rate, keep_limit, seed, drop_batch,
            (kv_head * GROUP + member + head_start).to(tl.int32),
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, TWO_Q, PRESCALED, QUADS, PRECISION, False, HEAD,
        )  # fmt: skip
    store_tile(dk + b * dk_b + kv_head * dk_h, dk_acc * scale, key, dk_s, columns, key < rows, D, ADD)
    store_tile(dv + b * dv_b + kv_head * dv_h, dv_acc, key, dv_s, v_columns, key < rows, DV, ADD)


@triton.jit
def in_group(i, num_tiles, GROUP: tl.constexpr):
    """Step i of the flat loop → (head of the group, tile)."""
    if GROUP == 1:
        return 0, i
    else:
        return (i // num_tiles).to(tl.int64), i % num_tiles


@triton.jit
def add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, at, p_k, lo, hi,
    q_s, dout_s, lse_s, delta_s, columns, v_columns, starts, ends, length, q_at,
    scale, softcap, keep_rate, keep_limit, seed, drop_batch, drop_head,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, TWO_Q: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    row = at + tl.arange(0, BLOCK_M)
    row_ok = None
    if SPLIT:
        row_ok = rows_of(row, q_at, starts, ends, length, TWO_Q)
        lse_row = tl.load(lse + row.to(tl.int64) * lse_s, mask=row_ok, other=0.0) * LOG2E
        delta_row = tl.load(delta + row.to(tl.int64) * delta_s, mask=row_ok, other=0.0)
    else:
        lse_row = tl.load(lse + row.to(tl.int64) * lse_s) * LOG2E
        delta_row = tl.load(delta + row.to(tl.int64) * delta_s)
    q_tile = load_tile(q, row, q_s, columns, row_ok, D, BLOCK_D)
    dout_tile = load_tile(dout, row, dout_s, v_columns, row_ok, DV, BLOCK_DV)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[None, :])
    p_q = position(row, q_at, TWO_Q)
    if SPLIT:
        visible = (p_q[None, :] <= hi[:, None]) & row_ok[None, :]
        if HEAD:
            visible &= p_q[None, :] >= lo[:, None]
        p = tl.where(visible, p, 0.0)
    dropped = p
    if keep_limit is not None:
        keep = tl.trans(keep_tile(seed, keep_limit, drop_batch, drop_head, p_q[:, None], p_k[None, :], QUADS))
        dropped = tl.where(keep, p / keep_rate, 0.0)
        dp = tl.where(keep, dp / keep_rate, 0.0)
    dv_acc = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
    ds = p * (dp - delta_row[None, :])
    if softcap is not None:
        ds *= 1 - s * s
    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit
def row_products(dout, out, delta, dout_b, dout_s, dout_h, out_b, out_s, out_h, rows, num_heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """delta[b, h, s] = rowsum(dout · out) in fp32, without an fp32 copy of either."""
    b = (tl.program_id(0) // tl.cdiv(rows, BLOCK_M) // num_heads).to(tl.int64)
    h = (tl.program_id(0) // tl.cdiv(rows, BLOCK_M) % num_heads).to(tl.int64)
    row = tl.program_id(0) % tl.cdiv(rows, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    a = load_tile(dout + head_offset(b, dout_b, h, dout_h), row, dout_s, columns, row < rows, DV, BLOCK_DV)
    c = load_tile(out + head_offset(b, out_b, h, out_h), row, out_s, columns, row < rows, DV, BLOCK_DV)
    total = tl.sum(a.to(tl.float32) * c.to(tl.float32), 1)
    tl.store(delta + (b * num_heads + h) * rows + row, total, mask=row < rows)


def output_delta(dout: Tensor, out: Tensor) -> Tensor:
    dout, out = aligned(dout), aligned(out)
    batch, rows, heads, width = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        block = 64
        row_products[(batch * heads * -(-rows // block),)](
            dout, out, delta, *dout.stride()[:3], *out.stride()[:3], rows, heads, width, triton.next_power_of_2(width), block
        )
    return delta


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Mask,
    q_at: list[Segment],
    k_at: list[Segment],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    head_start: int = 0,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    accumulate: bool = True,
) -> None:
    dout, q, k, v = (aligned(x) for x in (dout, q, k, v))
    options = option_arguments(head_start, scale, softcap, dropout, seed)
    for call in backward_launches(dout, q, k, v, lse, delta, mask, q_at, k_at, dq, dk, dv, options, accumulate):
        call()


def backward_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Mask,
    q_at: list[Segment],
    k_at: list[Segment],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: dict,
    accumulate: bool,
) -> Iterator[Launch]:
    """Two launches; for lists of more segments than a kernel takes, two for each pair of runs, added up in fp32."""
    q_runs, k_runs = ascending_runs(q_at), ascending_runs(k_at)
    whole = num_rows(q_at) == q.shape[1] and num_rows(k_at) == k.shape[1]
    single = len(q_runs) == len(k_runs) == 1 and whole
    if not accumulate and not single:  # overwrite once, then add
        for total in (dq, dk, dv):
            total.zero_()
        if dq.dtype != lse.dtype and len(q_runs) * len(k_runs) > 1:
            raise ValueError(f"gradients of {len(q_runs)} x {len(k_runs)} runs of segments add up in {lse.dtype}, not {dq.dtype}: pass such buffers")
    for q_first, q_run in q_runs:
        rows = slice(q_first, q_first + num_rows(q_run))
        for k_first, k_run in k_runs:
            keys = slice(k_first, k_first + num_rows(k_run))
            sliced = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows]
            yield from _launches(*sliced, mask, q_run, k_run, dq[:, rows], dk[:, keys], dv[:, keys], options, accumulate or not single)


def _launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Mask,
    q_at: list[Segment],
    k_at: list[Segment],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: dict,
    add: bool,
) -> Iterator[Launch]:
    batch, q_rows, heads, width = q.shape
    k_rows, kv_heads = k.shape[1:3]
    extras = options["keep_limit"] is not None or options["softcap"] is not None
    q_segments, two_q = segment_arguments(q_at)
    k_segments, two_k = segment_arguments(k_at)
    inputs = dict(
        dout=dout, q=q, k=k, v=v, lse=lse, delta=delta,
        **strides("dout", dout), **strides("q", q), **strides("k", k), **strides("v", v),
        **strides("lse", lse, "bhs"), **strides("delta", delta, "bhs"),
        **mask_arguments(mask, q.device), **options, q_at=q_segments, k_at=k_segments,
        GROUP=heads // kv_heads, D=width, DV=v.shape[-1], TWO_Q=two_q, TWO_K=two_k, ADD=add,
    )  # fmt: skip
    tiles = tiles_for("dq", q, v, extras)
    own = dict(dq=dq, **strides("dq", dq), rows=q_rows, num_sequences=batch * heads, num_heads=heads)
    grid = (-(-q_rows // tiles["BLOCK_M"]) * batch * heads,)
    yield Launch(attention_backward_dq, grid, inputs | own | tiles | dict(QUADS=quads(k_at, tiles["BLOCK_N"])))

    tiles = tiles_for("dkdv", q, v, extras)
    own = dict(dk=dk, dv=dv, **strides("dk", dk), **strides("dv", dv), rows=k_rows, num_sequences=batch * kv_heads, num_heads=kv_heads)
    grid = (-(-k_rows // tiles["BLOCK_N"]) * batch * kv_heads,)
    yield Launch(attention_backward_dkdv, grid, inputs | own | tiles | dict(QUADS=quads(k_at, tiles["BLOCK_N"])))
