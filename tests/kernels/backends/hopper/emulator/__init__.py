"""Emulator that runs the source of the Hopper kernels on a CPU: warps are tasks, copies and matmuls are asynchronous.

Triton cannot interpret Gluon. The emulator calls a kernel's Python functions with other meanings for `gl`, `mbarrier` and the
like. It finds wrong values, hangs, and orders of events that a GPU allows but rarely takes. Warps run in random order
(scheduler.py) and own only their rows; a copy arrives at any time after its start; a matmul reads shared memory until it is
waited for. A read that a GPU does not guarantee returns NaN:

    memory that a copy has yet to fill, or that changes while a matmul or a TMA store reads it;
    memory that threads write and tensor cores or the TMA read without the writer's fence in between.

The warps of a role synchronise where Triton inserts barriers; tests/kernels/runtime/ahead.py checks that in compiled code. Two
functions have their own implementation here: the forward's weights (PTX in the kernel) and the layout in which dq is stored.
Not covered: layouts, registers, speed, divergent threads of a warp, and the order of an arrival and its thread's loads.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ringspan.kernels.backends import choose
from ringspan.kernels.backends.hopper import arguments as hopper_arguments
from ringspan.kernels.backends.hopper import backward as hopper_backward
from ringspan.kernels.backends.hopper import forward as hopper_forward
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU


class Emulated:
    """Replaces a kernel: emulated[(grid,)](**arguments) runs it, `resident` thread blocks at a time.

    Each run has another seed, hence another order. overrides: other meanings of names in the kernel's source.
    """

    def __init__(self, kernel: Any, seed: int, resident: int, overrides: dict[str, Any]) -> None:
        self.kernel, self.resident, self.overrides = kernel, resident, overrides
        self.seeds = itertools.count(seed)

    def warmup(self, **arguments: Any) -> None:
        """Compile nothing, like Triton's interpreter."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        machine = EmulatedGPU(next(self.seeds), grid[0], self.overrides)
        return lambda **arguments: machine.run(self.kernel, arguments, self.resident)


def emulate(monkeypatch: pytest.MonkeyPatch, seed: int = 0, resident: int = 3, **overrides: Any) -> None:
    """Make backend="hopper" run on the CPU until the test ends; see Emulated for the arguments."""
    for module, name in ((hopper_forward, "attention_forward"), (hopper_backward, "attention_backward")):
        kernel = getattr(module, name)
        kernel = kernel.kernel if isinstance(kernel, Emulated) else kernel
        monkeypatch.setattr(module, name, Emulated(kernel, seed, resident, overrides))
    monkeypatch.setattr(choose, "hopper_runs_on", lambda device: True)
    monkeypatch.setattr(hopper_arguments, "num_thread_blocks", lambda device: resident)
