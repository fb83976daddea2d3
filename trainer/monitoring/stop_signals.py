"""SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask for a checkpoint and a clean end, in whatever phase they come.

The handler only remembers. The loop reads the flag of all ranks in the reduction that every step has anyway, so all stop
after the same step; evaluation reads it between its batches. A save in progress is finished, because it is what was asked
for; in a long first compile the flag waits for the step's end. Another signal, ten seconds later or more, ends the process at
once; sooner it is an echo, for a scheduler and torchrun may both pass it on. Of Ctrl-C a second is enough: a person asks.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO = {signal.SIGINT: 1}  # seconds
OTHERS = 10


class StopSignals:
    """Handlers from construction to `close`."""

    def __init__(self) -> None:
        self.received, self._at = "", 0.0
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._remember) for number in CAUGHT}

    @property
    def stop(self) -> bool:
        return bool(self.received)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        name = signal.StopSignals(number).name
        if self.received:
            if time.monotonic() - self._at > ECHO.get(signal.StopSignals(number), OTHERS):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received, self._at = name, time.monotonic()
        if int(os.environ.get("RANK", 0)) == 0:
            with contextlib.suppress(OSError):  # a terminal that is gone; and print is not reentrant
                os.write(sys.stderr.fileno(), f"\n{name}: saving after this step, then stopping\n".encode())
