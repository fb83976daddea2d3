"""Console lines during a long step: micro-batch, layer, and an estimate of the remaining time.

    step 1: micro-batch 1 of 8, layer 5 of 12 forward; 40 s, about 12m10s left in this step

A thread looks once a second, so that steps below LONG_S print nothing. Layers are counted at the layer boundaries
(layer_boundaries.py). A backward counts as two forwards; layers that are computed again make the estimate too short.
"""

import threading
import time
from collections.abc import Callable

from ringspan.trainer.monitoring.tracking import duration

LONG_S = 20.0  # time before the first line, and between lines


class StepProgress:
    """Prints the progress of this rank's steps, from construction to `close`.

    Args:
        layers: layers of the model.
        begun: returns how many layers this rank has begun so far, forwards and backwards counted.
        write: prints a line.
        is_active: whether this rank prints.
        long_s: seconds before the first line, and between lines.
    """

    def __init__(
        self, layers: int, begun: Callable[[], int], write: Callable[[str], None], is_active: bool, long_s: float = LONG_S
    ) -> None:
        self.layers, self.begun, self.write, self.long_s = layers, begun, write, long_s
        self.state: tuple[int, int, int] | None = None  # step, index of the micro-batch, micro-batches
        self._began = self._printed = 0.0
        self._before = 0
        self._closed = threading.Event()
        if is_active:
            threading.Thread(target=self._watch, name="step-progress", daemon=True).start()

    def begin_micro_batch(self, step: int, index: int, count: int) -> None:
        """Record that micro-batch `index`, counted from 0, of `count` begins."""
        if index == 0:
            self._began = self._printed = time.monotonic()
        self._before = self.begun()
        self.state = step, index, count

    def end_step(self) -> None:
        self.state = None

    def close(self) -> None:
        self._closed.set()

    def line(self, seconds: float) -> str:
        """Return the line after so many seconds of the step; "" between steps."""
        if self.state is None:
            return ""
        step, index, count = self.state
        layer = self.begun() - self._before
        forward, backward = min(layer, self.layers), min(max(layer - self.layers, 0), self.layers)
        done = index + (forward + 2 * backward) / (3 * self.layers)
        phase = f"layer {forward} of {self.layers} forward" if not backward else f"layer {backward} of {self.layers} backward"
        left = f", about {duration(seconds / done * (count - done))} left in this step" if 0 < done < count else ""
        return f"step {step}: micro-batch {index + 1} of {count}, {phase}; {duration(seconds)}{left}"

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.long_s / 4)):
            now = time.monotonic()
            if self.state is not None and now - self._printed > self.long_s:
                self._printed = now
                if text := self.line(now - self._began):
                    self.write(text)
