"""An emulated GPU: thread blocks, their warps, asynchronous copies and matmuls, and the meaning of names in a kernel."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from ringspan.kernels.backends.hopper.online_softmax import NO_REFERENCE, SUM_LIMIT
from tests.kernels.backends.hopper.emulator.language import Language
from tests.kernels.backends.hopper.emulator.memory import Barrier, PendingStore, SharedMemory, ThreadBlock, Warp, WarpSync
from tests.kernels.backends.hopper.emulator.scheduler import Scheduler
from tests.kernels.backends.hopper.emulator.values import Descriptor, EmulatedTensor, MatmulResult, Pointer


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def compute_weights(
    s: EmulatedTensor, factor: Any, reference: EmulatedTensor, dtype: torch.dtype, first: bool
) -> tuple[EmulatedTensor, ...]:
    """Compute what online_softmax.compute_weights does, one row at a time."""
    scores, old = (s * factor).tensor, reference.tensor[:, :1]

    def thread_sums(weights: Tensor) -> Tensor:
        return weights.reshape(64, -1, 4, 2).sum((1, 3))

    too_large = (thread_sums(torch.exp2(scores - old)) > SUM_LIMIT.value).any(1, keepdim=True)
    maximum = torch.maximum(old, scores.amax(1, keepdim=True))
    new = torch.where(too_large | (old == NO_REFERENCE.value) | first, maximum, old)
    weights, rescale = torch.exp2(scores - new), torch.exp2(old - new)
    results = (
        weights.to(dtype),
        new.expand(-1, 4),
        thread_sums(weights),
        rescale.expand(-1, 4),
        ((new != old) | first).expand(-1, 4),
    )
    return tuple(EmulatedTensor(x) for x in results)


class EmulatedGPU:
    """Runs one kernel, `resident` thread blocks at a time, in an order that the seed determines.

    overrides: other meanings of names in the kernel's source.
    """

    def __init__(self, seed: int, num_blocks: int, overrides: dict[str, Any]) -> None:
        self.scheduler, self.num_blocks = Scheduler(seed), num_blocks
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
                invalidate=Barrier.invalidate,
            ),
            async_copy=types.SimpleNamespace(mbarrier_arrive=self.arrive_per_thread),
            tma=types.SimpleNamespace(store_wait=self.store_wait),
            tma_load=self.tma_load,
            tma_store=lambda descriptor, coordinates, memory: self.tma_store(descriptor, coordinates, memory, adds=False),
            tma_add=lambda descriptor, coordinates, memory: self.tma_store(descriptor, coordinates, memory, adds=True),
            fence_async_shared=self.fence,
            warpgroup_mma=self.warpgroup_mma,
            warpgroup_mma_wait=self.warpgroup_mma_wait,
            wait_matmuls=self.wait_matmuls,
            barrier=self.sync_warps,
            with_layout=lambda memory, _layout: SharedMemory(self.scheduler, memory.tensor, odd_rows_swapped=True),
            # functions that are PTX in the kernels
            compute_weights=compute_weights,
            as_operand=lambda weights, dtype, _layout: weights,
            scale_rows=lambda acc, rescale, _needs_rescale: acc * rescale[:, :1],
        )
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.meanings |= {name: self.translate(value) for name, value in overrides.items()}

    @property
    def warp(self) -> Warp:
        """The running warp."""
        return self.scheduler.context

    def run(self, kernel: Any, arguments: dict[str, Any], resident: int) -> None:
        args = {name: self.argument(x) for name, x in arguments.items() if name not in ("num_warps", "maxnreg")}
        function, indices = self.translate(kernel), iter(range(self.num_blocks))

        def start_next_block() -> None:
            index = next(indices, None)
            if index is not None:
                self.scheduler.add(f"thread block {index}", run_block, Warp(ThreadBlock(index), threads=128))

        def run_block() -> None:
            function(**args)
            self.check_end(self.warp)
            assert self.warp.block.pending_copies == 0, "a thread block ends while a copy into its shared memory is in flight"
            start_next_block()

        for _ in range(resident):
            start_next_block()
        self.scheduler.run()

    def check_end(self, warp: Warp) -> None:
        """Assert that a warp has waited for its asynchronous operations."""
        assert not warp.pending_matmuls, "a warp ends before it has waited for its matmuls"
        assert all(copy.has_read for copy in warp.pending_copies), "a warp ends before the TMA has read its shared memory"

    def argument(self, x: Any) -> Any:
        """Return a kernel argument as the emulated kernel sees it."""
        if isinstance(x, tuple):
            values = [self.argument(y) for y in x]
            return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
        return Pointer.to(x) if isinstance(x, Tensor) else Descriptor(x) if isinstance(x, TensorDescriptor) else x

    def translate(self, value: Any) -> Any:
        """Return the meaning of a value in a kernel's source: jit functions become Python functions with emulated globals."""
        if isinstance(value, constexpr):
            return value.value
        source = getattr(value, "fn", None)
        if not isinstance(source, types.FunctionType):
            return value
        if source not in self.functions:
            namespace: dict[str, Any] = {}
            self.functions[source] = types.FunctionType(source.__code__, namespace, source.__name__, source.__defaults__)
            for name in source.__code__.co_names:
                if name in self.meanings:
                    namespace[name] = self.meanings[name]
                elif name in source.__globals__:
                    namespace[name] = self.translate(source.__globals__[name])
        return self.functions[source]

    def warp_specialize(self, roles: list[tuple[Any, tuple[Any, ...]]], sizes: list[int], _registers: list[int]) -> None:
        """Run each role with its number of warps; the first role has the thread block's own four."""
        block, running = self.warp.block, 0

        def run_role(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            nonlocal running
            function(*args)
            self.check_end(self.warp)
            running -= 1

        for number, ((function, args), size) in enumerate(zip(roles, [4, *sizes], strict=True)):
            sync, role = WarpSync(size), partial(run_role, function, args)  # `function` is translated already
            for index in range(size):
                name = f"{function.__name__} (role {number}, warp {index}) of thread block {block.number}"
                self.scheduler.add(name, role, Warp(block, index, sync))
            running += size
        self.scheduler.wait(lambda: running == 0, "its roles")

    def sync_warps(self) -> None:
        """Wait until all warps of the role are here."""
        sync = self.warp.sync
        sync.arrived, generation = sync.arrived + 1, sync.generation
        if sync.arrived == sync.size:
            sync.arrived, sync.generation = 0, generation + 1
        self.scheduler.wait(lambda: sync.generation != generation, "other warps of its role")

    def fence(self) -> None:
        self.scheduler.pause()
        self.warp.block.unfenced.pop(self.warp, None)

    def expect(self, barrier: Barrier, count: int) -> None:
        assert self.warp.sync.size == 1
        barrier.pending_bytes += count
        self.arrive(barrier)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.sync_warps()  # Triton inserts this barrier; then one thread arrives for all
        if self.warp.index == 0:
            barrier.arrive(count)

    def arrive_per_thread(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        self.scheduler.pause()
        barrier.arrive(self.warp.threads)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        phase = int(phase)
        self.scheduler.wait(lambda: barrier.phase != phase, f"phase {phase} of {barrier.name}")

    def tma_load(self, descriptor: Descriptor, coordinates: list[Any], barrier: Barrier, memory: SharedMemory) -> None:
        self.scheduler.pause()
        assert self.warp.sync.size == 1 and memory.shape == descriptor.block and memory.dtype == descriptor.dtype
        region, in_block = descriptor.clip(coordinates)
        block = self.warp.block
        block.pending_copies += 1
        memory.tensor.fill_(float("nan"))

        def deliver() -> None:
            memory.tensor.zero_()
            memory.tensor[in_block] = region
            block.pending_copies -= 1
            barrier.pending_bytes -= descriptor.block_type.nbytes
            barrier.complete_if_done()

        self.scheduler.add_event("a copy in", deliver)

    def tma_store(self, descriptor: Descriptor, coordinates: list[Any], memory: SharedMemory, adds: bool) -> None:
        self.sync_warps()  # Triton inserts this barrier; then one thread sends what all warps have written
        if self.warp.index > 0:
            return
        assert memory.dtype == descriptor.dtype
        region, in_block = descriptor.clip(coordinates)
        end_read, copy = memory.begin_read(), PendingStore()
        self.warp.pending_copies.append(copy)

        def read() -> None:
            value = end_read().view(descriptor.block)[in_block]
            copy.has_read = True

            def write() -> None:
                region.copy_(region + value if adds else value)
                copy.is_done = True

            self.scheduler.add_event("a copy out", write)

        self.scheduler.add_event("a copy out", read)

    def store_wait(self, pending: int) -> None:
        earlier = self.warp.pending_copies[: max(0, len(self.warp.pending_copies) - pending)]
        self.scheduler.wait(lambda: all(copy.has_read for copy in earlier), "a copy out to have read")
        copies = self.warp.pending_copies
        while copies and copies[0].is_done:  # a copy counts as pending while an earlier one is
            copies.pop(0)
        self.sync_warps()  # Triton inserts this barrier, because only one thread has the copies

    def wait_until_stored(self) -> None:
        copies = self.warp.pending_copies
        self.scheduler.wait(lambda: all(copy.is_done for copy in copies), "a copy out to have written")

    def warpgroup_mma(
        self, a: Any, b: SharedMemory, acc: EmulatedTensor, use_acc: bool = True, is_async: bool = False
    ) -> MatmulResult:
        assert is_async
        self.scheduler.pause()
        rows = self.warp.rows(a)
        own_rows = a.slice(rows.start, rows.stop - rows.start) if isinstance(a, SharedMemory) else a.tensor[rows]
        left = own_rows.begin_read() if isinstance(own_rows, SharedMemory) else lambda: own_rows  # registers do not change
        right, result = b.begin_read(), MatmulResult()

        def compute() -> None:
            addend = acc.value if isinstance(acc, MatmulResult) else acc.tensor
            assert addend is not None
            result.value = torch.full_like(addend, float("nan"))
            result.value[rows] = left().float() @ right().float()
            if use_acc:
                result.value += addend

        self.warp.pending_matmuls.append(compute)
        return result

    def warpgroup_mma_wait(self, pending: int, deps: tuple[MatmulResult, ...]) -> Any:
        self.scheduler.pause()
        while len(self.warp.pending_matmuls) > pending:
            self.warp.pending_matmuls.pop(0)()
        assert all(result.value is not None for result in deps), "a matmul result is used that this wait does not cover"
        results = tuple(EmulatedTensor(result.value) for result in deps)
        return results if len(results) > 1 else results[0]

    def wait_matmuls(self, pending: int, *values: Any) -> Any:
        """Wait for matmul results and tuples of them (chunks.py)."""

        def wait(x: Any) -> Any:
            return self.meanings["warpgroup_mma_wait"](pending, deps=(x,))

        waited = tuple(tuple(map(wait, value)) if isinstance(value, tuple) else wait(value) for value in values)
        return waited if len(waited) > 1 else waited[0]
