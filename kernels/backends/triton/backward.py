"""FlashAttention-2's backward in portable Triton, recomputing the weights from lse; bit-equal over runs.

Two kernels, each of which owns what it sums: `attention_backward_dq` keeps a tile of queries and streams the keys it sees,
`attention_backward_dkdv` keeps a tile of keys and streams the queries that see it, over all heads of its group. That is
seven products instead of the five of a single pass, but nothing is added by atomics, so the result is deterministic and
dq needs no fp32 buffer that every tile of keys reads and writes again. Masks are intervals both ways (mask.py).
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.triton.arguments import Tiles, of_mask_and_dropout, quads, rules, shared_out
from ringspan.kernels.backends.triton.common import (
    ANY_SIZE,
    LOG2E,
    exponents,
    head_offset,
    kept,
    keys_of,
    load_rows,
    load_tile,
    position,
    queries_of,
    row_count,
    rows_of,
    split_tile,
    store_tile,
    tile_range,
)
from ringspan.kernels.backends.triton.tile_sizes import tiles_for
from ringspan.kernels.runtime.launch import Arguments, CachedLaunch, Launch
from ringspan.kernels.segments import ascending_runs
from ringspan.kernels.tensors import aligned

Launches = Callable[[Block, Gradients, bool | str], Iterator[Launch]]  # of a block that kernels take as it stands


@triton.jit(**ANY_SIZE)
def attention_backward_dq(
    dout, q, k, v, lse, delta, dq, dout_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dq_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)

    p_q = position(row, q_at)
    lo, hi = keys_of(p_q, mask, b)
    first_lo, first_hi = keys_of(position(tile * BLOCK_M, q_at), mask, b)
    last_lo, last_hi = keys_of(position(tl.minimum(tile * BLOCK_M + BLOCK_M, row_count(q_at)) - 1, q_at), mask, b)
    HEAD: tl.constexpr = mask[0] is not None or mask[2] is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, 0, BLOCK_N, HEAD)

    row_ok = rows_of(row, q_at, mask, b)
    q_tile = load_tile(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D)
    dout_tile = load_tile(dout + head_offset(b, h, dout_strides), row, dout_strides, row_ok, DV, BLOCK_DV)
    lse_row = load_rows(lse, row, b, h, lse_strides, row_ok) * LOG2E
    delta_row = load_rows(delta, row, b, h, delta_strides, row_ok)
    k += head_offset(b, h // GROUP, k_strides)
    v += head_offset(b, h // GROUP, v_strides)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(0, full - begin + end - rest):
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, split_tile(i, begin, full, rest), p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, HEAD, True,
        )  # fmt: skip
    for i in range(full, rest):
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, i, p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, HEAD, False,
        )  # fmt: skip
    store_tile(dq + head_offset(b, h, dq_strides), acc * scale, row, dq_strides, row < rows, D, BLOCK_D, ADD)


@triton.jit
def add_dq(
    acc, q_tile, dout_tile, lse_row, delta_row, k, v, tile, p_q, lo, hi, b, h,
    k_strides, v_strides, mask, drop, k_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key_ok = None
    if SPLIT:
        key_ok = rows_of(key, k_at, mask, b)
    k_tile = load_tile(k, key, k_strides, key_ok, D, BLOCK_D)
    v_tile = load_tile(v, key, v_strides, key_ok, DV, BLOCK_DV)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[:, None])
    p_k = position(key, k_at)
    if drop is not None:
        dp = tl.where(kept(drop, b, h, p_q, p_k, QUADS), dp / drop[2], 0.0)
    ds = p * (dp - delta_row[:, None])
    if softcap is not None:
        ds *= 1 - s * s
    if SPLIT:
        visible = (p_k[None, :] <= hi[:, None]) & key_ok[None, :]
        if HEAD:
            visible &= p_k[None, :] >= lo[:, None]
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit(**ANY_SIZE)
def attention_backward_dkdv(
    dout, q, k, v, lse, delta, dk, dv,
    dout_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dk_strides, dv_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Everything is transposed: scores are (keys, queries), so that their tiles feed dv and dk as they are."""
    sequence = tl.program_id(0) % num_sequences
    tile = tl.program_id(0) // num_sequences  # the first keys, which most queries see under a causal mask, start first
    b, kv_head = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)

    p_k = position(key, k_at)
    lo, hi = queries_of(p_k, mask, b)
    first_lo, first_hi = queries_of(position(tile * BLOCK_N, k_at), mask, b)
    last_lo, last_hi = queries_of(position(tl.minimum(tile * BLOCK_N + BLOCK_N, row_count(k_at)) - 1, k_at), mask, b)
    HEAD: tl.constexpr = mask[1] is not None or mask[2] is not None
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, q_at, 0, BLOCK_M, HEAD)

    key_ok = rows_of(key, k_at, mask, b)
    k_tile = load_tile(k + head_offset(b, kv_head, k_strides), key, k_strides, key_ok, D, BLOCK_D)
    v_tile = load_tile(v + head_offset(b, kv_head, v_strides), key, v_strides, key_ok, DV, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # One flat loop over (head of the group, tile): around a nested one Triton keeps k and v in registers, which then spill.
    num_split, num_full = full - begin + end - rest, rest - full
    for i in range(0, GROUP * num_split):
        member, nth = in_group(i, num_split, GROUP)
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, split_tile(nth, begin, full, rest), p_k, lo, hi, b,
            kv_head * GROUP + member, q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, PRESCALED, QUADS, PRECISION, HEAD, True,
        )  # fmt: skip
    for i in range(0, GROUP * num_full):
        member, nth = in_group(i, num_full, GROUP)
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, full + nth, p_k, lo, hi, b,
            kv_head * GROUP + member, q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, PRESCALED, QUADS, PRECISION, HEAD, False,
        )  # fmt: skip
    store_tile(dk + head_offset(b, kv_head, dk_strides), dk_acc * scale, key, dk_strides, key < rows, D, BLOCK_D, ADD)
    store_tile(dv + head_offset(b, kv_head, dv_strides), dv_acc, key, dv_strides, key < rows, DV, BLOCK_DV, ADD)


