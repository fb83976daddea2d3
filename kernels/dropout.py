"""Dropout as a function of coordinates, in PyTorch and in Triton, from Philox4x32-10 (Salmon et al. 2011).

The attention weight of query position p, key position j, query head h and batch index b is kept if and only if

    word[j mod 4] of Philox(key = (seed's low 32 bits, seed's high 32 bits), counter = (j // 4, p, h, b)) >= round(rate · 2³²)

Positions and heads are global. The pattern therefore does not depend on tiles, backend, order of blocks, number of ranks or
recomputation.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringspan.kernels.segments import Segment, positions

WORD = 0xFFFFFFFF


def threshold(rate: float) -> int:
    """Return the smallest 32-bit word that keeps a weight at this dropout rate."""
    return round(rate * 2**32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox's four 32-bit words as int64 tensors; the four counter words and two key words broadcast."""
    c0, c1, c2, c3 = (c & WORD for c in counter)
    k0, k1 = (k & WORD for k in key)
    for _ in range(10):
        # The product wraps in signed int64, but its 64 bits are exact, so the masks extract both halves.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & WORD) ^ c1 ^ k0, p1 & WORD, ((p0 >> 32) & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, rate: float, batch: int, heads: range, q_positions: Tensor, k_at: Sequence[Segment]) -> Tensor:
    """Return which weights dropout keeps: bool (batch, heads, queries, keys).

    Args:
        seed: int64, () or (batch,). With (batch,) the batch word of the counter is 0.
        rate: Probability that a weight is dropped.
        batch: Batch size.
        heads: Global numbers of the query heads.
        q_positions: (queries,) int64.
        k_at: Segments of the keys.
    """
    device = q_positions.device
    quads, word_index = _quads(k_at, device)
    axis = lambda values, dim: values.view([-1 if d == dim else 1 for d in range(4)])  # noqa: E731
    seed = axis(seed.reshape(-1), 0)
    b = torch.arange(batch, device=device) if seed.shape[0] == 1 else torch.zeros(1, dtype=torch.int64, device=device)
    h = torch.arange(heads.start, heads.stop, device=device)
    words = torch.stack(philox((axis(quads, 3), axis(q_positions, 2), axis(h, 1), axis(b, 0)), (seed, seed >> 32)), -1)
    return words.flatten(-2).expand(batch, -1, -1, -1)[..., word_index] >= threshold(rate)


def _quads(k_at: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return j // 4 of each Philox call for these keys, and each key's index among the words of all calls.

    Neighbouring keys share a call. The segments tell which keys are neighbours; the tensor's values would need a host sync.
    """
    quads, word_index, num_quads = [], [], 0
    for start, step, count in k_at:
        first, last = start // 4, (start + (count - 1) * step) // 4
        keys = positions([(start, step, count)], device)
        if step < 4:
            quads.append(torch.arange(first, last + 1, device=device))
            word_index.append(keys + 4 * (num_quads - first))
        else:
            quads.append(keys // 4)
            word_index.append(4 * torch.arange(num_quads, num_quads + count, device=device) + keys % 4)
        num_quads += len(quads[-1])
    return torch.cat(quads), torch.cat(word_index)


@triton.jit
def keep_tile(seed, limit, batch, head, p_q, p_k, QUADS: tl.constexpr):
    """Compute the pattern of one tile; p_q and p_k broadcast to (rows, columns), with keys along columns if QUADS.

    QUADS asserts that the tile's keys are consecutive and start at a multiple of 4, so one Philox call serves four keys.
    Otherwise each weight takes one call.
    """
    # Compare in 64 bits: limit may be 2**32, and Triton turns a limit of 1 into a constant.
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
