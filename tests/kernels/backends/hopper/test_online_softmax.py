"""The PTX in the forward's softmax is what the emulator takes it for, and what shrinks shrinks by it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringspan.kernels.backends.hopper import online_softmax as hopper_softmax
from ringspan.kernels.backends.hopper.online_softmax import NOTHING
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU, take_weights
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor
from tests.kernels.backends.hopper.ptx import LANES, run

ROWS = torch.arange(LANES) // 4  # of a thread the first of two, which are 8 apart
PART = torch.arange(LANES) % 4  # of a row
WARP_ROWS = 16


def of_threads(x: Tensor) -> list[Tensor]:
    """(16 rows, 4 parts) → what the warp's threads have of their two rows."""
    return [x[ROWS, PART], x[ROWS + 8, PART]]


def of_rows(registers: list[Tensor]) -> Tensor:
    """And back."""
    return torch.cat([x.view(8, 4) for x in registers])


def taken_by_ptx(s: Tensor, factor: float, reference: Tensor, dtype: torch.dtype, first: bool) -> tuple[Tensor, ...]:
    """What 16 rows of `take_weights` are, by its PTX."""
    pairs = s.shape[1] // 8
    scores = s.view(WARP_ROWS, pairs, 4, 2)
    given = [reference.expand(-1, 4), torch.full([WARP_ROWS, 4], factor)]
    given += [scores[:, pair, :, odd] for odd in (0, 1) for pair in range(pairs)]
    registers = [x for operand in given for x in of_threads(operand)]
    outputs = 2 * (pairs + 4)
    named = {f"${i}": torch.full([LANES], float("nan")) for i in range(outputs)}
    named |= {f"${outputs + i}": x.clone() for i, x in enumerate(registers)}
    for row in (0, 1):  # the same registers before and after, as the operands' list says
        named[f"${2 * pairs + row}"] = named[f"${outputs + row}"]
    run(hopper_softmax._take_weights(pairs, dtype == torch.bfloat16, first), named)
    found = [of_rows([named[f"${2 * i}"], named[f"${2 * i + 1}"]]) for i in range(pairs + 4)]
    halves = torch.stack(found[:pairs], 1).to(torch.int32).view(dtype).view(WARP_ROWS, 8 * pairs)
    return halves, *found[pairs:]


def told_anew(s: Tensor, factor: float, reference: Tensor, dtype: torch.dtype, first: bool) -> tuple[Tensor, ...]:
    """The same by the emulator, which knows 64 rows."""
    whole = [x.repeat(4, 1) for x in (s, reference.expand(-1, 4))]
    found = take_weights(EmulatedTensor(whole[0]), factor, EmulatedTensor(whole[1]), dtype, first)
    return tuple(x.tensor[:WARP_ROWS] for x in found)


HIDDEN = float("-inf")
SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of (16, columns) random numbers
    "as they come": lambda s: s,
    "a row far above": lambda s: s.index_put((torch.tensor(5),), s[5] + 200),
    "one score far above": lambda s: s.index_put((torch.tensor(11), torch.tensor(3)), torch.tensor(1e4)),
    "all far above": lambda s: s + 500,
    "all far below": lambda s: s - 500,
    "growing": lambda s: s + torch.linspace(-50, 300, s.shape[1]),
    "some hidden": lambda s: s.masked_fill(torch.arange(s.shape[1])[None] > torch.arange(WARP_ROWS)[:, None], HIDDEN),
    "rows that see nothing": lambda s: s.index_fill(0, torch.tensor([0, 7, 15]), HIDDEN),
    "nothing is seen": lambda s: torch.full_like(s, HIDDEN),
}


