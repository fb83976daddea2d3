"""Tiles that reach beyond the last row: nothing there counts, whatever the scores, the positions and the memory after it."""

import pytest
import torch

from ringspan import Mask
from ringspan.kernels.blocks import block_backward, block_forward, output_delta

ROWS = 37  # of a sequence; tiles have 16 rows or more
NAN, INFINITY = float("nan"), float("inf")
WHOLE = [(0, 1, ROWS)]
FAR = [(0, 1, ROWS - 1), (100, 2**28, 1)]  # positions of rows after the last one would exceed 32 bits


def results_of(
    device: str, backend: str, mask: Mask, at: list[tuple[int, int, int]], score: float, after: tuple[float, float] | None
) -> list[torch.Tensor]:
    """Return out, lse, dq, dk and dv of scores near `score`, of the first ROWS of 48 rows.

    With `after`, all memory after these rows has NaN, but lse and delta have these two values.
    """
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 48, 2, 16, device=device) for _ in range(4))
    q[..., 0], k[..., 0] = 8.0, score / 8.0
    if after is not None:
        for x in (q, k, v, dout):
            x[:, ROWS:] = NAN
    q, k, v, dout = (x[:, :ROWS] for x in (q, k, v, dout))
    out, lse = block_forward(q, k, v, mask, at, at, None, scale=1.0, backend=backend)
    stats = [lse, output_delta(dout, out, backend="reference")]
    if after is not None:
        stats = [torch.cat([x, torch.full_like(x[..., :11], y)], 2)[..., :ROWS] for x, y in zip(stats, after, strict=True)]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    block_backward(dout, q, k, v, *stats, mask, at, at, *grads, scale=1.0, backend=backend, accumulate=False)
    return [out, lse, *grads]


@pytest.mark.parametrize("at", [WHOLE, FAR], ids=["whole", "far"])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(9, 5))], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("score", "after"),
    [(-200.0, None), (0.0, (-INFINITY, NAN)), (0.0, (0.0, NAN)), (0.0, (NAN, INFINITY)), (-20.0, (-1e4, 1e4))],
)
def test_nothing_after_the_last_row_counts(
    mask: Mask, at: list[tuple[int, int, int]], score: float, after: tuple[float, float] | None, device: str
) -> None:
    expected = results_of(device, "reference", mask, at, score, None)
    for result, wanted in zip(results_of(device, "triton", mask, at, score, after), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-3, atol=2e-3)
