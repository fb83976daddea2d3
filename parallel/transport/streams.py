"""Side streams: extra CUDA streams of a caller, on which transfers and small operations overlap its kernels.

    sums = SideStream(device, "sums")
    sums.wait_for_caller()            work enqueued here starts after all work enqueued on the caller's stream so far
    with sums.run(): …                enqueue on this stream
    wait = sums.completion()          wait() makes the then current stream wait for it

Each caller stream has its own side streams, by name. On a CPU there are none, and work runs immediately. The priority orders
thread blocks when an SM is free; lower numbers go first:

    -3  transfers, and small operations that other work waits for      -1  small operations that may wait
    -2  kernels that other work waits for                               0  filler kernels, at the callers' priority

A large kernel leaves SMs idle in its last wave. A small operation that is enqueued after the kernel, and waits only for work
before it, runs on those SMs and delays no kernel. Copies by copy engines need no SM.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Wait = Callable[[], object]  # makes the current stream, or on a CPU the host, wait for one operation

# By caller stream and name: the stream, and the event with which it waits for the caller. Making an event takes host time.
_side_streams: dict[tuple[torch.cuda.Stream, str], tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
_current_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device. Cached, because torch.cuda.current_stream resolves its device argument slowly."""
    key = torch._C._cuda_getCurrentStream(device.index)
    if key not in _current_streams:
        _current_streams[key] = torch.cuda.current_stream(device)
    return _current_streams[key]


class SideStream:
    """Extra stream of the stream that is current when it is created, its caller, on the current device."""

    def __init__(self, device: torch.device, name: str, priority: int = -3) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.caller: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.caller = current_stream(device)
            key = self.caller, name
            if key not in _side_streams:
                _side_streams[key] = torch.cuda.Stream(device, priority), torch.cuda.Event()
            self.stream, self.caller_event = _side_streams[key]

    def wait_for_caller(self) -> None:
        """Make this stream wait for all work enqueued on the caller's stream so far."""
        if self.stream is not None and self.caller is not None:
            self.caller_event.record(self.caller)
            self.caller_event.wait(self.stream)

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which this stream is current."""
        return nullcontext() if self.stream is None or self.caller is None else _StreamContext(self.stream, self.caller)

    def order_caller_after(self, previous: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        """Make the caller's stream wait for all work enqueued on `previous` so far; return the caller's stream."""
        if previous is not None and self.caller is not None and previous != self.caller:
            self.caller.wait_stream(previous)
        return self.caller

    def record(self) -> torch.cuda.Event | None:
        """Record an event after all work enqueued on this stream so far."""
        return None if self.stream is None else self.stream.record_event()

    def completion(self) -> Wait:
        """Return a wait for all work enqueued on this stream so far."""
        return self.wait_for(self.record())

    def join(self) -> None:
        """Make the current stream wait for all work enqueued on this stream so far."""
        self.completion()()

    def wait_for(self, event: torch.cuda.Event | None) -> Wait:
        """Return a wait for an event of this stream."""
        return (lambda: None) if event is None else lambda: event.wait(current_stream(self.device))


class CurrentStream(SideStream):
    """The caller's own stream with the interface of a side stream: all waits are no-ops."""

    def __init__(self) -> None:
        self.stream = self.caller = None


def wait_for_all(device: torch.device) -> None:
    """Make the current stream wait for all of its side streams, as needed after an error."""
    if device.type == "cuda":
        current = current_stream(device)
        for (caller, _), (stream, _) in _side_streams.items():
            if caller == current:
                current.wait_stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _StreamContext:
    """torch.cuda.stream without its lookup of the current stream, which takes host time in each call."""

    def __init__(self, stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> None:
        self.stream, self.caller = stream, caller

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.caller)
