"""What a mask makes of a layout: which rows of whom a rank needs, step by step.

Step 0 is a rank's own block. Then come the rows that it can see of the rank before it, of the rank before that one, and so on,
straight from their owners, with one of these ranks or several in a step. Steps that are empty on all ranks are left out on all
ranks; a rank whose own part of a step is empty computes nothing in it. Both ends of every message follow from the layout and
the mask alone, so no rank asks another for anything.

Since lo(p) and hi(p) never decrease, the queries of one segment that can see a key of another segment are a run of rows,
and so are the keys they can see: two bisections, done for all pairs of segments at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import Segment, cut, num_rows
from ringspan.parallel.layout import Layout
from ringspan.parallel.row_ranges import around, length, union, without


@dataclass(frozen=True)
class Piece:
    rank: int  # whose rows they are; in `Plan.gives`, who wants them
    rows: slice  # of the owner's shard
    at: int  # where they begin in the reader's block

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass(frozen=True)
class Step:
    """Some rows of this rank's queries, and the rows of one or several ranks' keys that they see."""

    queries: slice
    q_at: list[Segment]
    pieces: list[Piece]  # one after another they are the step's keys
    k_at: list[Segment]

    @cached_property
    def num_keys(self) -> int:
        return sum(len(piece) for piece in self.pieces)


class Part(NamedTuple):
    """Some of a step's queries, which go through a kernel together."""

    rows: slice
    q_at: list[Segment]
    last: bool  # no later step has any of them


class Plan(NamedTuple):
    steps: list[Step]  # the own block first
    gives: list[list[Piece]]  # for each step, which of this rank's rows others take
    most_keys: int  # that a step of any rank has at most, whatever the documents are
    parts: list[list[Part]]  # of each step
    carried: slice  # has all queries that some kernel hands on to a later one
    unfinished: list[slice]  # of these, the ones whose last kernel did not know that it was
    shared: list[slice]  # of the own keys, which others have gradients for; if they are more than a few all rows, with padding


Between = tuple[int, int, int, int]  # reader, its segment, owner, its segment
VisibleRows = tuple[int, int, int, int]  # query rows first … end - 1 and key rows first … end - 1, both within their segment


def make_plan(layout: Layout, mask: Mask, rank: int, blocks: tuple[int, ...] = ()) -> Plan:
    """`blocks` says how many others' blocks each step takes, with keys in ascending order; without it each takes one.

    Only what a mask says on the CPU is used: what is on a device would have to be waited for.
    """
    known = mask.coarse()
    left, right, _, starts, ends, prefix = known.bounds()
    first_keys = None if prefix is None else tuple(prefix.tolist())
    if starts is None or ends is None:
        return _plan(layout, left, right, first_keys, rank, blocks)
    found = _found_for_documents.setdefault(starts, {})
    rule = layout, left, right, first_keys
    if rule not in found:
        found[rule] = _visible_rows(layout, known)
    if (*rule, rank, blocks) not in found:
        # Room for other documents too: to make more for those of another batch, all ranks would have to stop.
        room = layout.local_length * max((1, *blocks))
        found[*rule, rank, blocks] = _plan_of(layout, found[rule], rank, blocks, room, 0)
    return found[*rule, rank, blocks]


# By the tensor itself, which every layer of a step shares: who sees whom, and plans.
_found_for_documents = WeakTensorKeyDictionary()


@lru_cache(maxsize=256)
def _plan(
    layout: Layout, left: int, right: int, first_keys: tuple[int, ...] | None, rank: int, blocks: tuple[int, ...]
) -> Plan:
    few = layout.local_length // 4
    return _plan_of(layout, _seen(layout, left, right, first_keys), rank, blocks, layout.local_length, few)


