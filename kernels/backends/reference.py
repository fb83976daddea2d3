"""Attention written out: the definition that every other backend is tested against.

    s   = cap · tanh(q kᵀ · scale / cap)      where the mask lets p attend to j, else −inf; softcap 0 omits the tanh
    lse = log Σ_j exp(s_j)                    over all keys of all blocks, and the sink
    out = Σ_j exp(s_j − lse) · keep_j / (1 − rate) · v_j

A block of keys continues the carry (out, lse) of earlier blocks. With w = exp(carry lse − lse), out is `w · carry out` plus
the terms of this block. This line is the online softmax, FlashAttention's accumulator and one step of the ring. A sink is
the carry with out 0 and lse = sink.

The backward needs no other blocks: p = exp(s − lse) with the final lse, and δ = Σ dout · out − dlse (over columns) give
ds = p (dp − δ). All matmuls are in fp32, or fp64 for fp64 inputs. Memory is O(S · Sk); `chunked` needs O(S).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.segments import Segment, num_rows, positions
from ringspan.kernels.tensors import INF, accumulation_dtype


def block_forward(block: Block, carry: Carry | None, out: Tensor, lse: Tensor) -> None:
    tile = Tile(block, block.q_at, block.k_at)
    n, m = num_rows(block.q_at), num_rows(block.k_at)
    carry_out, carry_lse = carry or (None, lse.new_full((1, 1, 1), -INF).expand_as(lse))
    carry_out = None if carry_out is None else carry_out[:, :n]
    acc, stats = tile.forward(block.q[:, :n], block.k[:, :m], block.v[:, :m], carry_out, carry_lse[:, :, :n])
    out[:, :n], lse[:, :, :n] = acc, stats
    out[:, n:], lse[:, :, n:] = 0, -INF


def block_backward(block: Block, gradients: Gradients, accumulate: bool | str) -> None:
    tile = Tile(block, block.q_at, block.k_at)
    n, m = num_rows(block.q_at), num_rows(block.k_at)
    dout, lse, delta, *totals = gradients
    parts = tile.backward(dout[:, :n], block.q[:, :n], block.k[:, :m], block.v[:, :m], lse[:, :, :n], delta[:, :, :n])
    for total, part in zip(totals, parts, strict=True):
        if not accumulate:
            total.zero_()
        total[:, : part.shape[1]] += part


class Tile:
    """Forward and backward of one tile. Axes in einsum: i queries, j keys, k key heads, g query heads per key head."""

    def __init__(self, block: Block, q_at: Sequence[Segment], k_at: Sequence[Segment], masked: bool = True) -> None:
        """Take the block's rules for rows at these positions; `forward` and `backward` take slices of its tensors.

        `masked=False` states that every query attends to every key.
        """
        self.q_positions, self.k_at, self.head_start = positions(q_at, block.q.device), k_at, block.head_start
        self.visible: Tensor | None = None  # (B or 1, 1, 1, i, j)
        if masked:
            self.visible = block.mask.visible(self.q_positions, positions(k_at, block.q.device))[:, None, None]
        self.scale, self.softcap, self.dropout, self.seed = block.scale, block.softcap, block.dropout, block.seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, carry_out: Tensor | None, carry_lse: Tensor) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 0:  # no keys: return the carry
            out = carry_lse.new_zeros((*q.shape[:3], v.shape[-1])) if carry_out is None else carry_out
            return out, carry_lse
        s, _ = self._scores(self._scaled(q), k)
        carry_lse = self._group(carry_lse, k)
        row_max = torch.maximum(s.amax(-1), carry_lse)
        row_max = torch.where(row_max == -INF, 0, row_max)  # without visible keys: exp(-inf - 0) is 0, not NaN
        p = s.sub_(row_max[..., None]).exp_()
        w = torch.exp(carry_lse - row_max)
        total = w + p.sum(-1)
        acc = torch.einsum("bkgij,bjkd->bikgd", self._drop(p), self._visible_keys(v, s.dtype))
        if carry_out is not None:
            acc = acc + w.permute(0, 3, 1, 2)[..., None] * carry_out.unflatten(2, acc.shape[2:4])
        out = acc / torch.where(total == 0, 1, total).permute(0, 3, 1, 2)[..., None]
        return out.flatten(2, 3), (row_max + torch.log(total)).flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self._scaled(q)
        s, slope = self._scores(q, k)
        lse = self._group(torch.where(lse == -INF, 0, lse), k)  # rows without visible keys: p = exp(-inf) = 0
        p = s.sub_(lse[..., None]).exp_()
        dout = self._visible_queries(dout, s.dtype).unflatten(2, p.shape[1:3])
        dv = torch.einsum("bkgij,bikgd->bjkd", self._drop(p), dout)
        dp = self._drop(torch.einsum("bikgd,bjkd->bkgij", dout, self._visible_keys(v, s.dtype)))
        ds = dp.sub_(self._group(delta, k)[..., None]).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        if self.visible is not None:
            ds = torch.where(self.visible, ds, 0)  # dp of other pairs may be NaN or infinite
        dq = torch.einsum("bkgij,bjkd->bikgd", ds, self._visible_keys(k, s.dtype)) * self.scale
        dk = torch.einsum("bkgij,bikgd->bjkd", ds, self._visible_queries(q, s.dtype).unflatten(2, p.shape[1:3]))
        return dq.flatten(2, 3), dk, dv

    def _scaled(self, q: Tensor) -> Tensor:
        return q.to(accumulation_dtype(q.dtype)) * self.scale

    def _scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return masked scores (b, k, g, i, j) of scaled queries and their derivative by the uncapped scores (None: 1)."""
        grouped = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
        s = torch.einsum("bikgd,bjkd->bkgij", grouped, k.to(q.dtype))
        slope = None
        if self.softcap:
            t = s.div_(self.softcap).tanh_()
            s, slope = self.softcap * t, 1 - t * t
        return s if self.visible is None else torch.where(self.visible, s, -INF), slope

    def _drop(self, p: Tensor) -> Tensor:
        """Apply dropout to weights (b, k, g, i, j). It is linear, so the same function computes its gradient."""
        if not self.dropout or p.numel() == 0:
            return p
        assert self.seed is not None
        heads = range(self.head_start, self.head_start + p.shape[1] * p.shape[2])
        keep = keep_mask(self.seed, self.dropout, p.shape[0], heads, self.q_positions, self.k_at)
        return torch.where(keep.unflatten(1, p.shape[1:3]), p, 0) / (1 - self.dropout)

    def _visible_keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Set keys or values that no query attends to to 0, because 0 · NaN of uninitialised padding is NaN."""
        x = x.to(dtype)
        return x if self.visible is None else torch.where(self.visible.any(-2)[:, 0, 0, :, None, None], x, 0)

    def _visible_queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Set rows of queries or dout without visible keys to 0."""
        x = x.to(dtype)
        return x if self.visible is None else torch.where(self.visible.any(-1)[:, 0, 0, :, None, None], x, 0)

    @staticmethod
    def _group(stats: Tensor, k: Tensor) -> Tensor:
        """(b, h, i) → (b, k, g, i)"""
        return stats.unflatten(1, (k.shape[2], stats.shape[1] // k.shape[2]))
