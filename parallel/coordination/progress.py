"""Where this rank is, so that an error or a watchdog can say it: training step, layer, op, hop.

    progress.at(step=12, layer=3)        the trainer says what it knows; the ring says which op and which hop
    progress.here()                      "training step 12, layer 3, ring forward (call 88), hop 1 of 3"

On the CPU a wait ends by itself at the group's time limit, and its error is re-raised with these words. On a GPU nobody
waits on the host: a thread watches an event behind each op and each awaited signal, and prints the words when nothing has moved
for that long. Then NCCL's own watchdog ends the process; copy engines are watched by nobody else, and the thread ends it.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringspan.parallel.streams import current_stream


class _Progress(NamedTuple):
    step: int | None = None
    layer: int | None = None
    op: str = "no op yet"
    calls: int = 0
    hop: tuple[int, int] | None = None  # which of how many


_now = _Progress()
_first_step: int | None = None  # that this process published


def at(step: int | None = None, layer: int | None = None) -> None:
    """What the trainer publishes; None leaves a value as it is."""
    global _now, _first_step
    _now = _now._replace(step=_now.step if step is None else step, layer=_now.layer if layer is None else layer)
    if step is not None and (_first_step is None or step < _first_step):
        _first_step = step


def enter(op: str) -> None:
    global _now
    _now = _now._replace(op=op, calls=_now.calls + 1, hop=None)


def hop(index: int, num: int) -> None:
    global _now
    _now = _now._replace(hop=(index, num))


def steps_done() -> int | None:
    """Training steps since this process began, however many there were before it; None without a trainer."""
    return None if _now.step is None or _first_step is None else _now.step - _first_step


def here(place: _Progress | None = None) -> str:
    step, layer, op, calls, hop = place or _now
    words = ["" if step is None else f"training step {step}", "" if layer is None else f"layer {layer}"]
    words += [f"{op} (call {calls})", "" if hop is None else "hop {} of {}".format(*hop)]
    return ", ".join(word for word in words if word)


class Stalled(RuntimeError):
    """A peer died or did not answer within the time limit."""


def waited(what: str, seconds: float, place: _Progress | None = None) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} waited for {what} in {here(place)}; the time limit is {seconds:g} s"


def wait(call: Callable[[], object], what: str | Callable[[], str], seconds: float) -> None:
    """The call, whose errors say who waited for whom, and where. Who it was may be known only then."""
    try:
        call()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()
        named = what if isinstance(what, str) else what()
        raise Stalled(f"{waited(named, seconds)}: {reason[0] if reason else 'no answer'}") from error


class _Expected(NamedTuple):
    event: torch.cuda.Event
    what: str
    seconds: float
    end: bool
    place: _Progress


class _Watch:
    """Looks once a second whether the oldest event has passed."""

    def __init__(self) -> None:
        self.expected: deque[_Expected] = deque()
        self.thread: threading.Thread | None = None

    def expect(self, expected: _Expected) -> None:
        self.expected.append(expected)
        if self.thread is None:
            device = torch.cuda.current_device()
            self.thread = threading.Thread(target=self._look, args=(device,), name="ringspan-progress", daemon=True)
            self.thread.start()

    def _look(self, device: int) -> None:
        torch.cuda.set_device(device)  # a thread begins on GPU 0, and would open a context there
        still, before = 0.0, time.monotonic()  # for how long nothing has moved; while all processes are paused nothing counts
        told: torch.cuda.Event | None = None
        while True:
            time.sleep(1)
            now = time.monotonic()
            still += min(now - before, 2.0)
            before = now
            try:
                while self.expected and self.expected[0].event.query():
                    self.expected.popleft()
                    still = 0.0
            except RuntimeError:  # a CUDA error is for the main thread to raise
                self.expected.clear()
            if not self.expected:
                still = 0.0
                continue
            oldest = self.expected[0]
            if still > 0.9 * oldest.seconds and told is not oldest.event:  # before others end the process
                told = oldest.event
                with suppress(Exception):
                    print(f"ringspan: {waited(oldest.what, oldest.seconds, oldest.place)}", file=sys.stderr, flush=True)
            if still > oldest.seconds and oldest.end:
                # The main thread may wait for the device for ever, and no error would reach it there. It may also hold the
                # lock of what it writes to.
                last_words = threading.Thread(target=sys.stdout.flush, daemon=True)
                with suppress(Exception):
                    last_words.start()
                    last_words.join(1)
                os._exit(1)


_watch = _Watch()


def expect(what: str, seconds: float, end: bool = False, event: torch.cuda.Event | None = None) -> None:
    """On a GPU: says so if this event, or what the current stream was given, takes too long; may end the process."""
    global _now
    if torch.cuda.is_current_stream_capturing():
        return  # a graph's events cannot be asked
    if event is None:
        _now = _now._replace(hop=None)  # the host is through with all of them
        event = current_stream(torch.device("cuda", torch.cuda.current_device())).record_event()
    _watch.expect(_Expected(event, what, seconds, end, _now))
