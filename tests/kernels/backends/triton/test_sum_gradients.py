"""sum_gradients writes the sum of its summands, by the kernel (in the interpreter without a GPU) and by torch."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ringspan.kernels.backends.triton import sum_gradients as gradient_sums
from ringspan.kernels.backends.triton.sum_gradients import MAX_SUMMANDS, Summand, sum_gradients

ROWS, HEADS = 37, 3
ALL, FIRST, INNER, LAST, NONE = slice(0, 37), slice(0, 18), slice(9, 29), slice(36, 37), slice(5, 5)


def by_torch(summands: Sequence[Summand], dk: Tensor, dv: Tensor) -> None:
    sum_gradients(summands, dk, dv, backend="reference")


def by_kernel(summands: Sequence[Summand], dk: Tensor, dv: Tensor) -> None:
    gradient_sums.launch(summands, dk, dv)()


def by_kernel_of_four(summands: Sequence[Summand], dk: Tensor, dv: Tensor) -> None:
    gradient_sums.launch(summands, dk, dv, min_summands=4)()


def random_summand(rows: slice, device: str) -> Summand:
    """Gradients that are a region of a larger tensor."""
    larger = torch.randn(rows.stop + 2, 2, HEADS + 1, 40, device=device)
    return Summand(larger[rows.start : rows.stop, :, 1:], rows.start)


def expected_sum(summands: Sequence[Summand]) -> Tensor:
    total = torch.zeros(ROWS, 2, HEADS, 40, device=summands[0].grads.device)
    for summand in summands:
        total[summand.rows] += summand.grads
    return total


@pytest.mark.parametrize("add", [by_kernel, by_kernel_of_four, by_torch])
@pytest.mark.parametrize(
    "row_ranges",
    [
        [ALL],
        [INNER],
        [NONE],
        [ALL, INNER],
        [LAST, ALL],
        [INNER, LAST],
        [NONE, INNER, ALL],
        [ALL, INNER, INNER],
        [FIRST, ALL, LAST, INNER],
        [FIRST, INNER, NONE, LAST, FIRST],
        [ALL] * MAX_SUMMANDS,
    ],
)
def test_summands_are_added_at_their_rows(row_ranges: list[slice], add: Callable[..., None], device: str) -> None:
    """dk and dv are regions of larger tensors; they are 0 where no summand has rows, and nothing else is written."""
    summands = [random_summand(rows, device) for rows in row_ranges]
    expected = expected_sum(summands)
    surroundings = [torch.full((2, 40, 5, width), 7.0, dtype=torch.bfloat16, device=device) for width in (16, 24)]
    dk, dv = (x[:, 2:39, 1:4] for x in surroundings)
    add(summands, dk, dv)
    for grad, columns in ((dk, expected[..., :16]), (dv, expected[..., 16:])):
        assert grad.equal(columns.transpose(0, 1).bfloat16())
    for x in surroundings:
        x[:, 2:39, 1:4] = 7
        assert (x == 7).all()


@pytest.mark.parametrize("add", [by_kernel, by_torch])
@pytest.mark.parametrize("rows", [ALL, FIRST], ids=["all", "first"])
def test_outputs_may_contain_the_first_summand(rows: slice, add: Callable[..., None], device: str) -> None:
    target = torch.randn(ROWS, 2, HEADS, 40, device=device)
    summands = [Summand(target[rows], rows.start), random_summand(ALL, device), random_summand(INNER, device)]
    expected = expected_sum(summands)
    add(summands, *target.transpose(0, 1).split((16, 24), 3))
    torch.testing.assert_close(target, expected)


@pytest.mark.gpu
def test_gpu_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for widths that it cannot read, for fp64, and for another backend."""
    widths: list[int] = []
    original = gradient_sums.launch

    def launch(summands: Sequence[Summand], *grads: Tensor) -> gradient_sums.Launch:
        widths.append(summands[0].grads.shape[3])
        return original(summands, *grads)

    monkeypatch.setattr(gradient_sums, "launch", launch)
    bf16, fp64 = (torch.float32, torch.bfloat16), (torch.float64, torch.float64)
    for width, (acc, dtype), backend in ((64, bf16, "auto"), (12, bf16, "auto"), (64, fp64, "auto"), (72, bf16, "chunked")):
        total, addend = (torch.randn(256, 1, 4, 2 * width, device="cuda", dtype=acc) for _ in range(2))
        dk, dv = (torch.empty(1, 256, 4, width, device="cuda", dtype=dtype) for _ in range(2))
        expected = (total + addend).transpose(0, 1).to(dtype)
        sum_gradients([Summand(total), Summand(addend)], dk, dv, backend)
        assert torch.cat([dk, dv], 3).equal(expected)
    assert widths == [128]
