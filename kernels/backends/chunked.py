"""Exact attention in plain PyTorch, chunk by chunk, with O(S) memory: the path for CPUs and for fp64.

Chunks are Rabe and Staats' (2021). As in FlashAttention a chunk of queries carries its softmax over the chunks of keys that it
can see, and the backward recomputes each tile's weights from lse. The formulas are the reference's own, a tile at a time, so
there is nothing here but the walk. Work is proportional to the tiles that the mask leaves, and every sum has a fixed order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.backends.reference import INF, Tile
from ringspan.kernels.segments import cut, num_rows, positions

Q_CHUNK, K_CHUNK = 256, 512  # rows per chunk: a tile of scores that stays near the cores; a GPU wants them larger
GPU_FACTOR = 4


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    q, k, v = block.q, block.k, block.v
    carry_out, carry_lse = carry or (None, lse.new_full((1, 1, 1), -INF).expand_as(lse))
    for rows, key_chunks in _walk(block):
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
    # Many tiles add to one row of dk, so the sums must run in the accumulation dtype even if the result is bf16.
    totals = [g.to(lse.dtype) if accumulate else torch.zeros_like(g, dtype=lse.dtype) for g in grads]
    for rows, key_chunks in _walk(block):
        for keys in key_chunks:
            tile = _tile(block, rows, keys)
            parts = tile.backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows])
            for total, part, at in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, at] += part
    for given, total in zip(grads, totals, strict=True):
        if total is not given:
            given.copy_(total)


def _tile(block: Block, rows: slice, keys: slice) -> Tile:
    return Tile(block, cut(block.q_at, rows.start, rows.stop), cut(block.k_at, keys.start, keys.stop))


def _walk(block: Block) -> Iterator[tuple[slice, list[slice]]]:
    """Each chunk of query rows with the chunks of key rows that its first and last row can reach.

    The bounds are read on the CPU, from the coarse mask, so that a GPU is never waited for.
    """
    factor = GPU_FACTOR if block.q.is_cuda else 1
    q_chunk, k_chunk = Q_CHUNK * factor, K_CHUNK * factor
    q_positions, k_positions = positions(block.q_at), positions(block.k_at)
    lo, hi = block.mask.coarse().interval(q_positions)
    key_chunks = [slice(at, min(at + k_chunk, len(k_positions))) for at in range(0, len(k_positions), k_chunk)]
    spans = [(keys, *(int(p) for p in torch.aminmax(k_positions[keys]))) for keys in key_chunks]
    for at in range(0, len(q_positions), q_chunk):
        rows = slice(at, min(at + q_chunk, len(q_positions)))
        lowest, highest = int(lo[..., rows].min()), int(hi[..., rows].max())
        yield rows, [keys for keys, first, last in spans if first <= highest and last >= lowest]
