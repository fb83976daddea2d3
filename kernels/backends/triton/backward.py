"""FlashAttention-2's backward in portable Triton: recomputes the weights from lse; bit-equal in every run.

    p = exp(s - lse)    ds = p · (dout vᵀ - delta)    dv = pᵀ dout    dk = dsᵀ q · scale    dq = ds k · scale

    kernel                    owns               streams                                   matmuls
    attention_backward_dq     a tile of queries  its visible keys                          s, dp, dq
    attention_backward_dkdv   a tile of keys     the queries that see it, all its q heads  s, dp, dv, dk

Two kernels need seven matmuls where a single pass needs five. In return no kernel uses atomic adds: the result is
deterministic, and dq needs no fp32 buffer that every tile of keys reads and writes. Masks are intervals both ways (mask.py).
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.triton.arguments import (
    Tiles,
    common_arguments,
    grid_arguments,
    keys_in_quads,
    mask_and_dropout_arguments,
    strides_argument,
)
from ringspan.kernels.backends.triton.common import (
    ANY_SIZE,
    LOG2E,
    accumulate_chunks,
    bounded_position,
    dot_transposed,
    dropout_keep,
    exponents,
    head_offset,
    last_position,
    load_chunks,
    load_row_stats,
    load_tile,
    partial_tile,
    position,
    row_count,
    scale_chunks,
    store_chunks,
    tile_range,
    valid_rows,
    visible_keys,
    visible_queries,
    zero_chunks,
)
from ringspan.kernels.backends.triton.tile_sizes import tiles_for
from ringspan.kernels.runtime.launch import Arguments, CachedLaunch, Launch
from ringspan.kernels.segments import ascending_ranges
from ringspan.kernels.tensors import aligned, aligned_stats

MakeLaunches = Callable[[Block, Gradients, bool | str], Iterator[Launch]]  # for a block that is one ascending range


@triton.jit(**ANY_SIZE)
def attention_backward_dq(
    dout, q, k, v, lse, delta, dq, dout_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dq_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of queries."""
    sequence = tl.program_id(0) % num_sequences
    tile = tl.cdiv(rows, BLOCK_M) - 1 - tl.program_id(0) // num_sequences
    b, h = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)

    p_q = position(row, q_at)
    lo, hi = visible_keys(p_q, mask, b)
    hi = tl.minimum(hi, last_position(k_at))
    first_lo, first_hi = visible_keys(position(tile * BLOCK_M, q_at), mask, b)
    last_lo, last_hi = visible_keys(position(tl.minimum(tile * BLOCK_M + BLOCK_M, row_count(q_at)) - 1, q_at), mask, b)
    LOW_BOUND: tl.constexpr = mask.left is not None or mask.starts is not None
    begin, full_begin, full_end, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, 0, BLOCK_N, LOW_BOUND)

    row_ok = valid_rows(row, q_at, mask, b)
    q_tile = load_chunks(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D, TAIL_D)
    dout += head_offset(b, h, dout_strides)
    dout_tile = load_chunks(dout, row, dout_strides, row_ok, DV, BLOCK_DV, TAIL_DV)
    lse_row = tl.where(row_ok, load_row_stats(lse, row, b, h, lse_strides, row_count(q_at)), 0.0) * LOG2E
    delta_row = tl.where(row_ok, load_row_stats(delta, row, b, h, delta_strides, row_count(q_at)), 0.0)
    k += head_offset(b, h // GROUP, k_strides)
    v += head_offset(b, h // GROUP, v_strides)
    acc = zero_chunks(BLOCK_M, BLOCK_D, TAIL_D)
    for i in range(0, full_begin - begin + end - full_end):
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, partial_tile(i, begin, full_begin, full_end), p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, LOW_BOUND, True,
        )  # fmt: skip
    for i in range(full_begin, full_end):
        acc = add_dq(
            acc, q_tile, dout_tile, lse_row, delta_row, k, v, i, p_q, lo, hi, b, h,
            k_strides, v_strides, mask, drop, k_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_N, PRESCALED, QUADS, PRECISION, LOW_BOUND, False,
        )  # fmt: skip
    acc = scale_chunks(acc, scale)
    store_chunks(dq + head_offset(b, h, dq_strides), acc, row, dq_strides, row < rows, D, BLOCK_D, ADD)


@triton.jit
def add_dq(
    acc, q_tile, dout_tile, lse_row, delta_row, k, v, tile, p_q, lo, hi, b, h,
    k_strides, v_strides, mask, drop, k_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_N: tl.constexpr, PRESCALED: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, LOW_BOUND: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to dq; return the accumulator. PARTIAL: the tile needs the mask."""
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key_ok = None
    if PARTIAL:
        key_ok = valid_rows(key, k_at, mask, b)
    k_tile = load_chunks(k, key, k_strides, key_ok, D, BLOCK_D, TAIL_D)
    v_tile = load_chunks(v, key, v_strides, key_ok, DV, BLOCK_DV, TAIL_DV)
    s = dot_transposed(q_tile, k_tile, PRECISION)
    dp = dot_transposed(dout_tile, v_tile, PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[:, None])
    p_k = bounded_position(key, k_at) if PARTIAL else position(key, k_at)
    if drop is not None:
        dp = tl.where(dropout_keep(drop, b, h, p_q, p_k, QUADS), dp / drop.keep_rate, 0.0)
    ds = p * (dp - delta_row[:, None])
    if softcap is not None:
        ds *= 1 - s * s
    if PARTIAL:
        visible = p_k[None, :] <= hi[:, None]
        if LOW_BOUND:
            visible &= p_k[None, :] >= lo[:, None]
        ds = tl.where(visible, ds, 0.0)
    return accumulate_chunks(ds, k_tile, acc, PRECISION)


@triton.jit(**ANY_SIZE)
def attention_backward_dkdv(
    dout, q, k, v, lse, delta, dk, dv,
    dout_strides, q_strides, k_strides, v_strides, lse_strides, delta_strides, dk_strides, dv_strides,
    mask, drop, q_at, k_at, rows, num_sequences, num_heads, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESCALED: tl.constexpr, QUADS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys. Scores are (keys, queries), so their tiles are operands of dv and dk as stored."""
    sequence = tl.program_id(0) % num_sequences
    tile = tl.program_id(0) // num_sequences  # the first keys, visible to most queries under a causal mask, start first
    b, kv_head = (sequence // num_heads).to(tl.int64), (sequence % num_heads).to(tl.int64)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)

    p_k = position(key, k_at)
    lo, hi = visible_queries(p_k, mask, b)
    hi = tl.minimum(hi, last_position(q_at))
    first_lo, first_hi = visible_queries(position(tile * BLOCK_N, k_at), mask, b)
    last_lo, last_hi = visible_queries(position(tl.minimum(tile * BLOCK_N + BLOCK_N, row_count(k_at)) - 1, k_at), mask, b)
    LOW_BOUND: tl.constexpr = mask.right is not None or mask.starts is not None
    begin, full_begin, full_end, end = tile_range(first_lo, last_lo, first_hi, last_hi, q_at, 0, BLOCK_M, LOW_BOUND)

    key_ok = valid_rows(key, k_at, mask, b)
    k_tile = load_chunks(k + head_offset(b, kv_head, k_strides), key, k_strides, key_ok, D, BLOCK_D, TAIL_D)
    v_tile = load_chunks(v + head_offset(b, kv_head, v_strides), key, v_strides, key_ok, DV, BLOCK_DV, TAIL_DV)
    dk_acc = zero_chunks(BLOCK_N, BLOCK_D, TAIL_D)
    dv_acc = zero_chunks(BLOCK_N, BLOCK_DV, TAIL_DV)
    # One flat loop over (query head, tile): in a nested loop Triton keeps k and v in registers, which then spill.
    num_partial, num_full = full_begin - begin + end - full_end, full_end - full_begin
    for i in range(0, GROUP * num_partial):
        head, tile_index = group_step(i, num_partial, GROUP)
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta,
            partial_tile(tile_index, begin, full_begin, full_end), p_k, lo, hi, b, kv_head * GROUP + head,
            q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_M, PRESCALED, QUADS, PRECISION, LOW_BOUND, True,
        )  # fmt: skip
    for i in range(0, GROUP * num_full):
        head, tile_index = group_step(i, num_full, GROUP)
        dk_acc, dv_acc = add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, full_begin + tile_index, p_k, lo, hi, b,
            kv_head * GROUP + head, q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
            D, DV, BLOCK_D, TAIL_D, BLOCK_DV, TAIL_DV, BLOCK_M, PRESCALED, QUADS, PRECISION, LOW_BOUND, False,
        )  # fmt: skip
    dk_acc = scale_chunks(dk_acc, scale)
    store_chunks(dk + head_offset(b, kv_head, dk_strides), dk_acc, key, dk_strides, key < rows, D, BLOCK_D, ADD)
    store_chunks(dv + head_offset(b, kv_head, dv_strides), dv_acc, key, dv_strides, key < rows, DV, BLOCK_DV, ADD)


@triton.jit
def group_step(i, num_tiles, GROUP: tl.constexpr):
    """Return (query head within the group, tile) of step i of the flat loop."""
    if GROUP == 1:
        return 0, i
    else:
        return i // num_tiles, i % num_tiles


@triton.jit
def add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, tile, p_k, lo, hi, b, h,
    q_strides, dout_strides, lse_strides, delta_strides, mask, drop, q_at, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL_DV: tl.constexpr, BLOCK_M: tl.constexpr, PRESCALED: tl.constexpr, QUADS: tl.constexpr,
    PRECISION: tl.constexpr, LOW_BOUND: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries to dk and dv; return the accumulators. PARTIAL: the tile needs the mask."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok, num_rows = None, None
    if PARTIAL:
        row_ok, num_rows = valid_rows(row, q_at, mask, b), row_count(q_at)
    lse_row = load_row_stats(lse, row, b, h, lse_strides, num_rows) * LOG2E
    delta_row = load_row_stats(delta, row, b, h, delta_strides, num_rows)
    if PARTIAL:  # delta of a row that is padding or has no visible keys may be NaN, and 0 · NaN is NaN
        delta_row = tl.where(row_ok & (lse_row != float("-inf")), delta_row, 0.0)
    q_tile = load_chunks(q + head_offset(b, h, q_strides), row, q_strides, row_ok, D, BLOCK_D, TAIL_D)
    dout += head_offset(b, h, dout_strides)
    dout_tile = load_chunks(dout, row, dout_strides, row_ok, DV, BLOCK_DV, TAIL_DV)
    s = dot_transposed(k_tile, q_tile, PRECISION)
    dp = dot_transposed(v_tile, dout_tile, PRECISION)
    s, factor = exponents(s, scale, softcap, PRESCALED)
    p = tl.exp2(s * factor - lse_row[None, :])
    p_q = bounded_position(row, q_at) if PARTIAL else position(row, q_at)
    if PARTIAL:
        visible = p_q[None, :] <= hi[:, None]
        if LOW_BOUND:
            visible &= p_q[None, :] >= lo[:, None]
        p = tl.where(visible, p, 0.0)
    dropped = p
    if drop is not None:
        keep = tl.trans(dropout_keep(drop, b, h, p_q, p_k, QUADS))
        dropped = tl.where(keep, p / drop.keep_rate, 0.0)
        dp = tl.where(keep, dp / drop.keep_rate, 0.0)
    dv_acc = accumulate_chunks(dropped, dout_tile, dv_acc, PRECISION)
    ds = p * (dp - delta_row[None, :])
    if softcap is not None:
        ds *= 1 - s * s
    dk_acc = accumulate_chunks(ds, q_tile, dk_acc, PRECISION)
    return dk_acc, dv_acc


@triton.jit(**ANY_SIZE)
def row_products(
    dout, out, delta, dout_strides, out_strides, rows, num_heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute delta[b, h, s] = rowsum(dout · out) in fp32 without fp32 copies of the inputs."""
    head, tile = tl.program_id(0) // tl.cdiv(rows, BLOCK_M), tl.program_id(0) % tl.cdiv(rows, BLOCK_M)
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dout_tile = load_tile(dout + head_offset(b, h, dout_strides), row, dout_strides, row < rows, DV, BLOCK_DV)
    out_tile = load_tile(out + head_offset(b, h, out_strides), row, out_strides, row < rows, DV, BLOCK_DV)
    row_sum = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + (b * num_heads + h) * rows + row, row_sum, mask=row < rows)


def output_delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return delta (B, Hq, S) in fp32, the row sums of dout · out, both (B, S, Hq, Dv)."""
    dout, out = aligned(dout), aligned(out)
    batch, rows, heads, _ = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        Launch(row_products, _row_arguments, dict(dout=dout, out=out, delta=delta), {})()
    return delta


def _row_arguments(dout: Tensor, out: Tensor, delta: Tensor) -> Arguments:
    batch, rows, heads, width = out.shape
    args: dict[str, Any] = dict(dout=dout, out=out, delta=delta)
    args |= dict(dout_strides=strides_argument(dout), out_strides=strides_argument(out))
    args |= dict(rows=rows, num_heads=heads, DV=width, BLOCK_DV=triton.next_power_of_2(width), BLOCK_M=64)
    return batch * heads * -(-rows // 64), args


ADDS_DQ_ALONE = True  # each kernel has its own ADD flag, so accumulate="dq" is supported (see block.py)


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> None:
    """Write or accumulate dq, dk and dv of a block (see block.py)."""
    block = block.with_tensors(aligned(block.q), aligned(block.k), aligned(block.v))
    run_backward(block, gradients._replace(dout=aligned(gradients.dout)), accumulate, _launches)


def run_backward(
    block: Block, gradients: Gradients, accumulate: bool | str, launches: MakeLaunches
) -> list[CachedLaunch | None]:
    """Run all launches of a backward; return the cached launch of each, in order.

    Gradients in 16 bits that several launches add to are accumulated in temporary fp32 buffers and cast at the end.
    """
    pieces = len(ascending_ranges(block.q_at)) * len(ascending_ranges(block.k_at))
    dout, lse, delta, *outputs = gradients
    totals = [g if pieces == 1 or g.dtype == lse.dtype else torch.zeros_like(g, dtype=lse.dtype) for g in outputs]
    cached = [launch() for launch in backward_launches(block, Gradients(dout, lse, delta, *totals), accumulate, launches)]
    for gradient, total in zip(outputs, totals, strict=True):
        if total is not gradient:
            gradient.copy_(total)
    return cached


def backward_launches(
    block: Block, gradients: Gradients, accumulate: bool | str, launches: MakeLaunches | None = None
) -> Iterator[Launch]:
    """Yield the launches of a block's backward, in order.

    A block that is one ascending range needs one call of `launches`; otherwise each pair of a query range and a key range
    needs one, and all of them accumulate into `gradients`.
    """
    launches = launches or _launches
    if block.is_single_range:
        yield from launches(block, gradients, accumulate)
        return
    if accumulate is not True:  # zero once, then every launch adds
        for total in gradients[4:] if accumulate == "dq" else gradients[3:]:
            total.zero_()
    for queries, keys in itertools.product(ascending_ranges(block.q_at), ascending_ranges(block.k_at)):
        yield from launches(block.part(queries, keys), gradients.part(queries[0], keys[0]), True)


def _launches(block: Block, gradients: Gradients, accumulate: bool | str) -> Iterator[Launch]:
    gradients = gradients._replace(lse=aligned_stats(gradients.lse), delta=aligned_stats(gradients.delta))
    *inputs, dq, dk, dv = zip(Gradients._fields, gradients, strict=True)
    tensors = dict(q=block.q, k=block.k, v=block.v) | dict(inputs) | mask_and_dropout_arguments(block)
    extras = bool(block.dropout or block.softcap)
    for kernel, name, outputs, add in (
        (attention_backward_dq, "dq", (dq,), accumulate is not False),
        (attention_backward_dkdv, "dkdv", (dk, dv), accumulate is True),
    ):
        tiles = tiles_for(name, block.q, block.v, extras)
        options = common_arguments(block, tiles) | dict(QUADS=keys_in_quads(block, tiles["BLOCK_N"]), ADD=add)
        yield Launch(kernel, _arguments, tensors | dict(outputs), options)


def _arguments(tiles: Tiles, **args: Any) -> Arguments:
    """Arguments of the dq kernel (grid over queries) or of the dk/dv kernel (grid over keys)."""
    owner = ("q", "BLOCK_M") if "dq" in args else ("k", "BLOCK_N")
    return grid_arguments(*owner, tiles, args | dict(GROUP=args["q"].shape[2] // args["k"].shape[2]))
