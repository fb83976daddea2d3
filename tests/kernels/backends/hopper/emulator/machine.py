"""A GPU as far as a kernel's source can tell: programs and their parties, copies, products, and what its names mean."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from ringspan.kernels.backends.hopper.online_softmax import LIMIT, NOTHING
from tests.kernels.backends.hopper.emulator.language import Language
from tests.kernels.backends.hopper.emulator.memory import Barrier, CopyOut, Meeting, Memory, Program, Warp
from tests.kernels.backends.hopper.emulator.parties import Parties
from tests.kernels.backends.hopper.emulator.values import Descriptor, EmulatedTensor, Pointer, Product


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.to_come = count


def take_weights(
    s: EmulatedTensor, factor: Any, reference: EmulatedTensor, dtype: torch.dtype, first: bool
) -> tuple[EmulatedTensor, ...]:
    """As kernels/hopper_softmax.py, a row at a time."""
    scores, before = (s * factor).tensor, reference.tensor[:, :1]

    def parts(weights: Tensor) -> Tensor:
        return weights.reshape(64, -1, 4, 2).sum((1, 3))

    too_large = (parts(torch.exp2(scores - before)) > LIMIT.value).any(1, keepdim=True)
    maximum = torch.maximum(before, scores.amax(1, keepdim=True))
    after = torch.where(too_large | (before == NOTHING.value) | first, maximum, before)
    weights, shrink = torch.exp2(scores - after), torch.exp2(before - after)
    found = (
        weights.to(dtype),
        after.expand(-1, 4),
        parts(weights),
        shrink.expand(-1, 4),
        ((after != before) | first).expand(-1, 4),
    )
    return tuple(EmulatedTensor(x) for x in found)


class EmulatedGPU:
    """A GPU that runs one kernel."""

    def __init__(self, seed: int, programs: int, instead: dict[str, Any]) -> None:
        self.parties, self.programs = Parties(seed), programs
        self.garbage = torch.Generator().manual_seed(seed)
        language = Language(self)
        self.meanings = dict(
            gl=language,
            tl=language,
            mbarrier=types.SimpleNamespace(
                MBarrierLayout=lambda: Barrier,
                init=init,
                expect=self.expect,
                arrive=self.arrive,
                wait=self.wait,
                invalidate=Barrier.forget,
            ),
            async_copy=types.SimpleNamespace(mbarrier_arrive=self.arrive_each),
            tma=types.SimpleNamespace(store_wait=self.wait_until_read),
            tma_load=self.copy_in,
            tma_store=lambda descriptor, at, memory: self.copy_out(descriptor, at, memory, adds=False),
            tma_add=lambda descriptor, at, memory: self.copy_out(descriptor, at, memory, adds=True),
            fence_async_shared=self.fence,
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.wait_for_products,
            barrier=self.meet,
            with_layout=lambda memory, _layout: Memory(self.parties, memory.tensor, odd_rows_apart=True),
            # whose source is PTX
            take_weights=take_weights,
            as_operand=lambda weights, dtype, _layout: weights,
            scale_rows=lambda acc, shrink, late: acc * shrink[:, :1],
        )
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.meanings |= {name: self.meant(value) for name, value in instead.items()}

    @property
    def me(self) -> Warp:
        return self.parties.about

    def run(self, kernel: Any, arguments: dict[str, Any], resident: int) -> None:
        given = {name: self.argument(x) for name, x in arguments.items() if name not in ("num_warps", "maxnreg")}
        function, numbers = self.meant(kernel), iter(range(self.programs))

        def begin_another() -> None:
            number = next(numbers, None)
            if number is not None:
                self.parties.add(f"program {number}", whole_program, Warp(Program(number), threads=128))

        def whole_program() -> None:
            function(**given)
            self.ends(self.me)
            assert self.me.program.copies == 0, "a copy is on its way into shared memory that goes away"
            begin_another()

        for _ in range(resident):
            begin_another()
        self.parties.run()

    def ends(self, warp: Warp) -> None:
        assert not warp.products, "products that nobody waited for"
        assert all(copy.has_read for copy in warp.copies), "the TMA is to read shared memory that goes away"

    def argument(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self.argument(y) for y in x)
        return Pointer.to(x) if isinstance(x, Tensor) else Descriptor(x) if isinstance(x, TensorDescriptor) else x

    def meant(self, value: Any) -> Any:
        """What a name in a kernel's source stands for: of Triton's functions the Python in them, in this world."""
        if isinstance(value, constexpr):
            return value.value
        python = getattr(value, "fn", None)
        if not isinstance(python, types.FunctionType):
            return value
        if python not in self.functions:
            world: dict[str, Any] = {}
            self.functions[python] = types.FunctionType(python.__code__, world, python.__name__, python.__defaults__)
            for name in python.__code__.co_names:
                if name in self.meanings:
                    world[name] = self.meanings[name]
                elif name in python.__globals__:
                    world[name] = self.meant(python.__globals__[name])
        return self.functions[python]

    def split_up(self, parts: list[tuple[Any, tuple[Any, ...]]], sizes: list[int], _registers: list[int]) -> None:
        """Into parties of so many warps; the first is of the program's own."""
        program, at_work = self.me.program, 0

        def do(function: Callable[..., None], given: tuple[Any, ...]) -> None:
            nonlocal at_work
            function(*given)
            self.ends(self.me)
            at_work -= 1

        for number, ((function, given), size) in enumerate(zip(parts, [4, *sizes], strict=True)):
            meeting, work = Meeting(size), partial(do, function, given)  # which the world of who calls knows as Python
            for index in range(size):
                name = f"{function.__name__} (party {number}, warp {index}) of program {program.number}"
                self.parties.add(name, work, Warp(program, index, meeting))
            at_work += size
        self.parties.wait(lambda: at_work == 0, "its parties")

    def meet(self) -> None:
        meeting = self.me.meeting
        meeting.here, now = meeting.here + 1, meeting.times
        if meeting.here == meeting.size:
            meeting.here, meeting.times = 0, now + 1
        self.parties.wait(lambda: meeting.times != now, "other warps of its party")

    def fence(self) -> None:
        self.parties.pause()
        self.me.program.unfenced.pop(self.me, None)

    def expect(self, barrier: Barrier, count: int) -> None:
        assert self.me.meeting.size == 1
        barrier.bytes += count
        self.arrive(barrier)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.meet()  # so Triton has it, and one thread arrives for all
        if self.me.index == 0:
            barrier.arrive(count)

    def arrive_each(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        self.parties.pause()
        barrier.arrive(self.me.threads)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        phase = int(phase)
        self.parties.wait(lambda: barrier.phase != phase, f"phase {phase} of {barrier.name}")

    def copy_in(self, descriptor: Descriptor, at: list[Any], barrier: Barrier, memory: Memory) -> None:
        self.parties.pause()
        assert self.me.meeting.size == 1 and memory.shape == descriptor.block and memory.dtype == descriptor.dtype
        part, inside = descriptor.inside(at)
        program = self.me.program
        program.copies += 1
        memory.tensor.fill_(float("nan"))

        def arrives() -> None:
            memory.tensor.zero_()
            memory.tensor[inside] = part
            program.copies -= 1
            barrier.bytes -= descriptor.block_type.nbytes
            barrier.settle()

        self.parties.later("a copy in", arrives)

    def copy_out(self, descriptor: Descriptor, at: list[Any], memory: Memory, adds: bool) -> None:
        self.meet()  # so Triton has it, where warps have written what one thread sends
        if self.me.index > 0:
            return
        assert memory.dtype == descriptor.dtype
        part, inside = descriptor.inside(at)
        ends, copy = memory.read_late(), CopyOut()
        self.me.copies.append(copy)

        def reads() -> None:
            value = ends().view(descriptor.block)[inside]
            copy.has_read = True

            def writes() -> None:
                part.copy_(part + value if adds else value)
                copy.is_done = True

            self.parties.later("a copy out", writes)

        self.parties.later("a copy out", reads)

    def wait_until_read(self, pending: int) -> None:
        earlier = self.me.copies[: max(0, len(self.me.copies) - pending)]
        self.parties.wait(lambda: all(copy.has_read for copy in earlier), "a copy out to have read")
        while self.me.copies and self.me.copies[0].is_done:  # later ones count as long as one before them is under way
            self.me.copies.pop(0)
        self.meet()  # so Triton has it: only one thread knows of copies

    def wait_until_written(self) -> None:
        mine = self.me.copies
        self.parties.wait(lambda: all(copy.is_done for copy in mine), "a copy out to have written")

    def multiply(self, a: Any, b: Memory, acc: EmulatedTensor, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.parties.pause()
        mine = self.me.rows(a)
        own = a.slice(mine.start, mine.stop - mine.start) if isinstance(a, Memory) else a.tensor[mine]
        left = own.read_late() if isinstance(own, Memory) else lambda: own  # registers stay as they are
        right, product = b.read_late(), Product()

        def ends() -> None:
            added = acc.ended if isinstance(acc, Product) else acc.tensor
            assert added is not None
            product.ended = torch.full_like(added, float("nan"))
            product.ended[mine] = left().float() @ right().float()
            if use_acc:
                product.ended += added

        self.me.products.append(ends)
        return product

    def wait_for_products(self, pending: int, deps: tuple[Product, ...]) -> Any:
        self.parties.pause()
        while len(self.me.products) > pending:
            self.me.products.pop(0)()
        assert all(product.ended is not None for product in deps), "a product that is not waited for"
        ended = tuple(EmulatedTensor(product.ended) for product in deps)
        return ended if len(ended) > 1 else ended[0]
