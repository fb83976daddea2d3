"""The transport for GPUs of one host: copy engines carry rows between owners' tensors and memory that all ranks show each other.

No SM works for a transfer, and nothing is copied to send it. A rank shows up to two places for a step's keys and two for
gradients of keys; whoever owns the rows does both copies. That a place is free, and that all is there, is what signals are for
(`signals`):

    fetch        where K/V come in         tell: the place is free · the owners have brought theirs
                 where they go, for each   this reader has a place free · bring it its rows · tell: brought
    part         all have taken what stood there, which was given earlier
    give         tell: given · the readers of my rows have given theirs · take them home · tell: taken

What goes to one reader waits for no other: one that is late holds up nobody else. The second step's place is offered when the
first step's K/V are there, so the two do not share links. The caller's stream itself waits for the signal of `part` alone,
which is past but where another rank is a step behind, for the ends of transfers whose rows it uses, and once, behind its last
kernel, for all that went out. No multicast (multimem) is used anywhere.
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

from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Piece, Plan
from ringspan.parallel.streams import SideStream, Transfer
from ringspan.parallel.transport.base import Transport, slots
from ringspan.parallel.transport.buffers import Rows
from ringspan.parallel.transport.gpu_signals import GRADS_READ, GRADS_READY, KV_WRITTEN, SLOT_FREE, GpuSignals

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
REMEMBERED = 1024  # views of shown memory; documents ask for others in every step


class Shown:
    """What the ranks of a group show each other: for each use some memory of every rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.signals = GpuSignals(group, device)
        self.memory: dict[str, tuple[Tensor, Any]] = {}  # mine, and the handle to all
        self.views: dict[Any, Tensor] = {}  # of it that were asked for: a ring asks for the same in each call
        # The same on every rank: how many steps' K/V were brought, and how often gradients were given; for each of two places
        # when they were last given out of it, and to whom.
        self.brought = self.given = 0
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
_set_aside: list[Shown] = []  # by calls that ended with an error: others may be at work there still


def shown_by(group: dist.ProcessGroup, device: torch.device) -> Shown:
    name = group.group_name
    if name not in _shown or _shown[name].group is not group:  # a new group may have an old one's name
        _shown[name] = Shown(group, device)  # all ranks are there
        if _set_aside:
            settle(device)
            _set_aside.clear()
    return _shown[name]


