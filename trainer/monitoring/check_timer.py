"""Time that checks take: the sum of each kind since the last step, on this rank and over its threads.

    with check_timer("shards"):
        …

`metrics.jsonl` has the sums of each step under `checks`.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator


class CheckTimer:
    """Sums of seconds by the name of a check."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()  # the data of a step is checked in a thread

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the duration of a block to the check `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Return the sums and start again from zero."""
        with self._lock:
            sums: dict[str, float] = dict(self._seconds)
            self._seconds.clear()
        return sums


check_timer = CheckTimer()  # one per process, because checks are in modules that know nothing of a run