@triton.jit
def in_group(i, num_tiles, GROUP: tl.constexpr):
    """Step i of the flat loop → (head of the group, tile)."""
    if GROUP == 1:
        return 0, i
    else:
        return i // num_tiles, i % num_tiles


@triton.jit
def add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, tile, p_k, lo, hi, b, h,
    q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = None
    if SPLIT:
        row_ok = rows_of(row, q_at, mask, b)
    lse_row = load_rows(lse, row, b, h, lse_strides, row_ok) * LOG2E
    delta_row = load_rows(delta, row, b, h, delta_strides, row_ok)
    if SPLIT:  # a row that sees nothing may come with a NaN, and 0 · NaN is NaN
        delta_row = tl.where(lse_row == float("-inf"), 0.0, delta_row)
    q_tile = load_tile(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D)
    dout_tile = load_tile(dout + head_offset(b, h, dout_strides), row, dout_strides, row_ok, DV, BLOCK_DV)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[None, :])
    p_q = position(row, q_at)
    if SPLIT:
        visible = (p_q[None, :] <= hi[:, None]) & row_ok[None, :]
        if HEAD:
            visible &= p_q[None, :] >= lo[:, None]
        p = tl.where(visible, p, 0.0)
    dropped = p
    if drop is not None:
        keep = tl.trans(kept(drop, b, h, p_q, p_k, QUADS))
        dropped = tl.where(keep, p / drop[2], 0.0)
        dp = tl.where(keep, dp / drop[2], 0.0)
    dv_acc = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
    ds = p * (dp - delta_row[None, :])
    if softcap is not None:
        ds *= 1 - s * s
    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit(**ANY_SIZE)
