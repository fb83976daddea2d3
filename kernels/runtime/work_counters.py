"""Zeros in which kernels count, filled many at a time, because a launch for each takes host time.

    counter = new_counter(q.device)      4 zeros that no kernel has written

Each counter is used once, on the stream on which it was filled. Where memory may belong to a CUDA graph, a counter is filled by
itself: during a capture, and in a call that is not marked as one of eager code, because a compiler may be warming up for a
capture.
"""

import threading

import torch
from torch import Tensor

PER_FILL = 256


class _Call(threading.local):
    is_eager = False  # set by an operator that eager code calls without the dispatcher (custom_op.py)


current_call = _Call()
_counters: dict[tuple[int | None, int], list[Tensor]] = {}  # by device and stream


def new_counter(device: torch.device) -> Tensor:
    """Return four int32 zeros, at an address that 16 divides."""
    if not current_call.is_eager or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return _counters[key].pop()
    except (KeyError, IndexError):
        _counters[key] = list(torch.zeros(PER_FILL, 4, dtype=torch.int32, device=device).unbind())
        return _counters[key].pop()
