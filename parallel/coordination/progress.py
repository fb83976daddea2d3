"""Progress of this rank, for error messages and watchdogs: training step, layer, operator, hop.

    progress.update(step=12, layer=3)    published by the trainer; the ring publishes operator and hop
    progress.describe()                  "training step 12, layer 3, ring forward (call 88), hop 1 of 3"

On a CPU a wait ends at the group's timeout, and its error is raised again with this text. On a GPU the host does not wait.
There a thread watches an event after each operator and each awaited signal, and prints the text when nothing has completed for
that long. NCCL's own watchdog then ends the process. Copy engines have no other watchdog, so the thread itself ends it.
"""

import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringspan.parallel.transport.streams import current_stream

RELEASE_S = 1.0  # seconds for ending the waits of a process that ends


class _Progress(NamedTuple):
    step: int | None = None
    layer: int | None = None
    op: str = "no op yet"
    calls: int = 0


Hop = tuple[int, int]  # number of the hop, number of hops
_current = _Progress()
_hop: Hop | None = None  # apart from the rest, because it changes many times per call
_first_step: int | None = None  # the first training step of this process


def update(step: int | None = None, layer: int | None = None) -> None:
    """Publish the trainer's progress; None leaves a value unchanged."""
    global _current, _first_step
    _current = _current._replace(step=_current.step if step is None else step, layer=_current.layer if layer is None else layer)
    if step is not None and (_first_step is None or step < _first_step):
        _first_step = step


def enter(op: str) -> None:
    """Publish that a call of an operator has started."""
    global _current, _hop
    _current, _hop = _current._replace(op=op, calls=_current.calls + 1), None


def hop(number: int, count: int) -> None:
    """Publish the current hop of the operator."""
    global _hop
    _hop = number, count


def steps_done() -> int | None:
    """Return the number of training steps that this process has done; None without a trainer."""
    return None if _current.step is None or _first_step is None else _current.step - _first_step


def describe(progress: tuple[_Progress, Hop | None] | None = None) -> str:
    """Return the progress, by default the current one, as text."""
    (step, layer, op, calls), hop = progress or (_current, _hop)
    words = ["" if step is None else f"training step {step}", "" if layer is None else f"layer {layer}"]
    words += [f"{op} (call {calls})", "" if hop is None else "hop {} of {}".format(*hop)]
    return ", ".join(word for word in words if word)


class Stalled(RuntimeError):
    """A peer rank has died or has not answered within the timeout."""


def timeout_message(
    awaited: str | Callable[[], str], timeout_s: float, progress: tuple[_Progress, Hop | None] | None = None
) -> str:
    awaited = awaited if isinstance(awaited, str) else awaited()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} waited for {awaited} in {describe(progress)}; the time limit is {timeout_s:g} s"


def wait(call: Callable[[], object], awaited: str | Callable[[], str], timeout_s: float) -> None:
    """Run a blocking call and add rank, awaited ranks and progress to its error.

    Args:
        call: Call that raises a RuntimeError when it fails or times out.
        awaited: Description of the awaited transfer or ranks, or a function that returns it at the time of the error.
        timeout_s: Timeout of the call, for the message.

    Raises:
        Stalled: The call has failed.
    """
    try:
        call()
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise Stalled(f"{timeout_message(awaited, timeout_s)}: {lines[0] if lines else 'no answer'}") from error


class _ExpectedEvent(NamedTuple):
    event: torch.cuda.Event
    awaited: str | Callable[[], str]
    timeout_s: float
    end: bool  # end the process after the timeout
    progress: tuple[_Progress, Hop | None]


