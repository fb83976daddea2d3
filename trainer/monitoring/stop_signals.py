"""SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) request a checkpoint and a clean end in any phase of a run.

The handler only sets a flag. The flags of all ranks are part of each step's all-reduce, so that all ranks stop after the same
step; evaluation checks them between its batches. A longer step is abandoned between two layers (layer_boundaries.py). A running
save completes, because a checkpoint is the purpose. A second signal at least ten seconds later ends the process at once.
An earlier one is treated as an echo, because a scheduler and torchrun may both forward the signal. For Ctrl-C one second is
enough: a person sends it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_SECONDS = {signal.SIGINT: 1}
DEFAULT_ECHO_SECONDS = 10


class StopSignals:
    """Signal handlers from construction to `close`."""

    def __init__(self) -> None:
        self.received, self._time = "", 0.0
        self._old_handlers = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            self._old_handlers = {number: signal.signal(number, self._handle) for number in CAUGHT}

    @property
    def stop(self) -> bool:
        return bool(self.received)

    def ignore_after_close(self) -> None:
        """Let `close` ignore further signals: the process is about to exit, and an echo must not change its exit code."""
        self._old_handlers = dict.fromkeys(self._old_handlers, signal.SIG_IGN)

    def close(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received:
            if time.monotonic() - self._time > ECHO_SECONDS.get(signal.Signals(number), DEFAULT_ECHO_SECONDS):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received, self._time = name, time.monotonic()
        if int(os.environ.get("RANK", 0)) == 0:
            with contextlib.suppress(OSError):  # the terminal may be closed; print is not reentrant
                os.write(sys.stderr.fileno(), f"\n{name}: saving, then stopping\n".encode())