def row_products(
    dout, out, delta, dout_strides, out_strides, rows, num_heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta[b, h, s] = rowsum(dout · out) in fp32, without an fp32 copy of either."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    a = load_tile(dout + head_offset(b, h, dout_strides), row, dout_strides, row < rows, DV, BLOCK_DV)
    c = load_tile(out + head_offset(b, h, out_strides), row, out_strides, row < rows, DV, BLOCK_DV)
    total = tl.sum(a.to(tl.float32) * c.to(tl.float32), 1)
    tl.store(delta + (b * num_heads + h) * rows + row, total, mask=row < rows)


def output_delta(dout: Tensor, out: Tensor) -> Tensor:
    dout, out = aligned(dout), aligned(out)
    batch, rows, heads, _ = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        Launch(row_products, _row_arguments, dict(dout=dout, out=out, delta=delta), {})()
    return delta


def _row_arguments(dout: Tensor, out: Tensor, delta: Tensor) -> Arguments:
    batch, rows, heads, width = out.shape
    given = dict(dout=dout, out=out, delta=delta, dout_strides=dout.stride()[:3], out_strides=out.stride()[:3])
    given |= dict(rows=rows, num_heads=heads, DV=width, BLOCK_DV=triton.next_power_of_2(width), BLOCK_M=64)
    return batch * heads * -(-rows // 64), given


ADDS_DQ_ALONE = True  # accumulate="dq" is a choice of each kernel


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> None:
    block = block.read_from(aligned(block.q), aligned(block.k), aligned(block.v))
    add_up(block, gradients._replace(dout=aligned(gradients.dout)), accumulate, _launches)


def add_up(block: Block, gradients: Gradients, accumulate: bool | str, launches: Launches) -> list[CachedLaunch | None]:
    """Runs all launches, with fp32 sums behind gradients in 16 bits that take more than one; what is known of each."""
    pieces = len(ascending_runs(block.q_at)) * len(ascending_runs(block.k_at))
    dout, lse, delta, *given = gradients
    totals = [g if pieces == 1 or g.dtype == lse.dtype else torch.zeros_like(g, dtype=lse.dtype) for g in given]
    known = [call() for call in backward_launches(block, Gradients(dout, lse, delta, *totals), accumulate, launches)]
    for gradient, total in zip(given, totals, strict=True):
        if total is not gradient:
            gradient.copy_(total)
    return known


def backward_launches(
    block: Block, gradients: Gradients, accumulate: bool | str, launches: Launches | None = None
) -> Iterator[Launch]:
    """Two launches; for lists of more segments than a kernel takes, two for each pair of runs, added up in fp32."""
    launches = launches or _launches
    if block.is_one_run:
        yield from launches(block, gradients, accumulate)
        return
    if accumulate is not True:  # overwrite once, then add
        for total in gradients[4:] if accumulate == "dq" else gradients[3:]:
            total.zero_()
    for queries, keys in itertools.product(ascending_runs(block.q_at), ascending_runs(block.k_at)):
        yield from launches(block.part(queries, keys), gradients.part(queries[0], keys[0]), True)


def _launches(block: Block, gradients: Gradients, accumulate: bool | str) -> Iterator[Launch]:
    *given, dq, dk, dv = zip(Gradients._fields, gradients, strict=True)
    tensors = dict(q=block.q, k=block.k, v=block.v) | dict(given) | of_mask_and_dropout(block)
    extras = bool(block.dropout or block.softcap)
    for kernel, name, own, add in (
        (attention_backward_dq, "dq", (dq,), accumulate is not False),
        (attention_backward_dkdv, "dkdv", (dk, dv), accumulate is True),
    ):
        tiles = tiles_for(name, block.q, block.v, extras)
        how = rules(block, tiles) | dict(QUADS=quads(block.k_at, tiles["BLOCK_N"]), ADD=add)
        yield Launch(kernel, _arguments, tensors | dict(own), how)


def _arguments(tiles: Tiles, **given: Any) -> Arguments:
    """Of the launch that owns dq, by queries, or of the one that owns dk and dv, by keys."""
    owner = ("q", "BLOCK_M") if "dq" in given else ("k", "BLOCK_N")
    return shared_out(*owner, tiles, given | dict(GROUP=given["q"].shape[2] // given["k"].shape[2]))
