"""A block: some queries, some keys and values, where they stand in the whole sequence, and the rules between them.

`blocks.py` makes one of what a caller gave, once that is checked, and every backend takes it:

    block_forward(block, carry, out, lse)              continues the carry's softmax, writes out and lse
    block_backward(block, gradients, accumulate)       adds to, or writes, gradients.dq, dk and dv

`accumulate` is True where all three add up and False where all three are written. A backend that also takes "dq", to add to dq
and write dk and dv, says so by ADDS_DQ_ALONE = True; for others dk and dv are made zeros before. ADDS_DQ_IN_MEMORY = True says
that, unless a backward is deterministic, kernels may add to one dq at the same time.

Both may return how the same is done again for other tensors that look alike, `again(…)`, where that takes less work: then a
caller who knows that it is the same need not make a block. Without padding in the mask, and without dropout; and with
ADDS_DQ_ALONE, for whoever calls it makes no zeros.

Rows behind the segments are padding: out 0, lse -inf and no gradients. A kernel that takes fewer segments than a block has
works on its parts, one run of queries and one of keys at a time.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import SegmentRows, Segments, ascending_runs

Carry = tuple[Tensor | None, Tensor]  # out and lse of the blocks before; out may be None for zeros


@dataclass(slots=True)
class Block:
    q: Tensor  # (B, S, Hq, D)
    k: Tensor  # (B, Sk, Hkv, D)
    v: Tensor  # (B, Sk, Hkv, Dv)
    mask: Mask
    q_at: Segments
    k_at: Segments
    head_start: int = 0  # of q's first head among all heads, for dropout
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    dropout: float = 0.0
    seed: Tensor | None = None  # where q is; None without dropout
    deterministic: bool = False  # gradients are to be bit-equal in every run

    @property
    def is_one_run(self) -> bool:
        """Whether a kernel takes it as it stands: no padding, and rows that ascend in position."""
        return all(
            len(runs) == 1 and runs[0][0].stop == x.shape[1]
            for runs, x in ((ascending_runs(self.q_at), self.q), (ascending_runs(self.k_at), self.k))
        )

    def part(self, queries: SegmentRows, keys: SegmentRows) -> "Block":
        (rows, q_at), (columns, k_at) = queries, keys
        return replace(self, q=self.q[:, rows], k=self.k[:, columns], v=self.v[:, columns], q_at=q_at, k_at=k_at)

    def read_from(self, q: Tensor, k: Tensor, v: Tensor) -> "Block":
        """The same block from these tensors, which are copies where a kernel cannot read it as it is."""
        return self if q is self.q and k is self.k and v is self.v else replace(self, q=q, k=k, v=v)


class Gradients(NamedTuple):
    """What the backward of a block reads beside it, and where it leaves its part."""

    dout: Tensor  # (B, S, Hq, Dv)
    lse: Tensor  # (B, Hq, S), final: of all blocks
    delta: Tensor  # (B, Hq, S), from output_delta
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def part(self, rows: slice, keys: slice) -> "Gradients":
        dout, lse, delta, dq, dk, dv = self
        return Gradients(dout[:, rows], lse[:, :, rows], delta[:, :, rows], dq[:, rows], dk[:, keys], dv[:, keys])
