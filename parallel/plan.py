"""Plan of one ring call, made from layout and mask alone: the rows that each step reads, sends and receives.

    step 0      local block: this rank's queries and K/V
    step 1 …    remote blocks: of the preceding rank, of the rank before it, …; one or several owner ranks per step

Owner ranks send rows directly to reader ranks. Both ends of a transfer compute the same plan, so ranks exchange no sizes. A
step that is empty on all ranks is dropped on all ranks; a rank with an empty share of a step launches no kernel for it.

lo(p) and hi(p) of an interval mask never decrease. So the queries of one segment that attend to another segment form a row
range, and so do the keys that they attend to. Two bisections find both, for all pairs of segments at once.
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
from ringspan.parallel.row_ranges import bounding_range, difference, length, union


@dataclass(frozen=True)
class Piece:
    """Consecutive rows that one rank sends to another."""

    rank: int  # the owner rank in `Step.pieces`, the reader rank in `Plan.sends`
    rows: slice  # of the owner's shard
    offset: int  # first row of the piece in the reader's block

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass(frozen=True)
class Step:
    """Some of this rank's queries, and the rows of one or several owner ranks that they attend to."""

    queries: slice
    q_at: list[Segment]
    pieces: list[Piece]  # concatenated, they are the step's keys
    k_at: list[Segment]

    @cached_property
    def num_keys(self) -> int:
        return sum(len(piece) for piece in self.pieces)


class QueryPart(NamedTuple):
    """Queries of a step that go through one forward kernel."""

    rows: slice
    q_at: list[Segment]
    is_last: bool  # no later step reads or writes these rows


class Plan(NamedTuple):
    steps: list[Step]  # the local block first
    sends: list[list[Piece]]  # per step: local rows that other ranks read
    max_keys: int  # upper bound on num_keys over all steps and ranks, whatever the documents are
    query_parts: list[list[QueryPart]]  # per step
    carried: slice  # smallest range with every query row whose (out, lse) is passed to a later kernel
    unfinished: list[slice]  # carried rows whose last kernel still wrote fp32; cast to the output dtype after the loop
    # local key rows that receive remote gradients; all rows with padding, if more than `few` or in > 2 ranges
    shared: list[slice]


SegmentPair = tuple[int, int, int, int]  # reader rank, index of its segment, owner rank, index of its segment
VisibleRows = tuple[int, int, int, int]  # query rows first … end − 1, key rows first … end − 1, both within their segment


def make_plan(layout: Layout, mask: Mask, rank: int, blocks: tuple[int, ...] = ()) -> Plan:
    """Return the plan of `rank`, cached per layout, mask, rank and `blocks`.

    Only mask data in host memory is used, because reading device tensors would synchronise. Documents have no plan of their own
    if the rest of the mask leaves few remote rows, as a short window does: kernels hide the rows of other documents.

    Args:
        layout: Layout of the ring, with ulysses = 1.
        mask: Attention mask of the whole sequence.
        rank: Rank in the ring.
        blocks: Number of remote blocks per step; sums to ranks − 1. The default is one block per step.
    """
    host_mask = mask.host_mask()
    left, right, _, starts, ends, prefix = host_mask.bounds()
    prefix_lengths = None if prefix is None else tuple(prefix.tolist())
    if starts is None or ends is None or _has_few_remote_rows(layout, left, right, prefix_lengths):
        return _cached_plan(layout, left, right, prefix_lengths, rank, blocks)
    cache = _document_caches.setdefault(starts, {})
    rule = layout, left, right, prefix_lengths
    if rule not in cache:
        cache[rule] = _find_visible_rows(layout, host_mask)
    if (*rule, rank, blocks) not in cache:
        # Buffers are sized for any documents: to grow them for the next batch's, all ranks would have to synchronise.
        min_capacity = layout.local_length * max((1, *blocks))
        cache[*rule, rank, blocks] = _build_plan(layout, cache[rule], rank, blocks, min_capacity, 0)
    return cache[*rule, rank, blocks]


# Visible rows and plans, keyed by the document tensor, which all layers of a training step share.
_document_caches = WeakTensorKeyDictionary()


@lru_cache(maxsize=256)
def _cached_plan(
    layout: Layout, left: int, right: int, prefix_lengths: tuple[int, ...] | None, rank: int, blocks: tuple[int, ...]
) -> Plan:
    visible = _cached_visible_rows(layout, left, right, prefix_lengths)
    return _build_plan(layout, visible, rank, blocks, layout.local_length, few_rows(layout))


