"""sum_gradients writes the sum of its summands, by the kernel (in the interpreter without a GPU) and by torch."""

from collections.abc import Sequence

import pytest
import torch

from ringspan.kernels.backends.triton import sum_gradients as gradient_sums
from ringspan.kernels.backends.triton.sum_gradients import Summand, sum_gradients

ROWS, HEADS = 37, 3
# number of rows and heads, first row, first head
ALL, INNER, LAST_ROW, NO_ROWS, NO_HEADS = (37, 3, 0, 0), (20, 2, 9, 1), (1, 1, 36, 2), (0, 3, 5, 0), (8, 0, 5, 1)


def summands(*extents: tuple[int, int, int, int], device: str) -> list[Summand]:
    return [Summand(torch.randn(rows, 2, heads, 40, device=device), row, head) for rows, heads, row, head in extents]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    "extents",
    [
        [ALL],
        [INNER],
        [NO_ROWS],
        [ALL, INNER],
        [LAST_ROW, ALL],
        [INNER, LAST_ROW],
        [NO_ROWS, INNER, ALL],
        [ALL, INNER, INNER],
        [INNER, NO_HEADS, LAST_ROW],
    ],
)
def test_summands_are_added_at_their_rows_and_heads(
    extents: list[tuple[int, int, int, int]], by_kernel: bool, device: str
) -> None:
    """dk and dv are regions of larger tensors; they are 0 where no summand covers them, and nothing else is written."""
    inputs = summands(*extents, device=device)
    expected = torch.zeros(ROWS, 2, HEADS, 40, device=device)
    for summand in inputs:
        rows, heads = summand.extent
        expected[rows, :, heads] += summand.grads
    surroundings = [torch.full((2, 40, 5, width), 7.0, dtype=torch.bfloat16, device=device) for width in (16, 24)]
    dk, dv = (x[:, 2:39, 1:4] for x in surroundings)
    if by_kernel:
        gradient_sums.launch(inputs, dk, dv)()
    else:
        sum_gradients(inputs, dk, dv, backend="reference")
    for grad, columns in ((dk, expected[..., :16]), (dv, expected[..., 16:])):
        assert grad.equal(columns.transpose(0, 1).bfloat16())
    for x in surroundings:
        x[:, 2:39, 1:4] = 7
        assert (x == 7).all()


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
def test_outputs_may_be_views_of_a_summand(by_kernel: bool, device: str) -> None:
    inputs = summands(ALL, INNER, LAST_ROW, device=device)
    base = inputs[0].grads
    expected = base.clone()
    for summand in inputs[1:]:
        rows, heads = summand.extent
        expected[rows, :, heads] += summand.grads
    dk, dv = base.transpose(0, 1).split((16, 24), 3)
    if by_kernel:
        gradient_sums.launch(inputs, dk, dv)()
    else:
        sum_gradients(inputs, dk, dv, backend="reference")
    assert base.equal(expected)


@pytest.mark.gpu
def test_gpu_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for widths that it cannot read, for fp64, and for another backend."""
    widths: list[int] = []
    original = gradient_sums.launch

    def launch(inputs: Sequence[Summand], *grads: torch.Tensor) -> gradient_sums.Launch:
        widths.append(inputs[0].grads.shape[3])
        return original(inputs, *grads)

    monkeypatch.setattr(gradient_sums, "launch", launch)
    bf16, fp64 = (torch.float32, torch.bfloat16), (torch.float64, torch.float64)
    for width, (acc, dtype), backend in ((64, bf16, "auto"), (12, bf16, "auto"), (64, fp64, "auto"), (72, bf16, "chunked")):
        total, addend = (torch.randn(256, 1, 4, 2 * width, device="cuda", dtype=acc) for _ in range(2))
        dk, dv = (torch.empty(1, 256, 4, width, device="cuda", dtype=dtype) for _ in range(2))
        expected = (total + addend).transpose(0, 1).to(dtype)
        sum_gradients([Summand(total), Summand(addend)], dk, dv, backend)
        assert torch.cat([dk, dv], 3).equal(expected)
    assert widths == [128]
