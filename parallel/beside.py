"""Streams beside that of the kernels. On a CPU there are none, and everything is done where it stands.

Each stream of kernels has its own beside it. Unless told otherwise these come first wherever an SM is free: what is small, and
waited for, does not stand behind the rest of a large kernel.

A large kernel leaves SMs idle in its last wave. Small work that waits on a stream of its own, given after that kernel and
waiting only for what came before it, runs there and stands between no two kernels. Copies need no SM at all.

    sums = Beside(device, "sums")
    sums.follow()                     what comes here waits for what the current stream has been given so far
    with sums.run(): …
    wait = sums.done()                wait() makes the current stream wait for it
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_streams: dict[tuple[torch.cuda.Stream, str], torch.cuda.Stream] = {}
Transfer = Callable[[], object]  # makes the current stream, or on the CPU the caller, wait until something is here


class Beside:
    def __init__(self, device: torch.device, use: str, priority: int = -1) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            key = torch.cuda.current_stream(device), use
            if key not in _streams:
                _streams[key] = torch.cuda.Stream(device, priority)
            self.stream = _streams[key]

    def follow(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def run(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def done(self) -> Transfer:
        if self.stream is None:
            return lambda: None
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)