def check(s: Tensor, reference: Tensor, dtype: torch.dtype, first: bool, factor: float = 0.7) -> None:
    found, same = (take(s, factor, reference, dtype, first) for take in (taken_by_ptx, told_anew))
    weights, after, part, shrink, late = found
    largest = factor * s.masked_fill(s == HIDDEN, 0).abs().max().item()
    rtol = 1e-5 + largest * 2**-23  # the emulator rounds an exponent before it takes the reference away, an FMA does not
    torch.testing.assert_close(weights.float(), same[0].float(), rtol=2**-7, atol=1e-7)
    torch.testing.assert_close(after, same[1].float())
    torch.testing.assert_close(part, same[2], rtol=rtol, atol=1e-30)
    assert weights.isfinite().all() and part.isfinite().all()
    if first:  # nothing was added up that could shrink
        return
    torch.testing.assert_close(shrink, same[3].float())
    assert ((late != 0) | (shrink == 1)).all(), "a row shrinks, and its thread does not say so"
    if not same[4].any() and not (reference == NOTHING.value).any():
        assert not late.any(), "nobody is late, and a thread says so"


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("columns", [64, 128])
def test_weights_are_taken_as_the_emulator_takes_them(scores: str, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    s, before = SCORES[scores](3 * torch.randn(WARP_ROWS, columns)), torch.full([WARP_ROWS, 1], NOTHING.value)
    some = torch.randn(WARP_ROWS, 1)
    check(s, before, dtype, first=True)
    for reference in (before, some, torch.where(torch.arange(WARP_ROWS)[:, None] % 3 == 0, before, some)):
        check(s, reference, dtype, first=False)


@pytest.mark.parametrize("first", [True, False])
def test_whoever_has_a_rows_maximum_all_its_threads_know(first: bool) -> None:
    torch.manual_seed(0)
    for column in range(64):
        s = torch.randn(WARP_ROWS, 64)
        for row in (column % 8, 8 + column * 3 % 8):
            s[row, column] = 40 + row
        reference = torch.full([WARP_ROWS, 1], NOTHING.value) if first else torch.randn(WARP_ROWS, 1)
        check(s, reference, torch.bfloat16, first)


@pytest.mark.parametrize("size", [1e9, 1e10, 1e12, 1e20, 1e38, float("nan"), float("inf")])
def test_it_ends_whatever_the_scores(size: float) -> None:
    """Where a row's maximum is rounded by more than the limit allows, it is followed once and no more."""
    torch.manual_seed(0)
    for some in (slice(None), slice(5, 6), slice(9, 14)):
        for factor in (0.7, 0.125, 0.18):
            s = torch.randn(WARP_ROWS, 64)
            s[some] = size * (1 + torch.rand_like(s[some]))
            s[15, 7] = size
            reference = torch.randn(WARP_ROWS, 1)
            taken = taken_by_ptx(s, factor, reference, torch.bfloat16, first=False)
            untouched = torch.ones(WARP_ROWS, dtype=torch.bool)
            untouched[some], untouched[15] = False, False
            assert torch.equal(taken[1][untouched], reference.expand(-1, 4)[untouched])
            assert taken[2][untouched].isfinite().all()


@pytest.mark.parametrize("flag", [0, 1])
def test_rows_are_scaled_where_a_thread_is_late(flag: int) -> None:
    torch.manual_seed(0)
    numbers, factors = torch.randn(4, LANES), torch.randn(4, LANES)
    flags = torch.full([4, LANES], flag, dtype=torch.int32)
    named = {f"${i}": x for i, x in enumerate([*numbers, *numbers, *factors, *flags])}  # before and after in the same registers
    run(hopper_softmax._scale_if(4), named)
    found = torch.stack([named[f"${i}"] for i in range(4)])
    torch.testing.assert_close(found, numbers * factors if flag else numbers)


def test_what_is_taken_apart_comes_together_again() -> None:
    machine, x = EmulatedGPU(0, 1, {}), torch.arange(64 * 4 * 16).view(64, 4, 16)
    apart, together = (machine.meant(function) for function in (hopper_softmax.apart, hopper_softmax.together))
    parts = apart(EmulatedTensor(x))
    assert len(parts) == 16 and all(part.tensor.shape == (64, 4) for part in parts)
    assert torch.equal(together(parts, 0, 16).tensor, x)
