"""Heads in lanes: two rings side by side, each of some heads and on a stream of its own.

A kernel leaves SMs idle in its last wave, and for as long as its stream then waits for rows or for other ranks. Heads know
nothing of each other, so half of them can go round by themselves: what one lane leaves idle, the other's kernel takes.

    side_by_side([lane(half) for half in halves], device)      a lane is a generator that stops where the others may go on
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from .beside import Beside

LEAST = 2**40  # operations of a forward on one rank's keys: with less the host would be late with twice as many kernels


def num_lanes(pulled: bool, kv_heads: int, parts: int, operations: float) -> int:
    """Two where they pay, and where each sends its gradients in as many parts as one would: no buffer is larger for them.

    The same on every rank. RINGSPAN_LANES=1 or 2 says it for all calls, as far as there are heads.
    """
    wanted = os.environ.get("RINGSPAN_LANES", "")
    if wanted not in ("", "1", "2"):
        raise ValueError(f"RINGSPAN_LANES={wanted}: a ring has 1 or 2 lanes; leave it unset to have it chosen")
    if wanted:
        return min(kv_heads, int(wanted))
    return 2 if pulled and kv_heads % (2 * parts) == 0 and operations >= LEAST else 1


def side_by_side(lanes: list[Iterator[None]], device: torch.device) -> None:
    """A step of each in turn; the first on the current stream, which in the end waits for all."""
    others = [Beside(device, f"lane {index}", priority=0) for index in range(1, len(lanes))]
    for other in others:
        other.follow()
    places: list[Callable[[], AbstractContextManager[object]]] = [nullcontext, *(other.run for other in others)]
    going = list(zip(lanes, places, strict=True))
    try:
        while going:
            still = []
            for lane, place in going:
                with place():
                    if next(lane, "over") != "over":
                        still.append((lane, place))
            going = still
    finally:  # after an error too: the memory that they use goes back to the current stream's
        for other in others:
            other.done()()
