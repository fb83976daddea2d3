"""What `gl` and `tl` mean on a CPU."""

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.kernels.backends.hopper.emulator.memory import Barrier, Memory
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor, Pointer, of_one_type, on_tensors, whole

if TYPE_CHECKING:
    from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU


class Language:
    """`gl` and `tl`."""

    float32, float16, bfloat16, int32, int64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64
    exp2, log, abs = (staticmethod(on_tensors(do)) for do in (torch.exp2, torch.log, torch.abs))
    maximum, minimum = staticmethod(on_tensors(torch.maximum)), staticmethod(on_tensors(torch.minimum))
    cdiv = staticmethod(on_tensors(lambda a, b: whole(a + b - 1, b)))
    join = staticmethod(on_tensors(lambda a, b: torch.stack((a, b), -1)))
    static_range = range

    def __init__(self, machine: "EmulatedGPU") -> None:
        self.machine = machine
        self.warp_specialize = machine.split_up

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):  # nothing here depends on one
            return lambda *_, **__: None
        raise AttributeError(f"{name} has no meaning on a CPU yet: give it one in tests/kernels/emulator/{Path(__file__).name}")

    def program_id(self, _axis: int) -> EmulatedTensor:
        return EmulatedTensor(torch.tensor(self.machine.me.program.number, dtype=torch.int32))

    def num_programs(self, _axis: int) -> EmulatedTensor:
        return EmulatedTensor(torch.tensor(self.machine.programs, dtype=torch.int32))

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
        return EmulatedTensor(torch.where(condition.tensor, *of_one_type(a, b)))

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
        parties, me = self.machine.parties, self.machine.me
        parties.pause()
        found = pointer.load(mask, other)
        if volatile and me.last_look == (look := (int(pointer.at), int(found))):  # nothing new: it looks until there is
            parties.wait(lambda: int(pointer.load(mask, other)) != look[1], "another number in memory")
            found = pointer.load(mask, other)
        if volatile:
            me.last_look = int(pointer.at), int(found)
        return found

    def store(self, pointer: Pointer, value: Any, mask: EmulatedTensor | None = None) -> None:
        self.machine.parties.pause()
        pointer.store(value, mask, self.machine.me.rows(pointer.at))

    def atomic_xchg(self, pointer: Pointer, value: Any, sem: str = "") -> None:
        self.machine.parties.pause()
        if self.machine.me.index == 0:  # one thread does it
            pointer.store(value, None)

    def atomic_add(self, pointer: Pointer, value: Any) -> EmulatedTensor:
        self.machine.parties.pause()
        assert self.machine.me.meeting.size == 1
        before = pointer.load(None, 0)
        pointer.store(before + value, None)
        return before

    def inline_asm_elementwise(
        self, asm: str, _constraints: str, given: list[EmulatedTensor], *_: Any, **__: Any
    ) -> EmulatedTensor:
        assert asm.startswith("cp.async.bulk.wait_group 0;"), f"no meaning on a CPU: {asm}"
        self.machine.wait_until_written()
        return given[0]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            frames = [sys._getframe(1), sys._getframe(2)]
            where = " of ".join(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}" for frame in frames)
            ring = [Barrier(f"{where}[{i}]") for i in range(shape[0])]
            return types.SimpleNamespace(index=lambda i: ring[int(i)], shape=shape)
        if dtype.is_floating_point:
            return Memory(self.machine.parties, torch.full(shape, float("nan"), dtype=dtype))
        return Memory(self.machine.parties, torch.randint(-(2**31), 2**31, shape, dtype=dtype, generator=self.machine.garbage))