@lru_cache(maxsize=256)
def _seen(layout: Layout, left: int, right: int, first_keys: tuple[int, ...] | None) -> dict[Between, VisibleRows]:
    prefix = None if first_keys is None else torch.tensor(first_keys, dtype=torch.int32)
    return _visible_rows(layout, Mask.from_bounds(Mask().bounds()._replace(left=left, right=right, prefix=prefix)))


def _plan_of(layout: Layout, seen: dict[Between, VisibleRows], rank: int, blocks: tuple[int, ...], room: int, few: int) -> Plan:
    """`room` is how many keys there is to be room for, at least.

    Where others' blocks concern no more than `few` rows of the own one, as with a window, the rest of it goes apart: it needs
    no fp32 sums. Not with documents, whose ends are elsewhere in each batch: sizes of memory stay the same.
    """
    ends = list(accumulate(blocks or (1,) * (layout.ranks - 1), initial=1))
    assert ends[-1] == layout.ranks, f"{blocks} are the blocks of {ends[-1] - 1} others, not of {layout.ranks - 1}"
    mine: list[Step] = [_own_block(layout, rank)]
    gives: list[list[Piece]] = [[]]
    most_keys = room
    for shifts in starmap(range, pairwise(ends)):
        steps = [_step(layout, reader, [(reader - s) % layout.ranks for s in shifts], seen) for reader in range(layout.ranks)]
        if not any(step.pieces for step in steps):
            continue
        mine.append(steps[rank])
        readers = [(rank + shift) % layout.ranks for shift in shifts]  # so not all owners turn to the same one first
        gives.append(
            [replace(piece, rank=reader) for reader in readers for piece in steps[reader].pieces if piece.rank == rank]
        )
        most_keys = max(most_keys, *(step.num_keys for step in steps))
    parts = _in_parts(mine, few)
    handed_on = [part.rows for its in parts for part in its if not part.last]
    unfinished = without(handed_on, [part.rows for its in parts for part in its if part.last])
    shared = union(piece.rows for pieces in gives for piece in pieces)
    if not few or sum(map(length, shared)) > few or len(shared) > 2:
        shared = [slice(0, layout.local_length)]
    return Plan(mine, gives, most_keys, parts, around(handed_on), unfinished, shared)


def _in_parts(steps: list[Step], few: int) -> list[list[Part]]:
    """Each step's queries are one part; but the own block's few that later steps have, in one run or two, go apart."""
    found: list[list[Part]] = []
    for index, step in enumerate(steps):
        later = union(other.queries for other in steps[index + 1 :])
        runs = [step.queries] if step.pieces or index == 0 else []
        if index == 0 and len(later) in (1, 2) and sum(map(length, later)) <= few:
            if later[-1].stop == num_rows(step.q_at):  # padding is not a part by itself
                later[-1] = slice(later[-1].start, step.queries.stop)
            runs = sorted([*later, *without(runs, later)], key=lambda run: run.start)
        first = step.queries.start
        found.append(
            [
                Part(run, cut(step.q_at, run.start - first, run.stop - first), without([run], later) == union([run]))
                for run in runs
            ]
        )
    return found


def _own_block(layout: Layout, rank: int) -> Step:
    """All rows, padding too: the first call writes every row of out and lse."""
    at = layout.segments(rank)
    return Step(slice(0, layout.local_length), at, [Piece(rank, slice(0, num_rows(at)), 0)], at)


GRAIN = 16  # rows. Kernels are compiled again for numbers that 16 does not divide, and documents end anywhere


