"""The shapes that benchmarks measure, and their masks."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringspan.kernels.mask import Mask

# Above this many bytes of scores a kernel that writes all of them is left out. On a GPU it may be an eighth of the memory, as a
# backward holds six such matrices.
DENSE_LIMIT = 2**30


@dataclass(frozen=True)
class Shape:
    """One attention problem; hashable, so that whatever a rival prepares for it is prepared once."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # as in Mask: counts the query itself
    documents: tuple[int, ...] | None = None  # lengths of the documents packed into each sequence

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.documents and sum(self.documents) != self.length:
            raise ValueError(f"{self.name}: documents hold {sum(self.documents)} tokens, length={self.length}: make them equal")

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head of one sequence. Plain causal counts as S²/2, as everyone counts it."""
        if self.causal and not self.window and not self.documents:
            return self.length**2 / 2
        total = 0
        for n in self.documents or (self.length,):
            w = min(self.window or n, n)
            back = w * (w + 1) // 2 + (n - w) * w  # keys at or before each query
            total += back if self.causal else 2 * back - n
        return total

    def flops(self) -> float:
        """Of the forward: two products. The backward has five, 2.5 times as much (what it recomputes is counted)."""
        return 4 * self.batch * self.heads * self.pairs() * self.head_dim

    def tiles(self, size: int = 128) -> int:
        """Tiles of size × size, from the first row and key on, that hold a visible pair; over all heads and sequences."""
        lo, hi = mask_of(self).interval(torch.arange(self.length), self.length)
        first = torch.stack([rows.min() // size for rows in lo.split(size)])
        last = torch.stack([rows.max() // size for rows in hi.split(size)])
        return self.batch * self.heads * int((last - first + 1).sum())

    def document_ids(self, device: torch.device) -> Tensor | None:
        """(S,) or None."""
        if not self.documents:
            return None
        return torch.repeat_interleave(torch.arange(len(self.documents)), torch.tensor(self.documents)).to(device)

    def sees(self, q_at: Tensor, k_at: Tensor, ids: Tensor | None) -> Tensor:
        """Whether queries at these positions see these keys. Written out, on purpose not through `Mask`: the truth that
        `Mask` is judged by, and FlexAttention's mask function."""
        seen = (q_at >= k_at) if self.causal else (q_at == q_at) & (k_at == k_at)
        if self.window:
            seen = seen & (q_at - k_at < self.window) & (k_at - q_at < self.window)
        return seen if ids is None else seen & (ids[q_at] == ids[k_at])

    def visible(self, rows: Tensor) -> Tensor:
        """bool (len(rows), S)."""
        keys = torch.arange(self.length, device=rows.device)
        return self.sees(rows[:, None], keys[None], self.document_ids(rows.device))

    def check_dense(self, device: torch.device) -> None:
        """For kernels that hold all scores at once."""
        size = 4 * self.batch * self.heads * self.length**2
        limit = torch.cuda.get_device_properties(device).total_memory // 8 if device.type == "cuda" else DENSE_LIMIT
        if size > limit:
            raise ValueError(f"would hold {size / 2**30:.0f} GiB of scores; here it is timed up to {limit / 2**30:.0f} GiB")


K = 2**10


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("d128-causal-16k", 1, 16 * K, 16, 16, 128),
        Shape("d128-full-16k", 1, 16 * K, 16, 16, 128, causal=False),
        Shape("d64-causal-16k", 1, 16 * K, 32, 32, 64),
        Shape("d128-causal-2k", 8, 2 * K, 16, 16, 128),
        Shape("d128-causal-512", 32, K // 2, 16, 16, 128),
        Shape("d128-causal-4k", 4, 4 * K, 16, 16, 128),
        Shape("d128-causal-8k", 2, 8 * K, 16, 16, 128),
        Shape("d256-causal-16k", 1, 16 * K, 8, 8, 256),
        Shape("d128-gqa4-causal-32k", 1, 32 * K, 16, 4, 128),
        Shape("d64-gqa4-causal-32k", 1, 32 * K, 32, 8, 64),
        Shape("d64-gqa4-causal-128k", 1, 128 * K, 32, 8, 64),
        Shape("d128-window4k-32k", 1, 32 * K, 16, 16, 128, window=4 * K),
        # Lengths as packing gives them: no multiples of any tile.
        Shape("d128-docs4k-32k", 1, 32 * K, 16, 16, 128, documents=(7001, 913, 4520, 2847, 9216, 1203, 3571, 3497)),
        Shape("d64-causal-1k", 1, K, 8, 8, 64),
        Shape("d64-gqa4-window256-1k", 1, K, 8, 2, 64, window=256),
        Shape("tiny", 2, 96, 4, 2, 32),
    )
}


DEFAULT_SHAPES = {
    "cuda": ["d128-causal-16k", "d128-full-16k", "d64-causal-16k", "d128-causal-2k"],
    "cpu": ["d64-causal-1k", "d64-gqa4-window256-1k"],
}


@lru_cache(maxsize=1)
def mask_of(shape: Shape) -> Mask:
    if shape.documents:
        return Mask.from_lengths(shape.documents, shape.causal, shape.window)
    return Mask(shape.causal, shape.window)