def few_rows(layout: Layout) -> int:
    """Return the number of rows of a shard up to which rows of remote blocks are computed apart from the others."""
    return layout.local_length // 4


@lru_cache(maxsize=256)
def _has_few_remote_rows(layout: Layout, left: int, right: int, prefix_lengths: tuple[int, ...] | None) -> bool:
    """Whether a rank reads few remote rows on average. Equal on all ranks, which must agree on their plans."""
    visible = _cached_visible_rows(layout, left, right, prefix_lengths)
    return sum(end - first for _, _, first, end in visible.values()) <= layout.ranks * few_rows(layout)


@lru_cache(maxsize=256)
def _cached_visible_rows(
    layout: Layout, left: int, right: int, prefix_lengths: tuple[int, ...] | None
) -> dict[SegmentPair, VisibleRows]:
    prefix = None if prefix_lengths is None else torch.tensor(prefix_lengths, dtype=torch.int32)
    return _find_visible_rows(layout, Mask.from_bounds(Mask().bounds()._replace(left=left, right=right, prefix=prefix)))


def _build_plan(
    layout: Layout,
    visible: dict[SegmentPair, VisibleRows],
    rank: int,
    blocks: tuple[int, ...],
    min_capacity: int,
    few: int,
) -> Plan:
    """Build a plan whose `max_keys` is at least `min_capacity`.

    If remote blocks involve at most `few` local rows, as with a window, the other local rows are computed separately: they
    need no fp32 sums. `few` is 0 for a plan of documents: their borders differ between batches, and buffer sizes stay constant.
    """
    ends = list(accumulate(blocks or (1,) * (layout.ranks - 1), initial=1))
    assert ends[-1] == layout.ranks, f"blocks={blocks} cover {ends[-1] - 1} remote ranks, not {layout.ranks - 1}"
    local_steps: list[Step] = [_local_block(layout, rank)]
    sends: list[list[Piece]] = [[]]
    max_keys = min_capacity
    for shifts in starmap(range, pairwise(ends)):
        steps = [
            _step(layout, reader, [(reader - s) % layout.ranks for s in shifts], visible) for reader in range(layout.ranks)
        ]
        if not any(step.pieces for step in steps):
            continue
        local_steps.append(steps[rank])
        readers = [(rank + shift) % layout.ranks for shift in shifts]  # each owner starts with another reader
        sends.append(
            [replace(piece, rank=reader) for reader in readers for piece in steps[reader].pieces if piece.rank == rank]
        )
        max_keys = max(max_keys, *(step.num_keys for step in steps))
    query_parts = _split_queries(local_steps, few)
    carried = [part.rows for parts in query_parts for part in parts if not part.is_last]
    unfinished = difference(carried, [part.rows for parts in query_parts for part in parts if part.is_last])
    shared = union(piece.rows for pieces in sends for piece in pieces)
    if not few or sum(map(length, shared)) > few or len(shared) > 2:
        shared = [slice(0, layout.local_length)]
    return Plan(local_steps, sends, max_keys, query_parts, bounding_range(carried), unfinished, shared)


def _split_queries(steps: list[Step], few: int) -> list[list[QueryPart]]:
    """One part per step; in step 0, at most `few` rows that later steps read, in one or two ranges, are parts of their own."""
    query_parts: list[list[QueryPart]] = []
    for index, step in enumerate(steps):
        later = union(later_step.queries for later_step in steps[index + 1 :])
        ranges = [step.queries] if step.pieces or index == 0 else []
        if index == 0 and len(later) in (1, 2) and sum(map(length, later)) <= few:
            if later[-1].stop == num_rows(step.q_at):  # keeps padding from becoming a part of its own
                later[-1] = slice(later[-1].start, step.queries.stop)
            ranges = sorted([*later, *difference(ranges, later)], key=lambda rows: rows.start)
        first = step.queries.start
        query_parts.append(
            [
                QueryPart(
                    rows,
                    cut(step.q_at, rows.start - first, rows.stop - first),
                    is_last=difference([rows], later) == union([rows]),
                )
                for rows in ranges
            ]
        )
    return query_parts


def _local_block(layout: Layout, rank: int) -> Step:
    """Step 0. Its queries include padding, so the first call writes every row of out and lse."""
    at = layout.segments(rank)
    return Step(slice(0, layout.local_length), at, [Piece(rank, slice(0, num_rows(at)), 0)], at)


