"""Dropout as a function of coordinates: Philox4x32-10 (Salmon et al. 2011), the same in PyTorch and in Triton.

The weight of query position p, key position j, head h, batch b is kept iff word j mod 4 of
Philox(key = the seed's low and high 32 bits, counter = (j // 4, p, h, b)) is >= round(rate * 2**32). So the pattern does not
depend on tiles, backend, the order of blocks, ranks, or recomputation. Positions and heads are global.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.segments import Segment, positions

WORD = 0xFFFFFFFF


def threshold(rate: float) -> int:
    return round(rate * 2**32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, held in int64 tensors, from four counter words and two key words that broadcast."""
    c0, c1, c2, c3 = (c & WORD for c in counter)
    k0, k1 = (k & WORD for k in key)
    for _ in range(10):
        # the product wraps as a signed number, but its 64 bits are right, so the mask gives both halves
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, rate: float, batch: int, heads: range, q_positions: Tensor, k_at: Sequence[Segment]) -> Tensor:
    """bool (batch, heads, n, m): which weights dropout keeps. seed is int64, () or (batch,)."""
    device = q_positions.device
    quads, where = _quads(k_at, device)
    axis = lambda values, dim: values.view([-1 if d == dim else 1 for d in range(4)])  # noqa: E731
    seed = axis(seed.reshape(-1), 0)
    b = torch.arange(batch, device=device) if seed.shape[0] == 1 else torch.zeros(1, dtype=torch.int64, device=device)
    h = torch.arange(heads.start, heads.stop, device=device)
    words = torch.stack(philox((axis(quads, 3), axis(q_positions, 2), axis(h, 1), axis(b, 0)), (seed, seed >> 32)), -1)
    return words.flatten(-2).expand(batch, -1, -1, -1)[..., where] >= threshold(rate)


def _quads(k_at: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """j // 4 of the Philox calls that serve these keys, and for each key the number of its word among those of all calls.

    Neighbours share one, as far as the segments tell: positions on a GPU would have to be waited for.
    """
    quads, where, num_quads = [], [], 0
    for start, step, count in k_at:
        first, last = start // 4, (start + (count - 1) * step) // 4
        keys = positions([(start, step, count)], device)
        if step < 4:
            quads.append(torch.arange(first, last + 1, device=device))
            where.append(keys + 4 * (num_quads - first))
        else:
            quads.append(keys // 4)
            where.append(4 * torch.arange(num_quads, num_quads + count, device=device) + keys % 4)
        num_quads += len(quads[-1])
    return torch.cat(quads), torch.cat(where)


@triton.jit
def keep_tile(seed, limit, batch, head, p_q, p_k, QUADS: tl.constexpr):
    """The same for one tile: p_q and p_k broadcast to (rows, columns), the keys along columns if QUADS.

    QUADS promises that the tile's keys are consecutive and start at a multiple of 4: then one Philox call serves four of
    them. Otherwise every weight pays for its own call.
    """
    # limit may be 2**32, and a limit of 1 is a constant to Triton: compare in 64 bits
    if QUADS:
        ROWS: tl.constexpr = p_q.shape[0]
        COLUMNS: tl.constexpr = p_k.shape[1]
        quad = tl.min(p_k, 1)[:, None] // 4 + tl.arange(0, COLUMNS // 4)[None, :]
        w0, w1, w2, w3 = _words(seed, batch, head, p_q, quad)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (rows, quads, 2, 2), in the order 0 1 2 3
        return tl.reshape(words, (ROWS, COLUMNS)).to(tl.int64) >= limit
    else:
        w0, w1, w2, w3 = _words(seed, batch, head, p_q, p_k // 4)
        word = p_k % 4
        return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)).to(tl.int64) >= limit


@triton.jit
def _words(seed, batch, head, p_q, quad):
    zero = p_q * 0 + quad * 0
    return tl.philox(seed, quad + zero, p_q + zero, head + zero, batch + zero)
