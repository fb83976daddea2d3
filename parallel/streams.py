"""Streams beside a caller's. On a CPU there are none, and everything is done where it stands.

Each stream of a caller has its own beside it. Where an SM is free the lowest number comes first: transfers, and what is small
and waited for (-3), kernels that others wait for (-2), small work that may wait (-1), and at the priority that callers have, a
kernel that fills what all of these leave idle (0).

A large kernel leaves SMs idle in its last wave. Small work that waits on a stream of its own, given after that kernel and
waiting only for what came before it, runs there and stands between no two kernels. Copies need no SM at all.

    sums = Beside(device, "sums")
    sums.follow()                     what comes here waits for what the current stream has been given so far
    with sums.run(): …
    wait = sums.done()                wait() makes the stream that is then current wait for it
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_streams: dict[tuple[torch.cuda.Stream, str], torch.cuda.Stream] = {}
Transfer = Callable[[], object]  # makes the current stream, or on the CPU the caller, wait until something is here


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's own looks for the device at length."""
    number = torch._C._cuda_getCurrentStream(device.index)
    if number not in _current:
        _current[number] = torch.cuda.current_stream(device)
    return _current[number]


_current: dict[tuple[int, int, int], torch.cuda.Stream] = {}


class SideStream:
    """Made, followed and left again on one and the same stream, of the current device."""

    def __init__(self, device: torch.device, use: str, priority: int = -3) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.caller: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.caller = current_stream(device)
            key = self.caller, use
            if key not in _streams:
                _streams[key] = torch.cuda.Stream(device, priority)
            self.stream = _streams[key]

    def follow(self) -> None:
        if self.stream is not None and self.caller is not None:
            self.stream.wait_stream(self.caller)

    def run(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None or self.caller is None else _StreamContext(self.stream, self.caller)

    def behind(self, other: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        """The stream that it was made on, which from now on comes behind what another one was given."""
        if other is not None and self.caller is not None and other != self.caller:
            self.caller.wait_stream(other)
        return self.caller

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what it was given so far."""
        return None if self.stream is None else self.stream.record_event()

    def done(self) -> Transfer:
        return self.waiting_for(self.mark())

    def join(self) -> None:
        """The current stream waits for what was given here so far."""
        self.done()()

    def waiting_for(self, event: torch.cuda.Event | None) -> Transfer:
        return (lambda: None) if event is None else lambda: event.wait(current_stream(self.device))


class CurrentStream(SideStream):
    """The caller's own stream, in the place of one beside it."""

    def __init__(self) -> None:
        self.stream = self.caller = None


class StreamRotation:
    """Kernels on some streams in turn. Each is given before the ones ahead are waited for, and begins on the SMs that their
    last waves leave idle."""

    def __init__(self, streams: list[SideStream]) -> None:
        self.streams = streams
        self.at_work: deque[tuple[Transfer, Callable[[], None]]] = deque()

    def next(self) -> SideStream:
        """The stream whose turn it is: what goes there comes behind what it was given before."""
        self.streams.append(self.streams.pop(0))
        return self.streams[-1]

    def given(self, then: Callable[[], None]) -> None:
        """A kernel, to that stream. `then` is what is to happen once the current stream comes behind it."""
        self.at_work.append((self.streams[-1].done(), then))

    def drain_to(self, count: int) -> None:
        """The current stream comes behind the first of them."""
        while len(self.at_work) > count:
            done, then = self.at_work.popleft()
            done()
            then()

    def before(self, beside: SideStream) -> None:
        """What comes there waits for all kernels so far, as for what the current stream was given."""
        beside.follow()
        with beside.run():
            for done, _ in self.at_work:
                done()


def wait_for_all(device: torch.device) -> None:
    """After an error: the current stream waits for all that stand beside it."""
    if device.type == "cuda":
        caller = current_stream(device)
        for (whose, _), stream in _streams.items():
            if whose == caller:
                caller.wait_stream(stream)


class _StreamContext:
    """torch.cuda.stream, without asking at length where we are."""

    def __init__(self, there: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self.there, self.back = there, back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.there)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.back)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Streams, events and signals are the current device's, which need not be the tensors'."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()
