"""Attention of a model under a layout, and the control in which the ring is cut: each rank attends to its own shard only.

A model that is trained and evaluated with the cut cannot use what another rank holds. Recall beyond a shard is then at chance,
unless information reaches a rank by another way than the ring.
"""

from typing import Any

from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.parallel.buffered_attention import BufferedAttention
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh


class CutAttention:
    """Attention of one rank's contiguous shard to itself.

    Args:
        layout: a contiguous Layout of the sequence.
        rank: this rank's number in it.
        backend, deterministic: as for `attention`.
    Raises:
        ValueError: the layout is not contiguous.
    """

    def __init__(self, layout: Layout, rank: int, backend: str = "auto", deterministic: bool = False) -> None:
        if layout.kind != "contiguous":
            raise ValueError(f"layout={layout.kind}: a cut ring has one range of tokens per rank; use contiguous")
        self.layout, self.rank = layout, rank
        self.options: dict[str, Any] = dict(backend=backend, deterministic=deterministic)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        """Compute attention of q (B, n, H, D) to k and v of the same rows, under the part of the mask that they have."""
        documents = mask.documents
        if documents is not None:
            inside = self.layout.positions(self.rank).clamp(max=documents.shape[-1] - 1)
            documents = documents[..., inside.to(documents.device)]
        return attention(q, k, v, mask=Mask(causal=True, window=mask.window, documents=documents), **self.options, **options)


def model_attention(
    layout: Layout, mesh: Mesh, backend: str = "auto", deterministic: bool = False, cut: bool = False
) -> BufferedAttention | CutAttention:
    """Return a model's attention under a layout, or with `cut` the control."""
    if cut:
        return CutAttention(layout, mesh.context_rank, backend, deterministic)
    return BufferedAttention(layout, mesh, backend, deterministic)
