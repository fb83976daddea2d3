"""Shapes that the benchmarks measure, and their masks.

SHAPES names them by head dim, heads, mask and length: d128-gqa4-causal-32k has head dim 128, 4 query heads per KV head and
32,768 tokens; d192-128 has head dim 128 in v (DeepSeek's MLA). Large shapes have heads × head_dim of about 2048 and at least
16,384 tokens, so that their FLOPs are comparable.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringspan.kernels.mask import Mask

DENSE_LIMIT = 2**30  # bytes of scores up to which a CPU runs kernels that store the whole score matrix


@dataclass(frozen=True)
class Shape:
    """One attention problem. It is hashable, because baselines cache by shape what they prepare (block masks, offsets)."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # as in Mask: counts the query itself
    documents: tuple[int, ...] | None = None  # lengths of the documents packed into each sequence
    v_head_dim: int | None = None  # None: head_dim

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.documents and sum(self.documents) != self.length:
            raise ValueError(f"{self.name}: documents hold {sum(self.documents)} tokens, length={self.length}: make them equal")

    @property
    def v_width(self) -> int:
        """Return the head dim of v and out."""
        return self.v_head_dim or self.head_dim

    def pairs(self) -> float:
        """Return the visible (query, key) pairs of one head of one sequence; plain causal counts as S²/2, by convention."""
        if self.causal and not self.window and not self.documents:
            return self.length**2 / 2
        total = 0
        for n in self.documents or (self.length,):
            w = min(self.window or n, n)
            causal_pairs = w * (w + 1) // 2 + (n - w) * w
            total += causal_pairs if self.causal else 2 * causal_pairs - n
        return total

    def flops(self) -> float:
        """Return the FLOPs of the forward, two matmuls; the backward has five, with recomputed scores: 2.5 times as many.

        With another head dim of v this factor is a convention: the backward of 192 and 128 has 2.6 times as many.
        """
        return 2 * self.batch * self.heads * self.pairs() * (self.head_dim + self.v_width)

    def tiles(self, size: int = 128) -> int:
        """Count the size × size tiles that hold a visible pair, over all heads and sequences."""
        lo, hi = mask_of(self).interval(torch.arange(self.length), self.length)
        first = torch.stack([rows.min() // size for rows in lo.split(size)])
        last = torch.stack([rows.max() // size for rows in hi.split(size)])
        return self.batch * self.heads * int((last - first + 1).sum())

    def document_ids(self, device: torch.device) -> Tensor | None:
        """Return the document of each token, (S,), or None without documents."""
        if not self.documents:
            return None
        return torch.repeat_interleave(torch.arange(len(self.documents)), torch.tensor(self.documents)).to(device)

    def is_visible(self, q_at: Tensor, k_at: Tensor, ids: Tensor | None) -> Tensor:
        """Return whether the queries at positions `q_at` attend to the keys at `k_at`.

        This is also FlexAttention's mask function. It does not use `Mask`, because tests check `Mask` against it.
        """
        visible = (q_at >= k_at) if self.causal else (q_at == q_at) & (k_at == k_at)
        if self.window:
            visible = visible & (q_at - k_at < self.window) & (k_at - q_at < self.window)
        return visible if ids is None else visible & (ids[q_at] == ids[k_at])

    def visible(self, rows: Tensor) -> Tensor:
        """Return the attention mask of some query rows: bool (len(rows), S)."""
        keys = torch.arange(self.length, device=rows.device)
        return self.is_visible(rows[:, None], keys[None], self.document_ids(rows.device))

    def check_dense(self, device: torch.device) -> None:
        """Raise ValueError if a kernel that stores all scores would need too much memory on this device.

        A backward holds six such matrices, so the limit on a GPU is an eighth of its memory.
        """
        size = 4 * self.batch * self.heads * self.length**2
        limit = torch.cuda.get_device_properties(device).total_memory // 8 if device.type == "cuda" else DENSE_LIMIT
        if size > limit:
            raise ValueError(
                f"length={self.length}: the scores take {size / 2**30:.0f} GiB; "
                f"this device runs dense kernels up to {limit / 2**30:.0f} GiB of scores"
            )


K = 2**10


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("d128-causal-16k", 1, 16 * K, 16, 16, 128),
        Shape("d128-full-16k", 1, 16 * K, 16, 16, 128, causal=False),
        Shape("d64-causal-16k", 1, 16 * K, 32, 32, 64),
        Shape("d128-causal-2k", 8, 2 * K, 16, 16, 128),
        Shape("d128-causal-512", 32, K // 2, 16, 16, 128),
        Shape("d128-causal-1k", 16, K, 16, 16, 128),
        Shape("d128-causal-4k", 4, 4 * K, 16, 16, 128),
        Shape("d128-causal-8k", 2, 8 * K, 16, 16, 128),
        Shape("d256-causal-16k", 1, 16 * K, 8, 8, 256),
        Shape("d80-causal-16k", 1, 16 * K, 26, 26, 80),
        Shape("d96-causal-16k", 1, 16 * K, 22, 22, 96),
        Shape("d112-causal-16k", 1, 16 * K, 18, 18, 112),
        Shape("d160-causal-16k", 1, 16 * K, 12, 12, 160),
        Shape("d192-128-causal-8k", 2, 8 * K, 16, 16, 192, v_head_dim=128),
        Shape("d128-gqa4-causal-32k", 1, 32 * K, 16, 4, 128),
        Shape("d64-gqa4-causal-32k", 1, 32 * K, 32, 8, 64),
        Shape("d64-gqa4-causal-128k", 1, 128 * K, 32, 8, 64),
        Shape("d128-window4k-32k", 1, 32 * K, 16, 16, 128, window=4 * K),
        # Document lengths as packing makes them: not multiples of a tile size.
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


GROUPS = {  # names that --shapes takes for several shapes
    "head-dims": [f"d{width}-causal-16k" for width in (64, 80, 96, 112, 128, 160, 256)] + ["d192-128-causal-8k"],
    "short": [f"d128-causal-{length}" for length in ("512", "1k", "2k", "4k")],
}


@lru_cache(maxsize=1)
def mask_of(shape: Shape) -> Mask:
    """Return the shape's Mask; the last one is cached."""
    if shape.documents:
        return Mask.from_lengths(shape.documents, shape.causal, shape.window)
    return Mask(shape.causal, shape.window)
