"""Layouts of lse and delta, which the portable backward loads in vectors."""

import pytest
import torch
from torch import Tensor

from ringspan import Mask
from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.triton.backward import backward_launches
from ringspan.kernels.tensors import aligned_stats

STATS = torch.arange(2 * 3 * 24, dtype=torch.float32).view(2, 3, 24)


@pytest.mark.parametrize(
    ("stats", "is_copied"),
    [
        (STATS, False),
        (STATS[:, 1:], False),
        (STATS[..., 8:], False),
        (STATS[..., 8:17], False),
        (STATS[..., 1:], True),
        (STATS[..., :23].contiguous(), True),
        (STATS.mT.contiguous().mT, True),
        (STATS[..., ::2], True),
    ],
    ids=["whole", "heads", "rows", "odd-rows", "odd-start", "odd-length", "transposed", "steps"],
)
def test_heads_of_stats_begin_at_multiples_of_16_bytes(stats: Tensor, is_copied: bool) -> None:
    result = aligned_stats(stats)
    assert (result is not stats) == is_copied and result.equal(stats)
    assert result.stride(2) == 1 and not any(result[b, h].data_ptr() % 16 for b in range(2) for h in range(stats.shape[1]))


@pytest.mark.parametrize("num_rows", [64, 61])
def test_kernels_of_the_backward_get_aligned_stats(num_rows: int) -> None:
    q, k, v, dout = (torch.empty(1, num_rows, 2, 16) for _ in range(4))
    lse, delta = torch.empty(2, 1, 2, num_rows)
    at = ((0, 1, num_rows),)
    block = Block(q, k, v, Mask(causal=True), at, at, scale=1.0)
    for launch in backward_launches(block, Gradients(dout, lse, delta, q, k, v), False):
        for stats in (launch.tensors["lse"], launch.tensors["delta"]):
            assert stats.shape == lse.shape and not any(stats[0, head].data_ptr() % 16 for head in range(2))
