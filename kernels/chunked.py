"""Exact attention in plain PyTorch with O(S) memory (Rabe and Staats 2021): the path for CPUs and for fp64.

A chunk of queries walks over the chunks of keys that it can see and carries its softmax from one to the next; the backward
recomputes each tile's weights from lse. The formulas are the reference's own, a tile at a time, so there is nothing here
but the walk. Work is proportional to the tiles that the mask leaves, and every sum has a fixed order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .mask import Mask
from .reference import INF, Carry, Tile, new_outputs
from .segments import Segment, num_rows, positions

Q_CHUNK, K_CHUNK = 256, 512  # rows per chunk: a tile of scores that stays near the cores; a GPU wants them larger
GPU_FACTOR = 4


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
    carry_out, carry_lse = carry or (None, lse.new_full((1, 1, 1), -INF).expand_as(lse))
    q_positions, k_positions = positions(q_at, q.device), positions(k_at, q.device)
    for rows, key_chunks in _walk(mask, q_at, k_at, len(q), GPU_FACTOR if q.is_cuda else 1):
        acc = lse.new_zeros((len(q), rows.stop - rows.start, *out.shape[2:])) if carry_out is None else carry_out[:, rows]
        stats = carry_lse[:, :, rows]
        for keys in key_chunks:
            tile = Tile(mask, q_positions[rows], k_positions[keys], head_start, scale, softcap, dropout, seed)
            acc, stats = tile.forward(q[:, rows], k[:, keys], v[:, keys], acc, stats)
        out[:, rows], lse[:, :, rows] = acc, stats
    n = num_rows(q_at)
    out[:, n:], lse[:, :, n:] = 0, -INF
    return out, lse


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
    # Many tiles add to one row of dk, so the sums must run in the accumulation dtype even if the result is bf16.
    totals = [g.to(lse.dtype) if accumulate else torch.zeros_like(g, dtype=lse.dtype) for g in (dq, dk, dv)]
    q_positions, k_positions = positions(q_at, q.device), positions(k_at, q.device)
    for rows, key_chunks in _walk(mask, q_at, k_at, len(q), GPU_FACTOR if q.is_cuda else 1):
        for keys in key_chunks:
            tile = Tile(mask, q_positions[rows], k_positions[keys], head_start, scale, softcap, dropout, seed)
            parts = tile.backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], delta[:, :, rows])
            for total, part, at in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, at] += part
    for given, total in zip((dq, dk, dv), totals, strict=True):
        if total is not given:
            given.copy_(total)


def _walk(mask: Mask, q_at: list[Segment], k_at: list[Segment], batch: int, factor: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each chunk of query rows with the chunks of key rows that its first and last row can reach.

    The bounds are read on the CPU, from the coarse mask, so that a GPU is never waited for.
    """
    if batch == 0:
        return  # nothing to bound, nothing to do
    q_chunk, k_chunk = Q_CHUNK * factor, K_CHUNK * factor
    q_positions, k_positions = positions(q_at), positions(k_at)
    lo, hi = mask.coarse().interval(q_positions)
    key_chunks = [slice(at, min(at + k_chunk, len(k_positions))) for at in range(0, len(k_positions), k_chunk)]
    spans = [(keys, *(int(p) for p in torch.aminmax(k_positions[keys]))) for keys in key_chunks]
    for at in range(0, len(q_positions), q_chunk):
        rows = slice(at, min(at + q_chunk, len(q_positions)))
        lowest, highest = int(lo[..., rows].min()), int(hi[..., rows].max())
        yield rows, [keys for keys, first, last in spans if first <= highest and last >= lowest]
