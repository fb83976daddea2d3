"""A process whose device stands still, or goes on, or fails: what `progress` does about it. Arguments: which, and "end"."""

import sys
import time
from types import SimpleNamespace

import torch

from parallel import progress

what, end = sys.argv[1], "end" in sys.argv


class Event:
    def record(self) -> None:
        pass

    def query(self) -> bool:
        if what == "fails":
            raise RuntimeError("an error of the device")
        return what == "moves"


torch.cuda = SimpleNamespace(  # type: ignore[assignment]
    Event=Event, current_device=lambda: 0, set_device=lambda _: None, is_current_stream_capturing=lambda: False
)
progress.at(step=7)
progress.enter("ring backward")
progress.expect("ranks 1, 2", 1, end=end)
print("in a buffer", end="")
time.sleep(4)
