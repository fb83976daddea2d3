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

Q_CHUNK, K_CHUNK = 256, 512  # rows per chunk; the tile of scores fits into a CPU's caches
GPU_FACTOR = 4  # chunks are this many times larger on a GPU


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    q, k, v = block.q, block.k, block.v
    carry_out, carry_lse = carry or (None, lse.new_full((1, 1, 1), -INF).expand_as(lse))
    for rows, key_chunks in _visible_tiles(block):
        acc = lse.new_zeros((len(q), rows.stop - rows.start, *out.shape[2:])) if carry_out is None else carry_out[:, rows]
        stats = carry_lse[:, :, rows]
        for keys in key_chunks:
            tile = _tile(block, rows, keys)
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
        for keys in key_chunks:
            tile = _tile(block, rows, keys)
            parts = tile.backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows])
            for total, part, at in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, at] += part
    for grad, total in zip(grads, totals, strict=True):
        if total is not grad:
            grad.copy_(total)


def _tile(block: Block, rows: slice, keys: slice) -> Tile:
    return Tile(block, cut(block.q_at, rows.start, rows.stop), cut(block.k_at, keys.start, keys.stop))


def _visible_tiles(block: Block) -> Iterator[tuple[slice, list[slice]]]:
    """Yield each chunk of query rows with the chunks of key rows that its first and last row bound.

    The bounds come from the host mask, so there is no host sync.
    """
    factor = GPU_FACTOR if block.q.is_cuda else 1
    q_chunk, k_chunk = Q_CHUNK * factor, K_CHUNK * factor
    q_positions, k_positions = positions(block.q_at), positions(block.k_at)
    lo, hi = block.mask.host_mask().interval(q_positions)
    key_chunks = [slice(start, min(start + k_chunk, len(k_positions))) for start in range(0, len(k_positions), k_chunk)]
    spans = [(keys, int(k_positions[keys].min()), int(k_positions[keys].max())) for keys in key_chunks]
    for start in range(0, len(q_positions), q_chunk):
        rows = slice(start, min(start + q_chunk, len(q_positions)))
        lowest, highest = int(lo[..., rows].min()), int(hi[..., rows].max())
        yield rows, [keys for keys, first, last in spans if first <= highest and last >= lowest]
