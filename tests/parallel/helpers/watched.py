"""Process whose GPU is stuck, progresses, is slow or fails, to test the watch thread of `progress`.

Arguments: the behaviour of the GPU, and optionally "end".
"""

import sys
import threading
import time
from types import SimpleNamespace

import torch

from ringspan.parallel.coordination import progress

behaviour, end = sys.argv[1], "end" in sys.argv


class WatchedEvent:
    def __init__(self) -> None:
        self.num_queries = 0

    def query(self) -> bool:
        """Called once a second."""
        self.num_queries += 1
        if behaviour == "fails":
            raise RuntimeError("an error of the device")
        return behaviour == "progresses" or (behaviour == "is slow" and self.num_queries == 2)

    def __del__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            print("ringspan: the watch thread destroys an event, which may block it", file=sys.stderr)


torch.cuda = SimpleNamespace(  # type: ignore[assignment]
    current_device=lambda: 0, set_device=lambda _: None, is_current_stream_capturing=lambda: False
)
progress.current_stream = lambda _: SimpleNamespace(record_event=WatchedEvent)  # type: ignore[assignment, return-value]
progress.update(step=7)
progress.enter("ring backward")
limit = 2 if behaviour == "is slow" else 1
for _ in range(2):  # the second event is queried only after the first has completed
    progress.expect("ranks 1, 2", limit, end=end)
print("in a buffer", end="")
time.sleep(2.5)
progress._watch_thread.finished.clear()  # as the next call does
time.sleep(2.5)
