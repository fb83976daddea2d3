"""The mover for GPUs of one host: copy engines pull rows out of the owner's symmetric memory.

No SM works for a transfer, and no rank has to send: a copy waits for nothing but the owner's data. That they are there, and
that nobody overwrites what another still reads, is what barriers are for. A lane's kernels wait for its barriers, for these
need an SM to wait on, which a persistent kernel leaves to nobody; a zigzag ring is even there anyway, and the other lane's
kernel has work. Those behind a kernel, and all copies, are given to a side stream, which comes first wherever an SM is free.

    publish      barrier, if none has passed since K/V were pulled · copy K and V in · barrier (all are published)
    fetch        pull the rows of a step
    give         barrier (all parts of this step are written) · pull those of my rows, while the next kernel runs

Barriers end with an error of the device at the group's time limit. No multicast (multimem) is used anywhere.
"""

import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from .beside import Beside, Transfer
from .groups import Pair
from .mover import Mover, slots
from .packed import Rows, by_rows
from .plan import Plan

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
REMEMBERED = 1024  # views of shown memory; documents ask for others in every step


class Shown:
    """What the ranks of a group show each other in a lane: for each use some memory of every rank."""

    def __init__(self, group: dist.ProcessGroup, lane: int) -> None:
        self.group, self.lane = group, lane
        self.memory: dict[str, tuple[Tensor, Any]] = {}  # mine, and the handle to all
        self.views: dict[Any, Tensor] = {}  # of it that were asked for: a ring asks for the same in each call
        self.read = False  # whether K/V have been pulled since the last barrier; the same on every rank

    def make_room(self, use: str, nbytes: int, device: torch.device) -> None:
        """As much on every rank, made by all of them together when it has to grow."""
        if use not in self.memory or self.memory[use][0].numel() < nbytes:
            settle(device)  # the old one may still be read here; the rendezvous waits until it is nowhere
            torch.cuda.empty_cache()  # this memory is not the caching allocator's, which may hold all that is left
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            self.memory[use] = memory, symmetric_memory.rendezvous(memory, self.group)
            self.views.clear()

    def rows(self, use: str, rank: int, first: int, shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """A rank's rows from the `first` on, of the tensor that begins after `begin` elements."""
        key = use, rank, first, shape, dtype, begin
        if key not in self.views:
            if len(self.views) >= REMEMBERED:
                self.views.clear()
            with torch.inference_mode(False):  # made in it, they could not be written to outside
                self.views[key] = self.memory[use][1].get_buffer(rank, shape, dtype, begin + first * math.prod(shape[1:]))
        return self.views[key]

    def barrier(self, use: str, seconds: float) -> None:
        self.memory[use][1].barrier(channel=self.lane, timeout_ms=int(seconds * 1000))
        self.read = False


_shown: dict[tuple[str, int], Shown] = {}  # by the group's name, and the lane


def shown_by(group: dist.ProcessGroup, lane: int) -> Shown:
    key = group.group_name, lane
    if key not in _shown or _shown[key].group is not group:  # a new group may have an old one's name
        _shown[key] = Shown(group, lane)
    return _shown[key]


class Pull(Mover):
    def __init__(self, pair: Pair, plan: Plan, device: torch.device, lane: int) -> None:
        super().__init__(plan)
        self.seconds, self.device = pair.seconds, device
        self.shown, self.rank = shown_by(pair.group, lane), pair.group.rank()
        self.begins = 0, 0  # of K and V in what is published, in elements

    def publish(self, k: Tensor, v: Tensor) -> None:
        self.shown.make_room("kv", k.nbytes + v.nbytes, self.device)
        self.begins = 0, k.numel()
        if self.shown.read:
            self.shown.barrier("kv", self.seconds)
        for begin, x in zip(self.begins, (by_rows(k), by_rows(v)), strict=True):
            self.shown.rows("kv", self.rank, 0, x.shape, x.dtype, begin).copy_(x)
        self.shown.barrier("kv", self.seconds)

    def fetch(self, index: int, into: Rows) -> Transfer:
        pieces = self.plan.steps[index].pieces
        places, sources = [], []
        for piece, rows in zip(pieces, slots(pieces, into), strict=True):
            for begin, place in zip(self.begins, rows, strict=True):
                places.append(place)
                sources.append(self.shown.rows("kv", piece.rank, piece.rows.start, place.shape, place.dtype, begin))
        wait = copy_beside(places, sources, Beside(self.device, "copies"))

        def finish() -> None:
            wait()
            self.shown.read = True

        return finish

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        use, shape = f"part {which}", like.shape[1:]
        self.shown.make_room(use, self.plan.most_keys * math.prod(shape) * like.itemsize, self.device)
        return self.shown.rows(use, self.rank, 0, (rows, *shape), like.dtype)

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        # nothing is sent: each owner takes its rows out of its readers' parts
        use, home = f"part {which}", Beside(self.device, "home")
        home.follow()
        with home.run():
            self.shown.barrier(use, self.seconds)
        home.done()()  # others have taken what was given before, and its memory may be written again
        pieces = self.plan.gives[index]
        places = [place for (place,) in slots(pieces, (into,))]
        sources = [self.shown.rows(use, p.rank, p.at, x.shape, x.dtype) for p, x in zip(pieces, places, strict=True)]
        return copy_beside(places, sources, home)


def copy_beside(places: list[Tensor], sources: list[Tensor], beside: Beside) -> Transfer:
    """Copies on a side stream, after what the current one has been given so far."""
    beside.follow()  # what the places held is used up
    with beside.run():
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)  # both contiguous, so a plain copy: no kernel
    return beside.done()


def settle(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def pooled_bytes() -> int:
    """Symmetric memory of this process, which torch's allocator does not count."""
    return sum(memory.nbytes for shown in _shown.values() for memory, _ in shown.memory.values())
