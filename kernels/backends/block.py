"""The interface of backends: `Block`, the inputs of one block of attention, and `Gradients`, those of its backward.

`blocks.py` validates a call and builds the Block. A backend provides:

    block_forward(block, carry, out, lse)              continues the carry's softmax, writes out and lse
    block_backward(block, gradients, accumulate)       True: adds to dq, dk, dv; False: overwrites; "dq": adds to dq only
    ADDS_DQ_ALONE          the backward takes "dq"; for other backends the caller zeroes dk and dv and passes True
    ADDS_DQ_ATOMICALLY     concurrent kernels may add to one dq, unless the backward is deterministic

Padding rows get out 0, lse −inf and zero gradients. A kernel that takes fewer segments than a block has runs on parts of it.
Both functions may return `replay(…)`, a shorter path for tensors with the same signatures: the caller then skips building a
Block. A backend returns none for masks with padding or for dropout. A backward replay requires ADDS_DQ_ALONE, because the
caller does not zero dk and dv.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import SegmentRows, Segments, ascending_ranges

Carry = tuple[Tensor | None, Tensor]  # (out, lse) of earlier blocks; out may be None for zeros


@dataclass(slots=True)
class Block:
    """Some rows of queries, some rows of keys and values, their global positions, and the rules of the softmax."""

    q: Tensor  # (B, S, Hq, D)
    k: Tensor  # (B, Sk, Hkv, D)
    v: Tensor  # (B, Sk, Hkv, Dv)
    mask: Mask
    q_at: Segments
    k_at: Segments
    head_start: int = 0  # global number of q's first head, for dropout
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    dropout: float = 0.0
    seed: Tensor | None = None  # on q's device; None without dropout
    deterministic: bool = False  # gradients must be bit-equal in every run

    @property
    def is_single_range(self) -> bool:
        """Whether one kernel takes the whole block: no padding rows, and positions that ascend with the row."""
        return all(
            len(ranges) == 1 and ranges[0][0].stop == x.shape[1]
            for ranges, x in ((ascending_ranges(self.q_at), self.q), (ascending_ranges(self.k_at), self.k))
        )

    def part(self, queries: SegmentRows, keys: SegmentRows) -> "Block":
        """Return the block of these query rows and key rows."""
        (rows, q_at), (columns, k_at) = queries, keys
        return replace(self, q=self.q[:, rows], k=self.k[:, columns], v=self.v[:, columns], q_at=q_at, k_at=k_at)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> "Block":
        """Return the same block with these tensors: copies in a memory layout that a kernel can read."""
        return self if q is self.q and k is self.k and v is self.v else replace(self, q=q, k=k, v=v)


class Gradients(NamedTuple):
    """Inputs of a block's backward in addition to the Block, and the gradients that it writes."""

    dout: Tensor  # (B, S, Hq, Dv)
    lse: Tensor  # (B, Hq, S), final: of all blocks
    delta: Tensor  # (B, Hq, S), from output_delta
    dq: Tensor  # (B, S, Hq, D)
    dk: Tensor  # (B, Sk, Hkv, D)
    dv: Tensor  # (B, Sk, Hkv, Dv)

    def part(self, rows: slice, keys: slice) -> "Gradients":
        """Return views of these query rows and key rows."""
        dout, lse, delta, dq, dk, dv = self
        return Gradients(dout[:, rows], lse[:, :, rows], delta[:, :, rows], dq[:, rows], dk[:, keys], dv[:, keys])