class CopyEngineTransport(Transport):
    needs_sms = False

    def __init__(self, pair: RingGroups, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph would repeat the counts by which ranks wait for each other: use transport='p2p' in it"
            )
        self.device, self.rank, self.seconds, self.ranks = device, pair.group.rank(), pair.seconds, pair.ranks
        self.shown = shown_by(pair.group, device)
        self.going: dict[int, SideStream] = {}  # to each reader
        self.gone: dict[int, Transfer] = {}  # what was last

    @cached_property
    def coming(self) -> SideStream:
        return SideStream(self.device, "coming")

    @cached_property
    def home(self) -> SideStream:
        return SideStream(self.device, "home")

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        super().publish_kv(k, v)
        self.shown.caller = self.coming.behind(self.shown.caller)
        for reader in ranks_of(piece for pieces in self.plan.gives for piece in pieces):
            self.going[reader] = SideStream(self.device, f"going to {reader}")
            self.going[reader].follow()

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        self.shown.make_room(f"keys {slot}", self.plan.most_keys * ((k.nbytes + v.nbytes) // k.shape[1]), self.device)
        return self._keys(slot, self.rank, 0, rows)

    def _keys(self, slot: int, rank: int, first: int, rows: int) -> Rows:
        """Some rows of a rank's place for a step's keys: K's of all rows are there first, then V's."""
        places, begin = [], 0
        for x in self.offered:
            shape = rows, *x.shape[1:]
            places.append(self.shown.rows(f"keys {slot}", rank, first, shape, x.dtype, begin))
            begin += self.plan.most_keys * math.prod(x.shape[1:])
        return tuple(places)

    def fetch(self, index: int, slot: int, into: Rows) -> Transfer:
        # the owners of the step's rows bring them to where `into` is, as I bring mine to their readers
        shown, signals, pieces = self.shown, self.shown.signals, self.plan.gives[index]
        owners = ranks_of(self.plan.steps[index].pieces)
        shown.brought += 1
        self.coming.follow()  # what the place held is used up
        with self.coming.run():
            signals.tell(SLOT_FREE, shown.brought, owners)
        for reader in dict.fromkeys(piece.rank for piece in pieces):
            with self.going[reader].run():
                signals.wait(SLOT_FREE, shown.brought, (reader,))
                for piece in pieces:
                    if piece.rank == reader:
                        copy(self._keys(slot, reader, piece.at, len(piece)), [x[piece.rows] for x in self.offered])
                signals.tell(KV_WRITTEN, shown.brought, (reader,))
            self.gone[reader] = self._watched(self.going[reader], "K/V taken by", {reader}, index)
        with self.coming.run():
            signals.wait(KV_WRITTEN, shown.brought, owners)
        return self._watched(self.coming, "K/V from", {*owners}, index)

    def wait_sends(self) -> None:
        for last in self.gone.values():
            last()
        super().wait_sends()

    def abort(self) -> None:
        """After an error ranks may have counted differently, and what one of them tells next could pass for what another still
        waits for. So they begin anew, together: a rank that failed alone waits for the others, and signals nothing."""
        super().abort()
        if _shown.get(self.shown.group.group_name) is self.shown:
            _set_aside.append(_shown.pop(self.shown.group.group_name))

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        use, shape = f"part {slot}", like.shape[1:]
        self.shown.make_room(use, self.plan.most_keys * math.prod(shape) * like.itemsize, self.device)
        self.shown.signals.wait(GRADS_READ, *self.shown.given_out_of[slot])
        return self.shown.rows(use, self.rank, 0, (rows, *shape), like.dtype)

    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Transfer:
        # nothing is sent: each owner takes its rows out of its readers' parts
        shown, signals, pieces = self.shown, self.shown.signals, self.plan.gives[index]
        owners, readers = ranks_of(self.plan.steps[index].pieces), ranks_of(pieces)
        places = [place for (place,) in slots(pieces, (into,))]
        sources = [shown.rows(f"part {slot}", p.rank, p.at, x.shape, x.dtype) for p, x in zip(pieces, places, strict=True)]
        shown.given += 1
        shown.given_out_of[slot] = shown.given, owners
        self.home.follow()
        with self.home.run():
            signals.meet(GRADS_READY, shown.given, owners, readers)
            copy(places, sources)
            signals.tell(GRADS_READ, shown.given, readers)
        return self._watched(self.home, "dK/dV from", {*readers}, index)

    def _watched(self, beside: SideStream, what: str, ranks: set[int], index: int) -> Transfer:
        """A signal that never comes would hold up whatever the host waits for next, which need not be the end of this call."""
        event = beside.mark()
        if event is not None and ranks:
            names = ", ".join(str(self.ranks[rank]) for rank in sorted(ranks))
            progress.hop(index, len(self.plan.steps) - 1)
            progress.expect(f"{what} rank {names}", self.seconds, end=True, event=event)
        return beside.waiting_for(event)


def ranks_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    return tuple(sorted({piece.rank for piece in pieces}))


def copy(places: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for place, source in zip(places, sources, strict=True):  # each in one piece of memory, which copy engines take
        place.copy_(source, non_blocking=True)


def settle(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def bytes_shown() -> int:
    """Symmetric memory of this process, which torch's allocator does not count."""
    return sum(
        memory.nbytes
        for shown in [*_shown.values(), *_set_aside]
        for memory, _ in [*shown.memory.values(), shown.signals.memory]
    )
