"""A process whose device stands, moves, is slow or fails: what `progress` does about it. Arguments: which, and "end"."""

import sys
import time
from types import SimpleNamespace

import torch

from ringspan.parallel.coordination import progress

what, end = sys.argv[1], "end" in sys.argv


class WatchedEvent:
    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        """A look a second."""
        self.looks += 1
        if what == "fails":
            raise RuntimeError("an error of the device")
        return what == "moves" or (what == "is slow" and self.looks == 2)


torch.cuda = SimpleNamespace(  # type: ignore[assignment]
    current_device=lambda: 0, set_device=lambda _: None, is_current_stream_capturing=lambda: False
)
progress.current_stream = lambda _: SimpleNamespace(record_event=WatchedEvent)  # type: ignore[assignment, return-value]
progress.at(step=7)
progress.enter("ring backward")
limit = 2 if what == "is slow" else 1
for _ in range(2):  # the second is only looked at when the first has passed
    progress.expect("ranks 1, 2", limit, end=end)
print("in a buffer", end="")
time.sleep(5)
