"""The PTX of the forward's softmax computes what the emulator's version of it computes, and rescales rows correctly."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringspan.kernels.backends.hopper import online_softmax
from ringspan.kernels.backends.hopper.online_softmax import NO_REFERENCE
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU, compute_weights
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor
from tests.kernels.backends.hopper.ptx import LANES, run

ROWS = torch.arange(LANES) // 4  # a thread's first row; its second row is 8 later
PART = torch.arange(LANES) % 4  # a thread's part of its rows
WARP_ROWS = 16


def to_registers(x: Tensor) -> list[Tensor]:
    """Distribute (16 rows, 4 parts) to two registers of each thread of the warp."""
    return [x[ROWS, PART], x[ROWS + 8, PART]]


def from_registers(registers: list[Tensor]) -> Tensor:
    """Collect two registers of each thread into (16 rows, 4 parts)."""
    return torch.cat([x.view(8, 4) for x in registers])


def weights_by_ptx(s: Tensor, factor: float, reference: Tensor, dtype: torch.dtype, first: bool) -> tuple[Tensor, ...]:
    """Return the results of `compute_weights` for 16 rows, by its PTX."""
    pairs = s.shape[1] // 8
    scores = s.view(WARP_ROWS, pairs, 4, 2)
    operands = [reference.expand(-1, 4), torch.full([WARP_ROWS, 4], factor)]
    operands += [scores[:, pair, :, odd] for odd in (0, 1) for pair in range(pairs)]
    registers = [x for operand in operands for x in to_registers(operand)]
    outputs = 2 * (pairs + 4)
    named = {f"${i}": torch.full([LANES], float("nan")) for i in range(outputs)}
    named |= {f"${outputs + i}": x.clone() for i, x in enumerate(registers)}
    for row in (0, 1):  # the reference's input and output share registers, as the constraints say
        named[f"${2 * pairs + row}"] = named[f"${outputs + row}"]
    run(online_softmax._weights_ptx(pairs, dtype == torch.bfloat16, first), named)
    results = [from_registers([named[f"${2 * i}"], named[f"${2 * i + 1}"]]) for i in range(pairs + 4)]
    halves = torch.stack(results[:pairs], 1).to(torch.int32).view(dtype).view(WARP_ROWS, 8 * pairs)
    return halves, *results[pairs:]


def weights_by_emulator(s: Tensor, factor: float, reference: Tensor, dtype: torch.dtype, first: bool) -> tuple[Tensor, ...]:
    """Return the same results by the emulator, which takes 64 rows."""
    repeated = [x.repeat(4, 1) for x in (s, reference.expand(-1, 4))]
    results = compute_weights(EmulatedTensor(repeated[0]), factor, EmulatedTensor(repeated[1]), dtype, first)
    return tuple(x.tensor[:WARP_ROWS] for x in results)


HIDDEN = float("-inf")
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # from (16, columns) random numbers
    "random": lambda s: s,
    "a row far above": lambda s: s.index_put((torch.tensor(5),), s[5] + 200),
    "one score far above": lambda s: s.index_put((torch.tensor(11), torch.tensor(3)), torch.tensor(1e4)),
    "all far above": lambda s: s + 500,
    "all far below": lambda s: s - 500,
    "growing": lambda s: s + torch.linspace(-50, 300, s.shape[1]),
    "some hidden": lambda s: s.masked_fill(torch.arange(s.shape[1])[None] > torch.arange(WARP_ROWS)[:, None], HIDDEN),
    "rows without visible keys": lambda s: s.index_fill(0, torch.tensor([0, 7, 15]), HIDDEN),
    "all hidden": lambda s: torch.full_like(s, HIDDEN),
}


def check(s: Tensor, reference: Tensor, dtype: torch.dtype, first: bool, factor: float = 0.7) -> None:
    results, expected = (weights(s, factor, reference, dtype, first) for weights in (weights_by_ptx, weights_by_emulator))
    weights, new_reference, partial_sum, rescale, needs_rescale = results
    largest = factor * s.masked_fill(s == HIDDEN, 0).abs().max().item()
    rtol = 1e-5 + largest * 2**-23  # the emulator rounds the product before it subtracts the reference; an FMA does not
    torch.testing.assert_close(weights.float(), expected[0].float(), rtol=2**-7, atol=1e-7)
    torch.testing.assert_close(new_reference, expected[1].float())
    torch.testing.assert_close(partial_sum, expected[2], rtol=rtol, atol=1e-30)
    assert weights.isfinite().all() and partial_sum.isfinite().all()
    if first:  # there are no earlier sums to rescale
        return
    torch.testing.assert_close(rescale, expected[3].float())
    assert ((needs_rescale != 0) | (rescale == 1)).all(), "a row is rescaled, but its thread does not set needs_rescale"
    if not expected[4].any() and not (reference == NO_REFERENCE.value).any():
        assert not needs_rescale.any(), "no row is rescaled, but a thread sets needs_rescale"


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("columns", [64, 128])
def test_ptx_weights_match_emulator(scores: str, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    s, no_reference = SCORES[scores](3 * torch.randn(WARP_ROWS, columns)), torch.full([WARP_ROWS, 1], NO_REFERENCE.value)
    rows = torch.randn(WARP_ROWS, 1)
    check(s, no_reference, dtype, first=True)
    for reference in (no_reference, rows, torch.where(torch.arange(WARP_ROWS)[:, None] % 3 == 0, no_reference, rows)):
        check(s, reference, dtype, first=False)


@pytest.mark.parametrize("first", [True, False])
def test_all_threads_of_a_row_use_its_maximum(first: bool) -> None:
    torch.manual_seed(0)
    for column in range(64):
        s = torch.randn(WARP_ROWS, 64)
        for row in (column % 8, 8 + column * 3 % 8):
            s[row, column] = 40 + row
        reference = torch.full([WARP_ROWS, 1], NO_REFERENCE.value) if first else torch.randn(WARP_ROWS, 1)
        check(s, reference, torch.bfloat16, first)


@pytest.mark.parametrize("size", [1e9, 1e10, 1e12, 1e20, 1e38, float("nan"), float("inf")])
def test_loop_terminates_for_any_scores(size: float) -> None:
    """A row whose maximum is rounded by more than the limit allows updates its reference once per tile."""
    torch.manual_seed(0)
    for rows in (slice(None), slice(5, 6), slice(9, 14)):
        for factor in (0.7, 0.125, 0.18):
            s = torch.randn(WARP_ROWS, 64)
            s[rows] = size * (1 + torch.rand_like(s[rows]))
            s[15, 7] = size
            reference = torch.randn(WARP_ROWS, 1)
            results = weights_by_ptx(s, factor, reference, torch.bfloat16, first=False)
            unchanged = torch.ones(WARP_ROWS, dtype=torch.bool)
            unchanged[rows], unchanged[15] = False, False
            assert torch.equal(results[1][unchanged], reference.expand(-1, 4)[unchanged])
            assert results[2][unchanged].isfinite().all()


@pytest.mark.parametrize("flag", [0, 1])
def test_rows_are_scaled_only_if_flagged(flag: int) -> None:
    torch.manual_seed(0)
    numbers, factors = torch.randn(4, LANES), torch.randn(4, LANES)
    flags = torch.full([4, LANES], flag, dtype=torch.int32)
    # inputs and outputs share registers
    named = {f"${i}": x for i, x in enumerate([*numbers, *numbers, *factors, *flags])}
    run(online_softmax._scale_ptx(4), named)
    results = torch.stack([named[f"${i}"] for i in range(4)])
    torch.testing.assert_close(results, numbers * factors if flag else numbers)


def test_join_pairs_inverts_split_pairs() -> None:
    machine, x = EmulatedGPU(0, 1, {}), torch.arange(64 * 4 * 16).view(64, 4, 16)
    split_pairs = machine.translate(online_softmax.split_pairs)
    join_pairs = machine.translate(online_softmax.join_pairs)
    parts = split_pairs(EmulatedTensor(x))
    assert len(parts) == 16 and all(part.tensor.shape == (64, 4) for part in parts)
    assert torch.equal(join_pairs(parts, 0, 16).tensor, x)