# Row ranges are rounded to multiples of this: Triton compiles a kernel again for integers that 16 does not divide, and
# documents end at any row.
ROW_MULTIPLE = 16


def _step(layout: Layout, reader: int, owners: list[int], visible: dict[SegmentPair, VisibleRows]) -> Step:
    first, end = layout.local_length, 0
    key_ranges: list[tuple[Segment, int, slice]] = []  # segment, owner rank, rows of the owner's shard
    for owner in owners:
        key_row = 0
        for j, segment in enumerate(layout.segments(owner)):
            keys_first, keys_end, query_row = segment[2], 0, 0
            for i, (_, _, count) in enumerate(layout.segments(reader)):
                if (reader, i, owner, j) in visible:
                    rows = visible[reader, i, owner, j]
                    first, end = min(first, query_row + rows[0]), max(end, query_row + rows[1])
                    keys_first, keys_end = min(keys_first, rows[2]), max(keys_end, rows[3])
                query_row += count
            if keys_first < keys_end:
                key_rows = slice(key_row + keys_first, key_row + keys_end)
                key_ranges.append((cut([segment], keys_first, keys_end)[0], owner, key_rows))
            key_row += segment[2]
    if not key_ranges:
        return Step(slice(0, 0), [], [], [])
    if len(owners) > 1:
        key_ranges.sort(key=lambda key_range: key_range[0])  # by position, so that kernels get the fewest ascending ranges
    pieces: list[Piece] = []
    offset = 0
    for _, owner, key_rows in key_ranges:
        if pieces and pieces[-1].rank == owner and pieces[-1].rows.stop == key_rows.start:
            previous = pieces.pop()  # one message instead of two
            pieces.append(Piece(owner, slice(previous.rows.start, key_rows.stop), previous.offset))
        else:
            pieces.append(Piece(owner, key_rows, offset))
        offset += key_rows.stop - key_rows.start
    k_at = [segment for segment, _, _ in key_ranges]
    return Step(slice(first, end), cut(layout.segments(reader), first, end), pieces, k_at)


def _find_visible_rows(layout: Layout, mask: Mask) -> dict[SegmentPair, VisibleRows]:
    """Return the visible query and key rows of each pair of segments of two ranks; pairs without any are left out."""
    names = [(rank, i) for rank in range(layout.ranks) for i in range(len(layout.segments(rank)))]
    segments = [segment for rank in range(layout.ranks) for segment in layout.segments(rank)]
    if not segments:
        return {}
    start, step, count = torch.tensor(segments).unbind(1)
    q_start, q_step, q_count = (x[:, None].expand(-1, len(names)) for x in (start, step, count))
    k_start, k_step, k_count = (x[None, :].expand(len(names), -1) for x in (start, step, count))
    k_last = k_start + (k_count - 1) * k_step

    def bounds(row: Tensor) -> tuple[Tensor, Tensor]:
        """Return lo and hi of these query rows; of a batch, the widest interval."""
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
    rows = torch.stack([first, end, key_first, key_end], -1).tolist()
    return {
        (*reader, *owner): _round_out(rows[i][j], segments[i][2], segments[j][2])
        for i, reader in enumerate(names)
        for j, owner in enumerate(names)
        if reader[0] != owner[0] and rows[i][j][0] < rows[i][j][1] and rows[i][j][2] < rows[i][j][3]
    }


def _round_out(rows: VisibleRows, num_queries: int, num_keys: int) -> VisibleRows:
    """Widen both ranges to multiples of ROW_MULTIPLE, at most to the whole segment. The mask hides the extra rows."""
    first, end, key_first, key_end = rows
    round_up = ROW_MULTIPLE - 1
    first, end, key_first, key_end = (
        n // ROW_MULTIPLE * ROW_MULTIPLE for n in (first, end + round_up, key_first, key_end + round_up)
    )
    return first, min(end, num_queries), key_first, min(key_end, num_keys)


def _first_row(count: Tensor, condition: Callable[[Tensor], Tensor]) -> Tensor:
    """Bisect for the first row at which a monotone condition holds; `count` if it holds at none."""
    low, high = torch.zeros_like(count), count.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        holds = condition(middle.minimum(count - 1)) | (low >= high)
        high = torch.where(holds & (low < high), middle, high)
        low = torch.where(holds, low, middle + 1)
    return low
