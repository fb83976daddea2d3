"""Gradients go home: what a rank computed for others' keys to their owners, who add up what comes in beside the kernels."""

from typing import NamedTuple

from torch import Tensor

from ringspan.kernels.backends.triton.sum_gradients import MOST_SUMMANDS, Summand, sum_gradients
from ringspan.parallel.plan import Piece
from ringspan.parallel.row_ranges import around, length, place, within
from ringspan.parallel.streams import SideStream, Transfer
from ringspan.parallel.transport.base import Transport, moved, slots
from ringspan.parallel.transport.buffers import unpack

Region = tuple[slice, slice]  # KV heads and rows
Arrived = list[tuple[slice, Tensor]]  # rows of mine, and what is to be added to them


class Arrival(NamedTuple):
    """What comes in for some heads, and the memory that has to stay until it has been added."""

    transfer: Transfer
    pieces: list[Piece]  # whose rows of mine they are for
    heads: slice
    into: Tensor  # piece after piece
    part: Tensor  # what goes out at the same time


class GradientReturn:
    """Gradients of others' keys on their way to their owners, and what others return, added to `mine`.

    Of `mine` the free region holds what a kernel made of the own block, and zeros for padding; the last region holds nothing,
    for its part in the own block comes last.

    Sums are made on a stream beside the kernels', so that none stands between two of these. They do not come first: behind
    the programs of the kernel at work they find the SMs that its last wave leaves idle; ahead of them they would stop it.
    """

    def __init__(
        self,
        transport: Transport,
        mine: Tensor,
        runs: list[slice],
        free: Region,
        last: Region,
        parts: int,
        width: int,
        backend: str,
        priority: int = 0,
    ) -> None:
        # mine: (rows, B, Hkv, D + Dv), in the accumulation dtype, of these runs of the own rows
        self.transport, self.mine, self.runs = transport, mine, runs
        self.free, self.last = free, last
        self.begun = last[0].start  # heads of the last region before this one have sums
        self.width = width
        self.backend = backend
        self.parts = parts  # that its heads are sent in
        self.asked = self.sent = 0  # parts, so far
        self.coming: Arrival | None = None
        self.sums = SideStream(mine.device, "sums", priority)  # behind the kernels', see above
        self.summed: Transfer = lambda: None
        self.held: Arrival | None = None  # by sums that the caller's stream has not waited for

    def follow(self) -> None:
        """Where a kernel begins that small work is to stand beside: it waits for all that the caller was given so far."""
        self.sums.follow()

    def head_parts(self) -> list[slice]:
        """KV heads whose gradients go together."""
        heads = self.mine.shape[2] // self.parts
        return [slice(i * heads, (i + 1) * heads) for i in range(self.parts)]

    def part(self, index: int, heads: slice) -> Tensor:
        """Where the gradients of a step's keys are to be written: (rows, B, heads, D + Dv)."""
        self.asked += 1
        return self.transport.send_buffer(self.asked % 2, self.transport.plan.steps[index].num_keys, self.mine[:0, :, heads])

    def send(self, index: int, heads: slice, part: Tensor) -> None:
        """On its way while the next kernel runs. Every rank calls this as often, also where it has nothing to give."""
        self.settle()
        with self.sums.run():
            if self.coming is not None:
                arrived = self._arrived(self.coming)
                for region in (self.free, self.last):
                    self._add(region, self._belonging(region, self.coming.heads, arrived))
        self.summed, self.held = self.sums.done(), self.coming
        pieces = self.transport.plan.gives[index]
        into = self.mine.new_empty((sum(len(piece) for piece in pieces), *part.shape[1:]))
        self.sent += 1
        self.coming = Arrival(self.transport.return_gradients(index, self.sent % 2, part, into), pieces, heads, into, part)

    def settle(self) -> None:
        """What the sums that have begun were made of may be given back from here on."""
        self.summed()
        self.held = None

    def finish(self, own: Tensor, done: Transfer, dk: Tensor, dv: Tensor) -> None:
        """dk and dv. `own` is the own block's part in the last region, which a kernel writes until it is done; what is in the
        free region is handed on beside that kernel."""
        assert self.coming is not None, "a ring of several steps sends something in each"
        with self.sums.run():
            arrived = self._arrived(self.coming)
            others = self._summands(self.last, self.coming.heads, arrived, MOST_SUMMANDS - 1)
            added = self.sums.done()
            self._hand_on(self.free, self._summands(self.free, self.coming.heads, arrived, MOST_SUMMANDS), dk, dv)
        added()
        done()
        self._hand_on(self.last, [*others, Summand(own)], dk, dv)
        self.sums.join()

    def _hand_on(self, region: Region, summands: list[Summand], dk: Tensor, dv: Tensor) -> None:
        heads, rows = region
        if rows.start < rows.stop:
            sum_gradients(summands, dk[:, rows, heads], dv[:, rows, heads], self.backend)

    def _summands(self, region: Region, of: slice, arrived: Arrived, most: int) -> list[Summand]:
        """What is to be added up for a region: mine, if there is something already, and what arrived as the last."""
        heads, rows = region
        came = self._belonging(region, of, arrived)
        if len(came) + (self._begun(region) > heads.start) > most:
            self._add(region, came[: 1 - most])
            came = came[1 - most :]
        begun = slice(heads.start, self._begun(region))
        return [Summand(self.mine[rows, :, begun]), *came] if begun.start < begun.stop else came

    def _begun(self, region: Region) -> int:
        """Its heads before this one have sums."""
        return self.begun if region is self.last else region[0].stop

    def _add(self, region: Region, came: list[Summand]) -> None:
        """To mine, or in place of what is there where nothing has been added up yet. All are of the same heads."""
        heads, rows = region
        while came:
            here = came[0].place[1]
            of = slice(heads.start + here.start, heads.start + here.stop)
            new = of.stop > self._begun(region)
            count = MOST_SUMMANDS if new else MOST_SUMMANDS - 1
            now, came = came[:count], came[count:]
            at = slice(0, length(rows)) if new else around([its.place[0] for its in now])
            target = self.mine[rows.start + at.start : rows.start + at.stop, :, of]
            summands = [Summand(its.of, its.row - at.start, its.head - here.start) for its in now]
            sum_gradients(summands if new else [Summand(target), *summands], *unpack(target, self.width), self.backend)
            if new:
                self.begun = of.stop

    def _belonging(self, region: Region, of: slice, arrived: Arrived) -> list[Summand]:
        """Of what arrived for some heads what belongs there."""
        all_heads, all_rows = region
        heads, came = _meet(of, all_heads), _within(of, all_heads)
        found = []
        for rows, more in arrived:
            its = within(_meet(rows, all_rows), all_rows)
            if its.start < its.stop and heads.start < heads.stop:
                found.append(Summand(more[_within(rows, all_rows), :, came], its.start, heads.start - all_heads.start))
        return found

    def _arrived(self, arrival: Arrival) -> Arrived:
        """Rows of mine, and what is to be added to them."""
        arrival.transfer()
        moved["dkv"] += len(arrival.pieces)
        places = slots(arrival.pieces, (arrival.into,))
        return [(place(piece.rows, self.runs), its) for piece, (its,) in zip(arrival.pieces, places, strict=True)]


def _meet(one: slice, other: slice) -> slice:
    """What two runs have in common; where that is nothing, an empty run within the other."""
    start = min(max(one.start, other.start), other.stop)
    return slice(start, max(start, min(one.stop, other.stop)))


def _within(one: slice, other: slice) -> slice:
    """The same, counted from where the first one begins."""
    common = _meet(one, other)
    return slice(max(0, common.start - one.start), max(0, common.stop - one.start))
