"""Exact attention in plain PyTorch, tile by tile, with O(S) memory: the backend for CPUs and for fp64.

Chunks as in Rabe and Staats (2021): a chunk of queries carries its softmax over the chunks of keys that it attends to. The
backward recomputes each tile's weights from lse, as FlashAttention does. The formulas are those of `reference`, applied to
one tile at a time. Work is proportional to the number of visible tiles, and every sum has a fixed order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.backends.reference import Tile
from ringspan.kernels.segments import cut, num_rows, positions
from ringspan.kernels.tensors import INF

Q_CHUNK, K_CHUNK = 256, 512  # rows per chunk, at most
CPU_TILE = 2**18  # scores per tile of all sequences and heads: 1 MiB in fp32, a CPU core's L2 cache
GPU_FACTOR = 4  # chunks are this many times larger on a GPU


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    q, k, v = block.q, block.k, block.v
    carry_out, carry_lse = carry or (None, lse.new_full((1, 1, 1), -INF).expand_as(lse))
    for rows, key_chunks in _visible_tiles(block):
        acc = lse.new_zeros((len(q), rows.stop - rows.start, *out.shape[2:])) if carry_out is None else carry_out[:, rows]
        stats = carry_lse[:, :, rows]
        for keys, masked in key_chunks:
            tile = _tile(block, rows, keys, masked)
            acc, stats = tile.forward(q[:, rows], k[:, keys], v[:, keys], acc, stats)
        out[:, rows], lse[:, :, rows] = acc, stats
    n = num_rows(block.q_at)
    out[:, n:], lse[:, :, n:] = 0, -INF


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> None:
    q, k, v = block.q, block.k, block.v
    dout, lse, delta, *grads = gradients
    # Many tiles add to one row of dk, so sums are in the accumulation dtype even if the result is bf16.
    totals = [g.to(lse.dtype) if accumulate else torch.zeros_like(g, dtype=lse.dtype) for g in grads]
    for rows, key_chunks in _visible_tiles(block):
        for keys, masked in key_chunks:
            tile = _tile(block, rows, keys, masked)
            parts = tile.backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows])
            for total, part, at in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, at] += part
    for grad, total in zip(grads, totals, strict=True):
        if total is not grad:
            grad.copy_(total)


def _tile(block: Block, rows: slice, keys: slice, masked: bool) -> Tile:
    return Tile(block, cut(block.q_at, rows.start, rows.stop), cut(block.k_at, keys.start, keys.stop), masked)


def _visible_tiles(block: Block) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Yield each chunk of query rows with the chunks of key rows that some of them attend to, and whether not all to all.

    The bounds come from the host mask, so there is no host sync.
    """
    q_chunk, k_chunk = _chunks(block.q)
    q_positions, k_positions = positions(block.q_at), positions(block.k_at)
    host_mask = block.mask.host_mask()
    complete = host_mask is block.mask  # else it leaves out documents or a prefix on a GPU, which hide keys of any tile
    lo, hi = host_mask.interval(q_positions)
    key_chunks = [slice(start, min(start + k_chunk, len(k_positions))) for start in range(0, len(k_positions), k_chunk)]
    spans = [(keys, int(k_positions[keys].min()), int(k_positions[keys].max())) for keys in key_chunks]
    for start in range(0, len(q_positions), q_chunk):
        rows = slice(start, min(start + q_chunk, len(q_positions)))
        (lowest, low), (high, highest) = (map(int, bound[..., rows].aminmax()) for bound in (lo, hi))
        visible = (span for span in spans if span[1] <= highest and span[2] >= lowest)
        yield rows, [(keys, not complete or first < low or last > high) for keys, first, last in visible]


def _chunks(q: Tensor) -> tuple[int, int]:
    """Return the rows per chunk of queries and of keys for q (B, S, H, D)."""
    if q.is_cuda:
        return Q_CHUNK * GPU_FACTOR, K_CHUNK * GPU_FACTOR
    rows, keys = Q_CHUNK, K_CHUNK
    while rows * keys * q.shape[0] * q.shape[2] > CPU_TILE and keys > 64:
        rows, keys = (rows // 2, keys) if rows >= keys else (rows, keys // 2)
    return rows, keys
