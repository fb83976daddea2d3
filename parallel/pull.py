"""The mover for GPUs of one host: copy engines pull rows out of the owner's symmetric memory.

No SM works for a transfer, and no rank has to send. That rows are there, and that nobody overwrites what another still reads,
is what signals are for (`signals`):

    publish      all have read the K/V shown before · copy K and V in · tell: shown
    fetch        the owners have shown theirs · pull the rows of a step · behind the last step, tell: read
    part         all have taken what stood there, which was given earlier
    give         tell: given · the readers of my rows have given theirs · pull · tell: taken

Shown and given are waited for on streams beside the caller's, which itself waits for read and taken only: these are past
but where another rank is a step behind. No multicast (multimem) is used anywhere.
"""

import math
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from . import progress
from .beside import Beside, Transfer
from .groups import Pair
from .mover import Mover, slots
from .packed import Rows, by_rows
from .plan import Piece, Plan
from .runs import union
from .signals import GIVEN, READ, SHOWN, TAKEN, Signals

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
REMEMBERED = 1024  # views of shown memory; documents ask for others in every step


class Shown:
    """What the ranks of a group show each other: for each use some memory of every rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.signals = Signals(group, device)
        self.memory: dict[str, tuple[Tensor, Any]] = {}  # mine, and the handle to all
        self.views: dict[Any, Tensor] = {}  # of it that were asked for: a ring asks for the same in each call
        # The same on every rank: how often K/V were shown and gradients given. Who reads the last K/V, and whose this rank has
        # not been through with; for each of two parts when gradients were last given out of it, and to whom.
        self.shown = self.given = 0
        self.readers: tuple[int, ...] = ()
        self.unread: tuple[int, ...] = ()
        self.caller: torch.cuda.Stream | None = None  # whose call was the last
        self.given_out_of: list[tuple[int, tuple[int, ...]]] = [(0, ()), (0, ())]

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


_shown: dict[str, Shown] = {}  # by the group's name


def shown_by(group: dist.ProcessGroup, device: torch.device) -> Shown:
    name = group.group_name
    if name not in _shown or _shown[name].group is not group:  # a new group may have an old one's name
        _shown[name] = Shown(group, device)
    return _shown[name]


class Pull(Mover):
    needs_sms = False

    def __init__(self, pair: Pair, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph would repeat the counts by which ranks wait for each other: use transport='p2p' in it"
            )
        self.device, self.rank, self.seconds, self.ranks = device, pair.group.rank(), pair.seconds, pair.ranks
        self.shown = shown_by(pair.group, device)
        self.begins = 0, 0  # of K and V in what is published, in elements

    @cached_property
    def copies(self) -> Beside:
        return Beside(self.device, "copies")

    @cached_property
    def home(self) -> Beside:
        return Beside(self.device, "home")

    def publish(self, k: Tensor, v: Tensor) -> None:
        shown, signals, rows = self.shown, self.shown.signals, (by_rows(k), by_rows(v))
        shown.caller = self.copies.behind(shown.caller)
        if shown.unread:  # the call before ended with an error
            with self.copies.run():
                signals.tell(READ, shown.shown, shown.unread)
        shown.make_room("kv", k.nbytes + v.nbytes, self.device)
        self.begins = 0, k.numel()
        # not beside the kernels: a copy within a GPU needs SMs, and behind a kernel that has all of them it would come late
        signals.wait(READ, shown.shown, shown.readers)
        places, sources = [], []
        for part in union(piece.rows for pieces in self.plan.gives for piece in pieces):  # what nobody reads stays here
            for begin, x in zip(self.begins, rows, strict=True):
                sources.append(x[part])
                places.append(shown.rows("kv", self.rank, part.start, sources[-1].shape, x.dtype, begin))
        copy(places, sources)
        shown.shown += 1
        shown.readers = ranks_of(piece for pieces in self.plan.gives for piece in pieces)
        shown.unread = ranks_of(piece for step in self.plan.steps[1:] for piece in step.pieces)
        self.copies.follow()
        with self.copies.run():
            signals.tell(SHOWN, shown.shown, shown.readers)

    def fetch(self, index: int, into: Rows) -> Transfer:
        shown, signals, step = self.shown, self.shown.signals, self.plan.steps[index]
        places, sources, owners = [], [], ranks_of(step.pieces)
        for piece, rows in zip(step.pieces, slots(step.pieces, into), strict=True):
            for begin, place in zip(self.begins, rows, strict=True):
                places.append(place)
                sources.append(shown.rows("kv", piece.rank, piece.rows.start, place.shape, place.dtype, begin))
        self.copies.follow()  # what the places held is used up
        with self.copies.run():
            signals.wait(SHOWN, shown.shown, owners)
            copy(places, sources)
            if index + 1 == len(self.plan.steps):
                signals.tell(READ, shown.shown, shown.unread)
                shown.unread = ()
        return self._watched(self.copies, "K/V", owners, index)

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        use, shape = f"part {which}", like.shape[1:]
        self.shown.make_room(use, self.plan.most_keys * math.prod(shape) * like.itemsize, self.device)
        self.shown.signals.wait(TAKEN, *self.shown.given_out_of[which])
        return self.shown.rows(use, self.rank, 0, (rows, *shape), like.dtype)

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        # nothing is sent: each owner takes its rows out of its readers' parts
        shown, signals, pieces = self.shown, self.shown.signals, self.plan.gives[index]
        owners, readers = ranks_of(self.plan.steps[index].pieces), ranks_of(pieces)
        places = [place for (place,) in slots(pieces, (into,))]
        sources = [shown.rows(f"part {which}", p.rank, p.at, x.shape, x.dtype) for p, x in zip(pieces, places, strict=True)]
        shown.given += 1
        shown.given_out_of[which] = shown.given, owners
        self.home.follow()
        with self.home.run():
            signals.tell(GIVEN, shown.given, owners)
            signals.wait(GIVEN, shown.given, readers)
            copy(places, sources)
            signals.tell(TAKEN, shown.given, readers)
        return self._watched(self.home, "dK/dV", readers, index)

    def _watched(self, beside: Beside, what: str, ranks: tuple[int, ...], index: int) -> Transfer:
        """A signal that never comes would hold up whatever the host waits for next, which need not be the end of this call."""
        event = beside.mark()
        if event is not None and ranks:
            names = ", ".join(str(self.ranks[rank]) for rank in ranks)
            progress.hop(index, len(self.plan.steps) - 1)
            progress.expect(f"{what} of rank {names}", self.seconds, end=True, event=event)
        return beside.waiting_for(event)


def ranks_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    return tuple(sorted({piece.rank for piece in pieces}))


def copy(places: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for place, source in zip(places, sources, strict=True):
        if not source.is_contiguous():  # K/V cut out of a larger tensor, which a kernel copies; elsewhere copy engines do
            place, source = in_large(place, source)
        place.copy_(source, non_blocking=True)


def in_large(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory as numbers of 16 bytes, if it is that everywhere: number by number small ones take long."""
    for x in tensors:
        begins = (x.storage_offset(), *x.stride()[:-1], x.shape[-1])
        if x.stride(-1) != 1 or any(n * x.itemsize % 16 for n in begins):
            return tensors
    return tuple(x.view(torch.complex128) for x in tensors)


def settle(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def pooled_bytes() -> int:
    """Symmetric memory of this process, which torch's allocator does not count."""
    return sum(memory.nbytes for shown in _shown.values() for memory, _ in [*shown.memory.values(), shown.signals.memory])
