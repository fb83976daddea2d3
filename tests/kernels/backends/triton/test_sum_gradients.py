"""Sums of gradients become gradients: by the kernel, which the interpreter runs here, and by torch."""

from collections.abc import Sequence

import pytest
import torch

from ringspan.kernels.backends.triton import sum_gradients as gradient_sums
from ringspan.kernels.backends.triton.sum_gradients import Summand, sum_gradients

ROWS, HEADS = 37, 3
# rows, heads, and where they begin
WHOLE, INNER, LAST_ROW, NO_ROWS, NO_HEADS = (37, 3, 0, 0), (20, 2, 9, 1), (1, 1, 36, 2), (0, 3, 5, 0), (8, 0, 5, 1)


def summands(*places: tuple[int, int, int, int], device: str) -> list[Summand]:
    return [Summand(torch.randn(rows, 2, heads, 40, device=device), row, head) for rows, heads, row, head in places]


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    "places",
    [
        [WHOLE],
        [INNER],
        [NO_ROWS],
        [WHOLE, INNER],
        [LAST_ROW, WHOLE],
        [INNER, LAST_ROW],
        [NO_ROWS, INNER, WHOLE],
        [WHOLE, INNER, INNER],
        [INNER, NO_HEADS, LAST_ROW],
    ],
)
def test_each_is_added_where_it_belongs(places: list[tuple[int, int, int, int]], by_kernel: bool, device: str) -> None:
    """dk and dv are regions of larger tensors, and 0 where there is nothing to add."""
    given = summands(*places, device=device)
    wanted = torch.zeros(ROWS, 2, HEADS, 40, device=device)
    for its in given:
        rows, heads = its.place
        wanted[rows, :, heads] += its.of
    around = [torch.full((2, 40, 5, width), 7.0, dtype=torch.bfloat16, device=device) for width in (16, 24)]
    dk, dv = (x[:, 2:39, 1:4] for x in around)
    if by_kernel:
        gradient_sums.launch(given, dk, dv)()
    else:
        sum_gradients(given, dk, dv, backend="reference")
    for found, columns in ((dk, wanted[..., :16]), (dv, wanted[..., 16:])):
        assert found.equal(columns.transpose(0, 1).bfloat16())
    for x in around:
        x[:, 2:39, 1:4] = 7
        assert (x == 7).all()


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
def test_one_may_be_written_over(by_kernel: bool, device: str) -> None:
    given = summands(WHOLE, INNER, LAST_ROW, device=device)
    whole = given[0].of
    wanted = whole.clone()
    for its in given[1:]:
        rows, heads = its.place
        wanted[rows, :, heads] += its.of
    dk, dv = whole.transpose(0, 1).split((16, 24), 3)
    if by_kernel:
        gradient_sums.launch(given, dk, dv)()
    else:
        sum_gradients(given, dk, dv, backend="reference")
    assert whole.equal(wanted)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for widths that it cannot read, fp64, and where another backend is asked for."""
    made: list[int] = []
    right = gradient_sums.launch

    def launch(given: Sequence[Summand], *grads: torch.Tensor) -> gradient_sums.Launch:
        made.append(given[0].of.shape[3])
        return right(given, *grads)

    monkeypatch.setattr(gradient_sums, "launch", launch)
    bf16, fp64 = (torch.float32, torch.bfloat16), (torch.float64, torch.float64)
    for width, (acc, dtype), backend in ((64, bf16, "auto"), (12, bf16, "auto"), (64, fp64, "auto"), (72, bf16, "chunked")):
        total, more = (torch.randn(256, 1, 4, 2 * width, device="cuda", dtype=acc) for _ in range(2))
        dk, dv = (torch.empty(1, 256, 4, width, device="cuda", dtype=dtype) for _ in range(2))
        wanted = (total + more).transpose(0, 1).to(dtype)
        sum_gradients([Summand(total), Summand(more)], dk, dv, backend)
        assert torch.cat([dk, dv], 3).equal(wanted)
    assert made == [128]
