"""Stream simulator: ranks of one process whose operations run in any order that streams, events and signals allow.

Each rank's program runs to its end first, as the host of a GPU does: every operation on memory is enqueued on its stream
instead. Then the next operation of a random stream that is ready runs, until all queues are empty. One stream runs only when no
other one is ready. A missing event or signal therefore shows as a wrong result. Memory starts as NaN. It becomes NaN again when
the stream that allocated it reaches the allocation, because its previous tensor may be in use until then.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel import gradient_return, ring
from ringspan.parallel.transport import copy_engine

Stream = tuple[int, str]  # rank, name
Event = list[bool]  # not empty once the event has completed


class SimulatedMachine:
    """Streams of all ranks. A queue entry is (run, is_ready): it runs when it is the first of its stream and ready."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks, self.random = ranks, random.Random(seed)
        self.queues: dict[Stream, deque[tuple[Callable[[], Any], Callable[[], bool]]]] = {}
        self.current: Stream = 0, "kernels"
        self.symmetric_memory: dict[int, list[Tensor]] = {}  # of all ranks, by order of allocation
        self.num_allocations = [0] * ranks
        self.signals: Counter[tuple[int, int, int]] = Counter()  # counts by kind, source rank, target rank

    def enqueue(
        self, run: Callable[[], Any], is_ready: Callable[[], bool] = lambda: True, stream: Stream | None = None
    ) -> None:
        self.queues.setdefault(stream or self.current, deque()).append((run, is_ready))

    def record(self, stream: Stream) -> Event:
        event: Event = []
        self.enqueue(lambda: event.append(True), stream=stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self.enqueue(lambda: None, lambda: bool(event), stream)

    def output_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        result = dout.new_empty((dout.shape[0], dout.shape[2], dout.shape[1]), dtype=accumulation_dtype(dout.dtype))
        self.enqueue(lambda: result.copy_(output_delta(dout, out)))
        return result

    def run(self, may_stall: bool = False) -> None:
        """Run all operations; with `may_stall`, as many as can run while some are never ready."""
        late = self.random.choice(list(self.queues))
        while pending := [stream for stream, queue in self.queues.items() if queue]:
            ready = [stream for stream in pending if self.queues[stream][0][1]()]
            if may_stall and not ready:
                return
            assert ready, "all streams wait for each other"
            chosen = self.random.choice([stream for stream in ready if stream != late] or ready)
            self.queues[chosen].popleft()[0]()


class EnqueueOperations(TorchDispatchMode):
    """Enqueues operations on memory; creates views and new tensors at once."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            self.machine.enqueue(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        result.allocated_on = self.machine.current  # the stream that may reuse the memory when it is freed
        if "empty" in func.__name__:
            if result.is_floating_point():  # the allocator returns memory that its stream may still use for a freed tensor
                memory = result.fill_(torch.nan).detach()
                self.machine.enqueue(lambda: memory.fill_(torch.nan))
            return result
        self.machine.enqueue(lambda: result.copy_(func(*args, **kwargs)))
        return result


def nan_bytes(count: int) -> Tensor:
    return torch.frombuffer(bytearray(b"\xff") * count, dtype=torch.uint8)


@contextmanager
def simulated_streams(machine: SimulatedMachine, is_atomic: bool) -> Iterator[None]:
    """Run the ring, the gradient return and the copy engine transport on the machine's streams.

    With `is_atomic` kernels add to dq atomically, and several do so concurrently.
    """

    class SimulatedSideStream:
        def __init__(self, device: torch.device, name: str, priority: int = -3) -> None:
            self.caller = machine.current
            self.stream = self.caller[0], f"{name} of {self.caller[1]}"

        def wait_for_caller(self) -> None:
            assert machine.current == self.caller
            machine.wait(self.stream, machine.record(self.caller))

        @contextmanager
        def run(self) -> Iterator[None]:
            assert machine.current == self.caller
            machine.current = self.stream
            yield
            machine.current = self.caller

        def order_caller_after(self, previous: Stream | None) -> Stream:
            if previous is not None and previous != self.caller:
                machine.wait(self.caller, machine.record(previous))
            return self.caller

        def record(self) -> SimpleNamespace:
            event = machine.record(self.stream)
            return SimpleNamespace(wait=lambda: machine.wait(machine.current, event))

        def wait_for(self, event: SimpleNamespace) -> Callable[[], None]:
            return event.wait

        def completion(self) -> Callable[[], None]:
            return self.wait_for(self.record())

        def join(self) -> None:
            self.completion()()

    def rendezvous(memory: Tensor, group: Any) -> SimpleNamespace:
        rank = machine.current[0]
        index, machine.num_allocations[rank] = machine.num_allocations[rank], machine.num_allocations[rank] + 1
        buffers = machine.symmetric_memory.setdefault(index, [nan_bytes(memory.numel()) for _ in range(machine.ranks)])

        def get_buffer(owner: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
            count = torch.Size(shape).numel()
            return buffers[owner].view(dtype)[offset : offset + count].view(shape)

        return SimpleNamespace(get_buffer=get_buffer)

    class SimulatedSignals:
        def __init__(self, group: Any, device: torch.device) -> None:
            self.rank = machine.current[0]

        def signal(self, kind: int, count: int, ranks: Iterable[int]) -> None:
            def run() -> None:
                for target in ranks:
                    machine.signals[kind, self.rank, target] = count

            machine.enqueue(run)

        def signal_and_wait(self, kind: int, count: int, targets: Iterable[int], sources: Iterable[int]) -> None:
            self.signal(kind, count, targets)
            self.wait(kind, count, sources)

        def wait(self, kind: int, count: int, ranks: Iterable[int]) -> None:
            keys = [(kind, source, self.rank) for source in ranks]
            machine.enqueue(lambda: None, lambda: all(machine.signals[key] >= count for key in keys))

    def simulated_forward(*args: Any, **options: Any) -> None:
        machine.enqueue(lambda: block_forward(*args, **options))

    def simulated_backward(*args: Any, **options: Any) -> None:
        """Two operations: a kernel reads early what it adds to and writes it late, so a write between them is lost."""
        inputs, gradients, rest = args[:9], args[9:12], args[12:]
        sums: list[Tensor] = []
        atomic = gradients[:1] if is_atomic and options["accumulate"] else ()

        def read() -> None:
            sums.extend(torch.zeros_like(x) if any(x is y for y in atomic) else x.clone() for x in gradients)
            block_backward(*inputs, *sums, *rest, **options)

        def write() -> None:
            for x, y in zip(gradients, sums, strict=True):
                x.copy_(x + y if any(x is z for z in atomic) else y)

        machine.enqueue(read)
        machine.enqueue(write)

    replacements: list[tuple[Any, str, Any]] = [
        (module, "SideStream", SimulatedSideStream) for module in (copy_engine, gradient_return, ring)
    ]
    replacements += [
        (ring, "adds_dq_atomically", lambda *_, **__: is_atomic),
        (ring, "block_forward", simulated_forward),
        (ring, "block_backward", simulated_backward),
        (copy_engine, "synchronize", lambda device: None),
        (copy_engine, "GpuSignals", SimulatedSignals),
        (copy_engine, "progress", SimpleNamespace(hop=lambda *_: None, expect=lambda *_, **__: None)),
        (copy_engine, "symmetric_memory", SimpleNamespace(empty=torch.empty, rendezvous=rendezvous)),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, replacement in replacements:
        setattr(module, name, replacement)
    try:
        with EnqueueOperations(machine):
            yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
