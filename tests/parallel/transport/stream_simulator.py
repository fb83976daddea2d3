"""Stream simulator: ranks of one process whose operations run in any order that streams, events and signals allow.

Each rank's program runs to its end first, as the host of a GPU does: every operation on memory is enqueued on its stream
instead. Then the next operation of a random stream that is ready runs, until all queues are empty. One stream runs only when no
other one is ready. A missing event or signal therefore shows as a wrong result. Memory starts as NaN. It becomes NaN again when
the stream that allocated it reaches the allocation, because its previous tensor may be in use until then.

Each operation also has a vector clock: how many operations of each stream come before it in every order. From these `Accesses`
finds races whatever the order of this run, and tests read which transfers a kernel waits for.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel import gradient_return, ring, ring_overlapped
from ringspan.parallel.transport import copy_engine
from tests.parallel.transport.accesses import Accesses, addresses

Stream = tuple[int, str]  # rank, name
Clock = Counter[Stream]  # number of operations per stream
Event = list[Clock]  # the clock at the event, once it has completed
SignalKey = tuple[int, int, int]  # kind, rank that signals, rank that waits


class Label(NamedTuple):
    """A kernel, or the transfer of rows that a rank uses."""

    kind: str  # "kernel", "kv" or "gradients"
    call: int
    rank: int  # that runs the kernel, or that uses the rows
    step: int
    part: int = 0  # of a call's remote gradients: the one that is written or moved, from 1 on


@dataclass
class Operation:
    run: Callable[[], Any]
    is_ready: Callable[[], bool] = lambda: True  # whether the event has completed
    has_signals: Callable[[], bool] = lambda: True
    is_event: bool = False  # the record of an event, or a wait for one
    label: Label | None = None
    reads: Iterable[Tensor] = ()
    writes: Iterable[Tensor] = ()
    adds: Iterable[Tensor] = ()  # atomically


class Moved(NamedTuple):
    """Elements that a transfer moves."""

    label: Label
    sender: int
    receiver: int
    storage: int  # of the sender, and addresses in it
    addresses: list[int]


@dataclass
class SimulatedMachine:
    """Streams of all ranks. An operation runs when it is the first of its stream and ready."""

    ranks: int
    seed: int
    queues: dict[Stream, deque[Operation]] = field(default_factory=dict)
    current: Stream = (0, "kernels")
    symmetric_memory: dict[int, list[Tensor]] = field(default_factory=dict)  # of all ranks, by order of allocation
    num_allocations: Counter[int] = field(default_factory=Counter)  # by rank
    is_graph: bool = False  # ranks replay CUDA graphs
    signals: dict[SignalKey, Clock] = field(default_factory=dict)  # that are set: the clock of the signal
    captured: set[Stream] = field(default_factory=set)  # streams of the graph that is being captured
    cleared: dict[SignalKey, tuple[Stream, int]] = field(default_factory=dict)  # the operation that cleared the last one
    clocks: dict[Stream, Clock] = field(default_factory=lambda: defaultdict(Counter))
    accesses: Accesses = field(default_factory=Accesses)
    label: Label | None = None  # of the transfers that are being enqueued
    call: int = 0  # of the ring, and the plan of its steps and the part that the next kernel writes
    plan: Any = None
    part: int = 0
    labelled: list[tuple[Label, Stream, Clock]] = field(default_factory=list)  # operations with a label that have run
    moved: list[Moved] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def enqueue(
        self, run: Callable[[], Any], is_ready: Callable[[], bool] = lambda: True, stream: Stream | None = None, **more: Any
    ) -> None:
        self.queues.setdefault(stream or self.current, deque()).append(Operation(run, is_ready, **more))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work that the current stream and others enqueue; all of it must be joined to the current stream."""
        caller, self.captured = self.current, {self.current}
        yield
        work = {
            stream: [number for number, operation in enumerate(self.queues.get(stream, ()), 1) if not operation.is_event]
            for stream in self.captured
        }

        def check() -> None:
            late = [stream for stream, numbers in work.items() if numbers and self.clocks[caller][stream] < numbers[-1]]
            self.accesses.races += [f"work on {stream} is not joined to the stream of the graph" for stream in late]

        self.enqueue(check)

    def record(self, stream: Stream) -> Event:
        assert not self.is_graph or stream in self.captured, f"{stream} is not captured"
        event: Event = []
        self.enqueue(lambda: event.append(self.clocks[stream].copy()), stream=stream, is_event=True)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self.captured.add(stream)
        self.enqueue(lambda: self.join(stream, event[0]), lambda: bool(event), stream, is_event=True)

    def join(self, stream: Stream, clock: Clock) -> None:
        """Later operations of `stream` come after those that `clock` counts."""
        self.clocks[stream] |= clock

    def output_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        result = dout.new_empty((dout.shape[0], dout.shape[2], dout.shape[1]), dtype=accumulation_dtype(dout.dtype))
        self.enqueue(lambda: result.copy_(output_delta(dout, out)), reads=(dout, out), writes=(result,))
        return result

    def run(self, may_stall: bool = False) -> None:
        """Run all operations; with `may_stall`, as many as can run while some are never ready."""
        late = self.random.choice(list(self.queues))
        blocking: dict[int, Stream] = {}  # by rank, in a graph
        while pending := [stream for stream, queue in self.queues.items() if queue]:
            if self.is_graph:
                self.choose_blocking(pending, blocking)
                pending = list(blocking.values())
            ready = [stream for stream in pending if self.queues[stream][0].is_ready() and self.queues[stream][0].has_signals()]
            if may_stall and not ready:
                return
            assert ready, "all streams wait for each other"
            stream = self.random.choice([stream for stream in ready if stream != late] or ready)
            blocking.pop(stream[0], None)
            operation = self.queues[stream].popleft()
            self.clocks[stream][stream] += 1
            operation.run()
            name = f"{operation.label or 'an operation'} on {stream}"
            self.accesses.check(name, stream, self.clocks[stream], operation.reads, operation.writes, operation.adds)
            if operation.label is not None:
                self.labelled.append((operation.label, stream, self.clocks[stream].copy()))

    def choose_blocking(self, pending: list[Stream], blocking: dict[int, Stream]) -> None:
        """Choose each rank's next stream: a graph may run one branch at a time, also one that waits for a signal."""
        for rank in range(self.ranks):
            streams = [stream for stream in pending if stream[0] == rank and self.queues[stream][0].is_ready()]
            if streams and rank not in blocking:
                blocking[rank] = self.random.choice(streams)

    def kernel_label(self, k_at: Any) -> Label:
        """Return the label of a kernel by the positions of its keys; those of the local block may be some of a step's."""
        steps = [index for index, step in enumerate(self.plan.steps) if index and step.k_at == k_at]
        step = steps[0] if steps else 0
        return Label("kernel", self.call, self.current[0], step, self.part)

    def rank_of(self, x: Tensor) -> int:
        """Return the rank in whose symmetric memory a tensor is."""
        storage = x.untyped_storage().data_ptr()
        ranks = [
            rank
            for buffers in self.symmetric_memory.values()
            for rank, memory in enumerate(buffers)
            if memory.untyped_storage().data_ptr() == storage
        ]
        assert len(ranks) == 1
        return ranks[0]

    def copy(self, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        """Enqueue the copies of a transfer. One of the two sides is in another rank's symmetric memory."""
        for target, source in zip(targets, sources, strict=True):
            assert self.label is not None
            here = self.current[0]
            sender, receiver = (here, self.rank_of(target)) if self.label.kind == "kv" else (self.rank_of(source), here)
            label = self.label._replace(rank=receiver)
            storage = source.untyped_storage().data_ptr()
            self.moved.append(Moved(label, sender, receiver, storage, addresses(source).tolist()))
            self.enqueue(
                lambda target=target, source=source: target.copy_(source), label=label, reads=(source,), writes=(target,)
            )


class EnqueueOperations(TorchDispatchMode):
    """Enqueues operations on memory; creates views and new tensors at once."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        leaves = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, list | tuple) else (x,))]
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        if any(is_written):
            target = kwargs.get("out", args[0])
            self.machine.enqueue(lambda: func(*args, **kwargs), reads=inputs, writes=(target,))
            return target
        result = func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        result.allocated_on = self.machine.current  # the stream that may reuse the memory when it is freed
        if "empty" in func.__name__:
            if result.is_floating_point():  # the allocator returns memory that its stream may still use for a freed tensor
                memory = result.fill_(torch.nan).detach()
                self.machine.enqueue(lambda: memory.fill_(torch.nan), writes=(memory,))
            return result
        self.machine.enqueue(lambda: result.copy_(func(*args, **kwargs)), reads=inputs, writes=(result,))
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

        def signal(self, kind: int, ranks: Iterable[int]) -> None:
            def run() -> None:
                for target in ranks:
                    key = kind, self.rank, target
                    clearing_stream, number = machine.cleared.get(key, (stream, 0))
                    if key in machine.signals or machine.clocks[stream][clearing_stream] < number:
                        machine.accesses.races.append(
                            f"signal {kind} of rank {self.rank} may be set before rank {target} has cleared the last one"
                        )
                    machine.signals[key] = machine.clocks[stream].copy()

            stream = machine.current
            machine.enqueue(run)

        def wait(self, kind: int, ranks: Iterable[int]) -> None:
            keys = [(kind, source, self.rank) for source in ranks]
            stream = machine.current

            def run() -> None:
                for key in keys:
                    machine.join(stream, machine.signals.pop(key))
                    machine.cleared[key] = stream, machine.clocks[stream][stream]

            machine.enqueue(run, has_signals=lambda: all(key in machine.signals for key in keys))

    def simulated_forward(*args: Any, **options: Any) -> None:
        q, k, v, _, _, k_at, carry, *_ = args
        reads = [x for x in (q, k, v, *(carry or ())) if x is not None]
        label = machine.kernel_label(k_at)
        machine.enqueue(lambda: block_forward(*args, **options), label=label, reads=reads, writes=options["into"])

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

        label, others = machine.kernel_label(args[8]), gradients[len(atomic) :]
        machine.enqueue(read, label=label, reads=inputs[:6], writes=others, adds=atomic)
        machine.enqueue(write, label=label, writes=others, adds=atomic)

    replacements: list[tuple[Any, str, Any]] = [
        (module, "SideStream", SimulatedSideStream) for module in (copy_engine, gradient_return, ring_overlapped)
    ]
    for module in (ring, ring_overlapped):
        replacements += [(module, "block_forward", simulated_forward), (module, "block_backward", simulated_backward)]
    replacements += [
        (copy_engine, "copy", machine.copy),
        (copy_engine, "synchronize", lambda device: None),
        (copy_engine, "is_capturing", lambda _: machine.is_graph),
        (copy_engine, "check_not_capturing", lambda _: None),
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
