"""The meaning of `gl` and `tl` on a CPU."""

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.kernels.backends.hopper.emulator.memory import Barrier, SharedMemory
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor, Pointer, c_division, lift, promote

if TYPE_CHECKING:
    from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU


class Language:
    """Stands for the modules `gl` and `tl` in an emulated kernel."""

    float32, float16, bfloat16, int32, int64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64
    exp2, log, abs = (staticmethod(lift(function)) for function in (torch.exp2, torch.log, torch.abs))
    maximum, minimum = staticmethod(lift(torch.maximum)), staticmethod(lift(torch.minimum))
    cdiv = staticmethod(lift(lambda a, b: c_division(a + b - 1, b)))
    join = staticmethod(lift(lambda a, b: torch.stack((a, b), -1)))
    static_range = range

    def __init__(self, machine: "EmulatedGPU") -> None:
        self.machine = machine
        self.warp_specialize = machine.warp_specialize

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):  # layouts have no effect here
            return lambda *_, **__: None
        raise AttributeError(f"{name} is not emulated: add it to the emulator's {Path(__file__).name}")

    def program_id(self, _axis: int) -> EmulatedTensor:
        return EmulatedTensor(torch.tensor(self.machine.warp.block.number, dtype=torch.int32))

    def num_programs(self, _axis: int) -> EmulatedTensor:
        return EmulatedTensor(torch.tensor(self.machine.num_blocks, dtype=torch.int32))

    def static_assert(self, condition: bool, message: str) -> None:
        assert condition, message

    def arange(self, begin: int, end: int, _layout: Any = None) -> EmulatedTensor:
        return EmulatedTensor(torch.arange(begin, end, dtype=torch.int32))

    def full(self, shape: list[int], value: Any, dtype: torch.dtype, _layout: Any = None) -> EmulatedTensor:
        return EmulatedTensor(
            torch.full(shape, value.tensor.item() if isinstance(value, EmulatedTensor) else value, dtype=dtype)
        )

    def zeros(self, shape: list[int], dtype: torch.dtype, _layout: Any = None) -> EmulatedTensor:
        return EmulatedTensor(torch.zeros(shape, dtype=dtype))

    def zeros_like(self, x: EmulatedTensor) -> EmulatedTensor:
        return EmulatedTensor(torch.zeros_like(x.tensor))

    def where(self, condition: EmulatedTensor, a: Any, b: Any) -> EmulatedTensor:
        return EmulatedTensor(torch.where(condition.tensor, *promote(a, b)))

    def sum(self, x: EmulatedTensor, axis: int) -> EmulatedTensor:
        return EmulatedTensor(x.tensor.sum(axis))

    def max(self, x: EmulatedTensor, axis: int) -> EmulatedTensor:
        return EmulatedTensor(x.tensor.amax(axis))

    def convert_layout(self, x: EmulatedTensor, _layout: Any, assert_trivial: bool = False) -> EmulatedTensor:
        return x

    def multiple_of(self, x: EmulatedTensor, n: int) -> EmulatedTensor:
        assert (x.tensor % n == 0).all()
        return x

    def load(
        self, pointer: Pointer, mask: EmulatedTensor | None = None, other: Any = 0, volatile: bool = False
    ) -> EmulatedTensor:
        scheduler, warp = self.machine.scheduler, self.machine.warp
        scheduler.pause()
        value = pointer.load(mask, other)
        poll = (int(pointer.addresses), int(value)) if volatile else None
        if volatile and warp.last_poll == poll:  # the same value again: wait for another one instead of polling
            scheduler.wait(lambda: int(pointer.load(mask, other)) != poll[1], "another number in memory")
            value = pointer.load(mask, other)
        if volatile:
            warp.last_poll = int(pointer.addresses), int(value)
        return value

    def store(self, pointer: Pointer, value: Any, mask: EmulatedTensor | None = None) -> None:
        self.machine.scheduler.pause()
        pointer.store(value, mask, self.machine.warp.rows(pointer.addresses))

    def atomic_xchg(self, pointer: Pointer, value: Any, sem: str = "") -> None:
        self.machine.scheduler.pause()
        if self.machine.warp.index == 0:  # one thread of the role
            pointer.store(value, None)

    def atomic_add(self, pointer: Pointer, value: Any) -> EmulatedTensor:
        self.machine.scheduler.pause()
        assert self.machine.warp.sync.size == 1
        old = pointer.load(None, 0)
        pointer.store(old + value, None)
        return old

    def inline_asm_elementwise(
        self, asm: str, _constraints: str, args: list[EmulatedTensor], *_: Any, **__: Any
    ) -> EmulatedTensor:
        assert asm.startswith("cp.async.bulk.wait_group 0;"), f"not emulated: {asm}"
        self.machine.wait_until_stored()
        return args[0]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            frames = [sys._getframe(1), sys._getframe(2)]
            location = " of ".join(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}" for frame in frames)
            ring = [Barrier(f"{location}[{i}]") for i in range(shape[0])]
            return types.SimpleNamespace(index=lambda i: ring[int(i)], shape=shape)
        if dtype.is_floating_point:
            return SharedMemory(self.machine.scheduler, torch.full(shape, float("nan"), dtype=dtype))
        garbage = torch.randint(-(2**31), 2**31, shape, dtype=dtype, generator=self.machine.garbage)
        return SharedMemory(self.machine.scheduler, garbage)
