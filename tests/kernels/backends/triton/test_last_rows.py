"""Tiles that reach beyond the last row: nothing there counts, whatever the scores and the memory after it."""

import pytest
import torch

from ringspan import Mask
from ringspan.kernels.blocks import block_backward, block_forward, output_delta

ROWS = 37  # of a sequence; tiles have 16 rows or more


def gradients(device: str, backend: str, mask: Mask, score: float, after: float | None) -> list[torch.Tensor]:
    """Return dq, dk and dv of scores near `score`. Memory behind the rows of lse and delta holds `after`, if not None."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, ROWS, 2, 16, device=device) for _ in range(4))
    q[..., 0], k[..., 0] = 8.0, score / 8.0
    at = [(0, 1, ROWS)]
    out, lse = block_forward(q, k, v, mask, at, at, None, scale=1.0, backend="reference")
    stats = [lse, output_delta(dout, out, backend="reference")]
    if after is not None:
        stats = [torch.cat([x, torch.full_like(x[..., :11], after)], 2)[..., :ROWS] for x in stats]
    results = [torch.zeros_like(x) for x in (q, k, v)]
    block_backward(dout, q, k, v, *stats, mask, at, at, *results, scale=1.0, backend=backend, accumulate=False)
    return results


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(9, 5))], ids=["full", "causal", "window"])
@pytest.mark.parametrize(("score", "after"), [(-200.0, None), (0.0, -float("inf")), (0.0, -1e4)])
def test_memory_after_the_last_row_does_not_count(mask: Mask, score: float, after: float | None, device: str) -> None:
    expected = gradients(device, "reference", mask, score, None)
    for result, wanted in zip(gradients(device, "triton", mask, score, after), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-3, atol=2e-3)
