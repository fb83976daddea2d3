"""The cut ring: a rank's output depends on its own shard alone, and equals attention with a document per shard."""

import pytest
import torch

from ringspan import Layout, Mask, attention
from ringspan.trainer.evaluation.cut_ring import CutAttention

LENGTH, RANKS = 96, 3


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("documents", [False, True])
def test_each_shard_is_attention_with_a_document_per_shard(window: int | None, documents: bool) -> None:
    layout = Layout("contiguous", length=LENGTH, ranks=RANKS)
    ids = torch.tensor([0] * 40 + [1] * 30 + [2] * 26) if documents else None
    q, k, v = torch.randn(3, 2, LENGTH, 4, 16, dtype=torch.float64)
    shards = torch.arange(LENGTH) // layout.local_length
    joint = shards if ids is None else torch.unique_consecutive(shards * 10 + ids, return_inverse=True)[1]
    whole = attention(q, k, v, mask=Mask(causal=True, window=window, documents=joint))
    for rank in range(RANKS):
        own = [layout.shard(x, dim=1, rank=rank) for x in (q, k, v)]
        out = CutAttention(layout, rank)(*own, mask=Mask(causal=True, window=window, documents=ids))
        torch.testing.assert_close(out, layout.shard(whole, dim=1, rank=rank), rtol=1e-12, atol=1e-12)


def test_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout=zigzag: .*use contiguous"):
        CutAttention(Layout("zigzag", length=64, ranks=2), 0)