class _WatchThread:
    """Checks once a second whether the oldest expected event has completed.

    It may not destroy an event: CUDA would block it while another thread waits for a value of the GPU, as `loss.item()` does.
    """

    def __init__(self) -> None:
        self.expected: deque[_ExpectedEvent] = deque()
        self.finished: deque[_ExpectedEvent] = deque()  # destroyed by the thread that expects the next event
        self.thread: threading.Thread | None = None

    def expect(self, expected: _ExpectedEvent) -> None:
        self.finished.clear()
        self.expected.append(expected)
        if self.thread is None:
            device = torch.cuda.current_device()
            self.thread = threading.Thread(target=self._watch, args=(device,), name="ringspan-progress", daemon=True)
            self.thread.start()

    def _watch(self, device: int) -> None:
        torch.cuda.set_device(device)  # a new thread starts on GPU 0 and would create a context there
        # Seconds without progress. A longer gap counts as 2 s, so that a pause of the whole process does not count.
        idle_s, previous = 0.0, time.monotonic()
        num_finished, reported = 0, -1
        while True:
            time.sleep(1)
            now = time.monotonic()
            idle_s += min(now - previous, 2.0)
            previous = now
            try:
                while self.expected and self.expected[0].event.query():
                    self.finished.append(self.expected.popleft())
                    num_finished += 1
                    idle_s = 0.0
            except RuntimeError:  # a CUDA error, which the main thread raises
                self.finished.extend(self.expected)
                self.expected.clear()
            if not self.expected:
                idle_s = 0.0
                continue
            oldest = self.expected[0]
            # Reported before NCCL's watchdog or a peer rank ends the process.
            if idle_s > 0.9 * oldest.timeout_s and reported != num_finished:
                reported = num_finished
                with suppress(Exception):
                    message = timeout_message(oldest.awaited, oldest.timeout_s, oldest.progress)
                    print(f"ringspan: {message}", file=sys.stderr, flush=True)
            if idle_s > oldest.timeout_s and oldest.end:
                # The main thread may be blocked in a device synchronisation that no exception interrupts. It may also hold the
                # lock of stdout, so another thread flushes it, for at most a second.
                flush = threading.Thread(target=sys.stdout.flush, daemon=True)
                with suppress(Exception):
                    flush.start()
                    flush.join(1)
                release = threading.Thread(target=_release_waits, daemon=True)  # the driver may block when its queues are full
                with suppress(Exception):
                    _raise_in_main_thread(Stalled)
                    release.start()
                    release.join(RELEASE_S)
                os._exit(1)
            del oldest  # while `expected` holds it


_watch_thread = _WatchThread()
_before_end: list[weakref.WeakMethod[Callable[[], None]]] = []


def before_end(release: Callable[[], None]) -> None:
    """Register a method that the watch thread calls before it ends the process: again and again for RELEASE_S."""
    _before_end.append(weakref.WeakMethod(release))


def _release_waits() -> None:
    """End the waits of this process again and again: ending one may let a stream reach the next."""
    deadline = time.monotonic() + RELEASE_S
    while time.monotonic() < deadline:
        for reference in _before_end:
            if (release := reference()) is not None:
                release()


def _raise_in_main_thread(error: type[Exception]) -> None:
    """Let the main thread raise an error as soon as its wait for the GPU ends: what it would read is wrong."""
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(error))


def expect(
    awaited: str | Callable[[], str], timeout_s: float, end: bool = False, event: torch.cuda.Event | None = None
) -> None:
    """Watch an event of this GPU: print a message, and optionally end the process, if it does not complete in time.

    Args:
        awaited: Description of the awaited transfer or ranks, or a function that returns it when it is printed.
        timeout_s: Seconds without progress after which the message is printed (at 0.9 of them) and the process ends.
        end: End the process after the timeout.
        event: Event to watch. The default is one after all work enqueued on the current stream so far.
    """
    global _hop
    if torch.cuda.is_current_stream_capturing():
        return  # events in a CUDA graph cannot be queried
    if event is None:
        _hop = None  # the host has enqueued all hops
        event = current_stream(torch.device("cuda", torch.cuda.current_device())).record_event()
    _watch_thread.expect(_ExpectedEvent(event, awaited, timeout_s, end, (_current, _hop)))
