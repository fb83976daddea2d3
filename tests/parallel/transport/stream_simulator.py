"""GPUs without GPUs: ranks of one process whose work waits on streams and is then done in any order that streams allow.

A GPU's host only gives orders. Here too: each rank's program runs to its end while every operation on memory is put off, with
the stream it was given to. Then a random one of the streams that may go on does its next operation, until all are through;
one of them only goes on when no other can. What no event and no signal keeps in order comes out wrong: memory starts as NaN,
and becomes NaN once more where the stream comes by that it was made on, which may have used it for something else until then.
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

Stream = tuple[int, str]  # a rank's


class SimulatedMachine:
    """Streams of all ranks. An order is (run, ready): it is done when it is the first of its stream and ready."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks, self.random = ranks, random.Random(seed)
        self.queues: dict[Stream, deque[tuple[Callable[[], Any], Callable[[], bool]]]] = {}
        self.current: Stream = 0, "kernels"
        self.shown: dict[int, list[Tensor]] = {}  # symmetric memory, in the order in which it is made
        self.made = [0] * ranks
        self.told: Counter[tuple[int, int, int]] = Counter()  # what they count, from whom, to whom

    def give(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True, stream: Stream | None = None) -> None:
        self.queues.setdefault(stream or self.current, deque()).append((run, ready))

    def record(self, stream: Stream) -> list[bool]:
        passed: list[bool] = []
        self.give(lambda: passed.append(True), stream=stream)
        return passed

    def wait(self, stream: Stream, event: list[bool]) -> None:
        self.give(lambda: None, lambda: bool(event), stream)

    def run(self, held: bool = False) -> None:
        """To the end, or as far as streams come while an order is held that is never ready."""
        late = self.random.choice(list(self.queues))
        while waiting := [stream for stream, queue in self.queues.items() if queue]:
            able = [stream for stream in waiting if self.queues[stream][0][1]()]
            if held and not able:
                return
            assert able, "all streams wait for each other"
            chosen = self.random.choice([stream for stream in able if stream != late] or able)
            self.queues[chosen].popleft()[0]()


class PutOff(TorchDispatchMode):
    """Operations on memory become orders; views and new memory are there at once."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            self.machine.give(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        result.born_on = self.machine.current  # whose memory it is when it is given back
        if "empty" in func.__name__:
            if result.is_floating_point():  # the allocator gives what its stream may be using still, for something else
                memory = result.fill_(torch.nan).detach()
                self.machine.give(lambda: memory.fill_(torch.nan))
            return result
        self.machine.give(lambda: result.copy_(func(*args, **kwargs)))
        return result


def nans(count: int) -> Tensor:
    return torch.frombuffer(bytearray(b"\xff") * count, dtype=torch.uint8)


@contextmanager
def installed(machine: SimulatedMachine, in_memory: bool) -> Iterator[None]:
    """`parallel.copy_engines`, the ring and what moves gradients home, given to the machine's streams.

    Kernels may leave additions to dq to the memory, and then several add to it at a time.
    """

    class SimulatedSideStream:
        def __init__(self, device: torch.device, use: str, priority: int = -3) -> None:
            self.caller = machine.current
            self.stream = self.caller[0], f"{use} beside {self.caller[1]}"

        def follow(self) -> None:
            assert machine.current == self.caller
            machine.wait(self.stream, machine.record(self.caller))

        @contextmanager
        def run(self) -> Iterator[None]:
            assert machine.current == self.caller
            machine.current = self.stream
            yield
            machine.current = self.caller

        def behind(self, other: Stream | None) -> Stream:
            if other is not None and other != self.caller:
                machine.wait(self.caller, machine.record(other))
            return self.caller

        def mark(self) -> SimpleNamespace:
            event = machine.record(self.stream)
            return SimpleNamespace(wait=lambda: machine.wait(machine.current, event))

        def waiting_for(self, event: SimpleNamespace) -> Callable[[], None]:
            return event.wait

        def done(self) -> Callable[[], None]:
            return self.waiting_for(self.mark())

        def join(self) -> None:
            self.done()()

    def rendezvous(memory: Tensor, group: Any) -> SimpleNamespace:
        rank = machine.current[0]
        index, machine.made[rank] = machine.made[rank], machine.made[rank] + 1
        everyone = machine.shown.setdefault(index, [nans(memory.numel()) for _ in range(machine.ranks)])

        def get_buffer(owner: int, shape: tuple[int, ...], dtype: torch.dtype, begin: int) -> Tensor:
            count = torch.Size(shape).numel()
            return everyone[owner].view(dtype)[begin : begin + count].view(shape)

        return SimpleNamespace(get_buffer=get_buffer)

    class SimulatedSignals:
        def __init__(self, group: Any, device: torch.device) -> None:
            self.rank = machine.current[0]

        def tell(self, what: int, count: int, ranks: Iterable[int]) -> None:
            def run() -> None:
                for other in ranks:
                    machine.told[what, self.rank, other] = count

            machine.give(run)

        def meet(self, what: int, count: int, told: Iterable[int], awaited: Iterable[int]) -> None:
            self.tell(what, count, told)
            self.wait(what, count, awaited)

        def wait(self, what: int, count: int, ranks: Iterable[int]) -> None:
            whose = [(what, other, self.rank) for other in ranks]
            machine.give(lambda: None, lambda: all(machine.told[key] >= count for key in whose))

    def delta(dout: Tensor, out: Tensor, *args: Any, **options: Any) -> Tensor:
        result = dout.new_empty((dout.shape[0], dout.shape[2], dout.shape[1]), dtype=accumulation_dtype(dout.dtype))
        machine.give(lambda: result.copy_(output_delta(dout, out, *args, **options)))
        return result

    def put_off(kernel: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **options: machine.give(lambda: kernel(*args, **options))

    def backward(*args: Any, **options: Any) -> None:
        """In two orders, as a kernel reads early what it adds to and writes it late: what comes between is lost."""
        inputs, gradients, rest = args[:9], args[9:12], args[12:]
        sums: list[Tensor] = []
        added = gradients[:1] if in_memory and options["accumulate"] else ()

        def read() -> None:
            sums.extend(torch.zeros_like(x) if any(x is y for y in added) else x.clone() for x in gradients)
            block_backward(*inputs, *sums, *rest, **options)

        def write() -> None:
            for x, y in zip(gradients, sums, strict=True):
                x.copy_(x + y if any(x is z for z in added) else y)

        machine.give(read)
        machine.give(write)

    fakes: list[tuple[Any, str, Any]] = [
        (module, "SideStream", SimulatedSideStream) for module in (copy_engine, gradient_return, ring)
    ]
    fakes += [(ring, "adds_in_memory", lambda *_, **__: in_memory)]
    fakes += [(ring, "output_delta", delta), (ring, "block_forward", put_off(block_forward))]
    fakes += [(ring, "block_backward", backward), (copy_engine, "settle", lambda device: None)]
    fakes += [
        (copy_engine, "GpuSignals", SimulatedSignals),
        (copy_engine, "progress", SimpleNamespace(hop=lambda *_: None, expect=lambda *_, **__: None)),
    ]
    fakes += [(copy_engine, "symmetric_memory", SimpleNamespace(empty=torch.empty, rendezvous=rendezvous))]
    saved = [(module, name, getattr(module, name)) for module, name, _ in fakes]
    for module, name, fake in fakes:
        setattr(module, name, fake)
    try:
        with PutOff(machine):
            yield
    finally:
        for module, name, right in saved:
            setattr(module, name, right)