def _step(layout: Layout, reader: int, owners: list[int], seen: dict[Between, VisibleRows]) -> Step:
    first, end = layout.local_length, 0
    found: list[tuple[Segment, int, slice]] = []  # where keys stand, whose they are, which rows
    for owner in owners:
        key_row = 0
        for j, segment in enumerate(layout.segments(owner)):
            keys_first, keys_end, query_row = segment[2], 0, 0
            for i, (_, _, count) in enumerate(layout.segments(reader)):
                if (reader, i, owner, j) in seen:
                    run = seen[reader, i, owner, j]
                    first, end = min(first, query_row + run[0]), max(end, query_row + run[1])
                    keys_first, keys_end = min(keys_first, run[2]), max(keys_end, run[3])
                query_row += count
            if keys_first < keys_end:
                rows = slice(key_row + keys_first, key_row + keys_end)
                found.append((cut([segment], keys_first, keys_end)[0], owner, rows))
            key_row += segment[2]
    if not found:
        return Step(slice(0, 0), [], [], [])
    if len(owners) > 1:
        found.sort(key=lambda item: item[0])  # by position: then kernels see as few runs of keys as there are
    pieces: list[Piece] = []
    at = 0
    for _, owner, rows in found:
        if pieces and pieces[-1].rank == owner and pieces[-1].rows.stop == rows.start:
            before = pieces.pop()  # one message, not two
            pieces.append(Piece(owner, slice(before.rows.start, rows.stop), before.at))
        else:
            pieces.append(Piece(owner, rows, at))
        at += rows.stop - rows.start
    return Step(slice(first, end), cut(layout.segments(reader), first, end), pieces, [item[0] for item in found])


def _visible_rows(layout: Layout, mask: Mask) -> dict[Between, VisibleRows]:
    """(reader, its segment, owner, its segment) → who sees whom; pairs that see nothing are left out."""
    names = [(rank, i) for rank in range(layout.ranks) for i in range(len(layout.segments(rank)))]
    segments = [segment for rank in range(layout.ranks) for segment in layout.segments(rank)]
    if not segments:
        return {}
    start, step, count = torch.tensor(segments).unbind(1)
    q_start, q_step, q_count = (x[:, None].expand(-1, len(names)) for x in (start, step, count))
    k_start, k_step, k_count = (x[None, :].expand(len(names), -1) for x in (start, step, count))
    k_last = k_start + (k_count - 1) * k_step

    def bounds(row: Tensor) -> tuple[Tensor, Tensor]:
        """lo and hi of these rows of the queries, the widest of a batch."""
        lo, hi = mask.interval((q_start + row * q_step).flatten(), layout.length)
        if lo.ndim == 2:
            lo, hi = lo.amin(0), hi.amax(0)
        return lo.view_as(row), hi.view_as(row)

    first = _first_row(q_count, lambda row: bounds(row)[1] >= k_start)
    end = _first_row(q_count, lambda row: bounds(row)[0] > k_last)
    lowest, _ = bounds(first.minimum(q_count - 1))
    _, highest = bounds((end - 1).clamp(min=0))
    key_first = (-((k_start - lowest) // k_step)).clamp(min=0)  # rounded up
    key_end = (highest.minimum(k_last) - k_start) // k_step + 1
    runs = torch.stack([first, end, key_first, key_end], -1).tolist()
    return {
        (*reader, *owner): _widened(runs[a][b], segments[a][2], segments[b][2])
        for a, reader in enumerate(names)
        for b, owner in enumerate(names)
        if reader[0] != owner[0] and runs[a][b][0] < runs[a][b][1] and runs[a][b][2] < runs[a][b][3]
    }


def _widened(run: VisibleRows, num_queries: int, num_keys: int) -> VisibleRows:
    """To multiples of GRAIN rows, where there are as many; the mask hides the extra rows."""
    first, end, key_first, key_end = (n // GRAIN * GRAIN for n in (run[0], run[1] + GRAIN - 1, run[2], run[3] + GRAIN - 1))
    return first, min(end, num_queries), key_first, min(key_end, num_keys)


def _first_row(count: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """The first row for which the test holds, as it then does for all later ones; `count` if there is none."""
    low, high = torch.zeros_like(count), count.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        holds = test(middle.minimum(count - 1)) | (low >= high)
        high = torch.where(holds & (low < high), middle, high)
        low = torch.where(holds, low, middle + 1)
    return low
