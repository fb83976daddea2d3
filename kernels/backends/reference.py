"""Attention written out: the definition that every other backend is tested against.

    s = cap · tanh(q kᵀ · scale / cap)        only where the mask lets p see j; softcap 0 leaves out the tanh
    lse = log Σ_j exp(s_j)                    over all keys of all blocks, and the sink
    out = Σ_j exp(s_j - lse) · keep_j / (1 - rate) · v_j

One block of keys continues what the blocks before left, the carry (out, lse): with w = exp(lse_before - lse) the sum above
is `w · out_before` plus this block's terms. That one line is online softmax, FlashAttention's accumulator, a step of the
ring and the attention sink (a carry of out 0 and lse = sink).

The backward never needs the other blocks: p = exp(s - lse) with the final lse, and δ = Σ dout · out - dlse (over columns), give
ds = p (dp - δ). All products are in fp32, fp64 for fp64 inputs. Memory is O(S · Sk): use `chunked` for anything long.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.segments import Segment, num_rows, positions
from ringspan.kernels.tensors import accumulation_dtype

INF = float("inf")


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
    """The two formulas for one tile of queries and keys. Shapes: i queries, j keys, k key heads, g query heads of each."""

    def __init__(self, block: Block, q_at: Sequence[Segment], k_at: Sequence[Segment]) -> None:
        """The block's rules for rows that stand here; its tensors are left to the caller, who may cut them."""
        self.q_positions, self.k_at, self.head_start = positions(q_at, block.q.device), k_at, block.head_start
        visible = block.mask.visible(self.q_positions, positions(k_at, block.q.device))
        self.visible = visible[:, None, None]  # (B or 1, 1, 1, i, j)
        self.scale, self.softcap, self.dropout, self.seed = block.scale, block.softcap, block.dropout, block.seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, carry_out: Tensor | None, carry_lse: Tensor) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 0:  # no keys: the carry as it is
            out = carry_lse.new_zeros((*q.shape[:3], v.shape[-1])) if carry_out is None else carry_out
            return out, carry_lse
        s, _ = self._scores(q, k)
        before = self._group(carry_lse, k)
        m = torch.maximum(s.amax(-1), before)
        m = torch.where(m == -INF, 0, m)  # a row that has seen nothing: exp(-inf - 0) is 0, not NaN
        p = torch.exp(s - m[..., None])
        w = torch.exp(before - m)
        total = w + p.sum(-1)
        acc = torch.einsum("bkgij,bjkd->bikgd", self._drop(p), self._seen_keys(v, s.dtype))
        if carry_out is not None:
            acc = acc + w.permute(0, 3, 1, 2)[..., None] * carry_out.unflatten(2, acc.shape[2:4])
        out = acc / torch.where(total == 0, 1, total).permute(0, 3, 1, 2)[..., None]
        return out.flatten(2, 3), (m + torch.log(total)).flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, slope = self._scores(q, k)
        lse = self._group(torch.where(lse == -INF, 0, lse), k)  # rows that saw nothing: p = exp(-inf) = 0
        p = torch.exp(s - lse[..., None])
        dout = self._seen_queries(dout, s.dtype).unflatten(2, p.shape[1:3])
        dv = torch.einsum("bkgij,bikgd->bjkd", self._drop(p), dout)
        dp = self._drop(torch.einsum("bikgd,bjkd->bkgij", dout, self._seen_keys(v, s.dtype)))
        ds = torch.where(self.visible, p * (dp - self._group(delta, k)[..., None]), 0)
        ds = (ds if slope is None else ds * slope) * self.scale
        dq = torch.einsum("bkgij,bjkd->bikgd", ds, self._seen_keys(k, s.dtype))
        dk = torch.einsum("bkgij,bikgd->bjkd", ds, self._seen_queries(q, s.dtype).unflatten(2, p.shape[1:3]))
        return dq.flatten(2, 3), dk, dv

    def _scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Masked scores (b, k, g, i, j), and the softcap's derivative there."""
        acc = accumulation_dtype(q.dtype)
        grouped = q.to(acc).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
        s = torch.einsum("bikgd,bjkd->bkgij", grouped, k.to(acc)) * self.scale
        slope = None
        if self.softcap:
            t = torch.tanh(s / self.softcap)
            s, slope = self.softcap * t, 1 - t * t
            slope = torch.where(self.visible, slope, 0)
        return s.masked_fill(~self.visible, -INF), slope

    def _drop(self, p: Tensor) -> Tensor:
        """Dropout on weights (b, k, g, i, j); also its own gradient."""
        if not self.dropout or p.numel() == 0:
            return p
        heads = range(self.head_start, self.head_start + p.shape[1] * p.shape[2])
        keep = keep_mask(self.seed, self.dropout, p.shape[0], heads, self.q_positions, self.k_at)
        return torch.where(keep.unflatten(1, p.shape[1:3]), p, 0) / (1 - self.dropout)

    def _seen_keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values that no query here sees become 0: 0 · NaN from uninitialised padding would be NaN."""
        return torch.where(self.visible.any(-2)[:, 0, 0, :, None, None], x.to(dtype), 0)

    def _seen_queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(self.visible.any(-1)[:, 0, 0, :, None, None], x.to(dtype), 0)

    @staticmethod
    def _group(stats: Tensor, k: Tensor) -> Tensor:
        """(b, h, i) → (b, k, g, i)"""
        return stats.unflatten(1, (k.shape[2], stats.shape[1] // k.shape[2]))
