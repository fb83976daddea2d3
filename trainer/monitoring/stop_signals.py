"""SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) request a checkpoint and a clean end in any phase of a run.

The handler only sets a flag. The flags of all ranks are part of each step's all-reduce, so that all ranks stop after the same
step; evaluation checks them between its batches. A longer step is abandoned between two layers (layer_boundaries.py). A running
save completes, because a checkpoint is the purpose. A second signal at least ten seconds later ends the process at once.
An earlier one is treated as an echo, because a scheduler and torchrun may both forward the signal. For Ctrl-C one second is
enough: a person sends it.

Python runs handlers between two bytecodes of the main thread, which a long operator delays by minutes on a CPU. A thread reads
the wakeup pipe, to which the interpreter writes each signal at once, and acts in time.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from ringspan.trainer.monitoring import supervised

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_SECONDS = {signal.SIGINT: 1}
DEFAULT_ECHO_SECONDS = 10


def announcement(number: int) -> str:
    """Return the console line after a first stop signal: its name, and how to stop at once."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    again = "Ctrl-C again" if number in (signal.SIGINT, signal.SIGHUP) else f"{name} again after {DEFAULT_ECHO_SECONDS} s"
    return f"\n{name}: saving, then stopping; {again} stops at once, without saving"


class StopSignals:
    """Signal handlers from construction to `close`."""

    def __init__(self) -> None:
        self.received, self._time = "", 0.0
        self._old_handlers = {}
        self._old_pipe = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            self._pipe = socket.socketpair()
            self._pipe[1].setblocking(False)
            self._old_pipe = signal.set_wakeup_fd(self._pipe[1].fileno(), warn_on_full_buffer=False)
            self._old_handlers = {number: signal.signal(number, self._handle) for number in CAUGHT}
            threading.Thread(target=self._watch, args=(self._pipe[0],), name="stop-signals", daemon=True).start()

    @property
    def stop(self) -> bool:
        return bool(self.received)

    def ignore_after_close(self) -> None:
        """Let `close` ignore further signals: the process is about to exit, and an echo must not change its exit code."""
        self._old_handlers = dict.fromkeys(self._old_handlers, signal.SIG_IGN)

    def close(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_pipe)
            self._pipe[1].close()  # ends the thread
            self._pipe = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._receive_first(number)

    def _receive_first(self, number: int) -> bool:
        """Record a signal if it is the first one. Handler and thread may both run, and a handler must not wait for itself."""
        if self.received or not self._lock.acquire(blocking=False):
            return False
        self.received, self._time = signal.Signals(number).name, time.monotonic()
        if int(os.environ.get("RANK", 0)) == 0 and not supervised.is_supervised():  # the supervisor has printed it
            with contextlib.suppress(OSError):  # the terminal may be closed; print is not reentrant
                os.write(sys.stderr.fileno(), f"{announcement(number)}\n".encode())
        return True

    def _watch(self, pipe: socket.socket) -> None:
        """End the process at a second signal after the time of an echo, also while the main thread is in an operator."""
        num_signals = 0
        while byte := pipe.recv(1):
            number = byte[0]
            if number not in CAUGHT:
                continue
            self._receive_first(number)
            num_signals += 1
            if num_signals > 1 and time.monotonic() - self._time > ECHO_SECONDS.get(
                signal.Signals(number), DEFAULT_ECHO_SECONDS
            ):
                os._exit(128 + number)  # an exception would wait for the main thread
        pipe.close()
