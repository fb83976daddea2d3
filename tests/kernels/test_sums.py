"""Sums of gradients become gradients: by the kernel, which the interpreter runs here, and by torch."""

import pytest
import torch

from kernels import finish_gradients, sums


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("heads, first_head", [(3, 0), (2, 1), (1, 2), (0, 1)])
@pytest.mark.parametrize("rows, first", [(37, 0), (20, 9), (1, 36), (0, 5)])
def test_what_comes_last_is_added_where_it_belongs(
    rows: int, first: int, heads: int, first_head: int, by_kernel: bool, device: str
) -> None:
    """`more` has some rows of some heads; total, dk and dv are regions of larger tensors."""
    total = torch.randn(40, 2, 5, 40, device=device)[2:39, :, 1:4]
    more = torch.randn(rows, 2, heads, 40, device=device)
    wanted = total.clone()
    wanted[first : first + rows, :, first_head : first_head + heads] += more
    around = [torch.full((2, 40, 5, width), 7.0, dtype=torch.bfloat16, device=device) for width in (16, 24)]
    dk, dv = (x[:, 2:39, 1:4] for x in around)
    if by_kernel:
        sums.launch(total, more, first, first_head, dk, dv)()
    else:
        finish_gradients(total, more, first, first_head, dk, dv, backend="reference")
    for found, columns in ((dk, wanted[..., :16]), (dv, wanted[..., 16:])):
        assert found.equal(columns.transpose(0, 1).bfloat16())
    for x in around:
        x[:, 2:39, 1:4] = 7
        assert (x == 7).all()


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for widths that it cannot read, fp64, and where another backend is asked for."""
    made: list[int] = []
    right = sums.launch

    def launch(total: torch.Tensor, *given: object) -> sums.Launch:
        made.append(total.shape[3])
        return right(total, *given)

    monkeypatch.setattr(sums, "launch", launch)
    bf16, fp64 = (torch.float32, torch.bfloat16), (torch.float64, torch.float64)
    for width, (acc, dtype), backend in ((64, bf16, "auto"), (12, bf16, "auto"), (64, fp64, "auto"), (72, bf16, "chunked")):
        total, more = (torch.randn(256, 1, 4, 2 * width, device="cuda", dtype=acc) for _ in range(2))
        dk, dv = (torch.empty(1, 256, 4, width, device="cuda", dtype=dtype) for _ in range(2))
        wanted = (total + more).transpose(0, 1).to(dtype)
        finish_gradients(total, more, 0, 0, dk, dv, backend)
        assert torch.cat([dk, dv], 3).equal(wanted)
    assert made == [128]
