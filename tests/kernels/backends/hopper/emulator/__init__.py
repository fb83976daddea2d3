"""The Hopper kernels' own source, run on a CPU: each warp a thread, shared memory a tensor, copies and products late.

Triton can't interpret Gluon. Here a kernel's Python functions are called as they stand, in a world where `gl`, `mbarrier` and
their like mean what is below. It shows wrong values, hangs, and orders of events that a GPU may take and seldom does: warps go
on in random order (parties.py) and know their own rows alone, a copy arrives at any time after it began, and a product reads
shared memory until it is waited for. What is read in a way that a GPU does not promise becomes NaN:

    memory that a copy is still to fill, or that changed while a product or a copy to memory read it;
    memory that threads wrote and the tensor cores or the TMA read, without a fence of the writer's between.

A party's warps meet where Triton has them meet, which tests/kernels/ahead.py looks for in what it compiles. Two things are told
anew here: how the forward takes weights, which is PTX, and the order in which dq is stored. What only a compiler or a GPU can
tell is left out: layouts, registers, speed, a warp's threads that are apart, and whether an arrival comes behind its thread's
own loads.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ringspan.kernels import blocks
from ringspan.kernels.backends.hopper import arguments as hopper_arguments
from ringspan.kernels.backends.hopper import backward as hopper_backward
from ringspan.kernels.backends.hopper import forward as hopper_forward
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU


class Emulated:
    """Stands where a kernel does: emulated[(programs,)](**arguments) runs it, some programs at a time.

    Each run has a seed of its own, so no two take the same order. instead: what names in the kernel's source mean else.
    """

    def __init__(self, kernel: Any, seed: int, resident: int, instead: dict[str, Any]) -> None:
        self.kernel, self.resident, self.instead = kernel, resident, instead
        self.seeds = itertools.count(seed)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        machine = EmulatedGPU(next(self.seeds), grid[0], self.instead)
        return lambda **arguments: machine.run(self.kernel, arguments, self.resident)


def emulate(monkeypatch: pytest.MonkeyPatch, seed: int = 0, resident: int = 3, **instead: Any) -> None:
    """backend="hopper" on a CPU, till the test ends."""
    for module, name in ((hopper_forward, "attention_forward"), (hopper_backward, "attention_backward")):
        kernel = getattr(module, name)
        kernel = kernel.kernel if isinstance(kernel, Emulated) else kernel
        monkeypatch.setattr(module, name, Emulated(kernel, seed, resident, instead))
    monkeypatch.setattr(blocks, "hopper_runs_on", lambda device: True)
    monkeypatch.setattr(hopper_arguments, "num_programs", lambda device: resident)
