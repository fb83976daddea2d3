"""Where the rows of a local tensor sit in the whole sequence.

A tensor's rows are described by a list of segments `(start, step, count)`: row i of a segment stands at position
`start + i * step`. A contiguous shard is one segment, a zigzag shard two, a striped shard one with step P. Rows behind the
last segment are padding: they see nothing, nothing sees them, and what their memory holds is never used.

Kernels take two ascending segments at most, because then positions ascend with the row and every interval of positions is
an interval of rows. `ascending_runs` cuts any other list into pieces of that kind.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Segment = tuple[int, int, int]
Segments = tuple[Segment, ...]  # checked, and fit to be the key of a cache
SegmentRows = tuple[slice, Segments]  # rows, and at most two segments whose positions ascend
POSITION_LIMIT = 2**29  # kernels compute positions in int32, and sums of three of them must not overflow


def whole(length: int, start: int = 0) -> list[Segment]:
    """The segments of a tensor that is not sharded."""
    return [(start, 1, length)]


def check_segments(name: str, segments: Iterable[Segment], rows: int) -> Segments:
    """The same segments without empty ones; neighbours that continue each other become one."""
    merged: list[Segment] = []
    for segment in segments:
        if len(segment) != 3 or not all(isinstance(number, int) for number in segment):
            raise ValueError(f"{name} has the segment {segment}: it must be three ints, (start, step, count)")
        start, step, count = segment
        if step < 1 or count < 0:
            raise ValueError(f"{name} has the segment {(start, step, count)}: it needs step >= 1 and count >= 0")
        if abs(start) + step * count >= POSITION_LIMIT:
            raise ValueError(f"{name} has the segment {(start, step, count)}: positions must stay below 2**29")
        if count == 0:
            continue
        if merged and merged[-1][1] == step and merged[-1][0] + step * merged[-1][2] == start:
            merged[-1] = (merged[-1][0], step, merged[-1][2] + count)
        else:
            merged.append((start, step, count))
    if num_rows(merged) > rows:
        raise ValueError(f"{name} describes {num_rows(merged)} rows, the tensor has {rows}: shorten the segments")
    return tuple(merged)


def num_rows(segments: Sequence[Segment]) -> int:
    return sum(count for _, _, count in segments)


def reach(segments: Sequence[Segment]) -> tuple[int, int]:
    """The first and the last position."""
    return min(start for start, _, _ in segments), max(start + step * (count - 1) for start, step, count in segments)


def cut(segments: Sequence[Segment], first: int, end: int) -> list[Segment]:
    """The segments of the rows first … end - 1."""
    pieces = []
    for start, step, count in segments:
        a, b = max(first, 0), min(end, count)
        if a < b:
            pieces.append((start + a * step, step, b - a))
        first, end = first - count, end - count
    return pieces


def positions(segments: Sequence[Segment], device: torch.device | str = "cpu") -> Tensor:
    """(num_rows,) int64: the global position of each row."""
    parts = [torch.arange(count, device=device) * step + start for start, step, count in segments]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


PIECE = 128  # rows that pieces have a multiple of: kernels are compiled again for numbers that 16 does not divide


def in_pieces(run: SegmentRows, most: int) -> list[SegmentRows]:
    """A run as runs of about as many rows each, `most` at most, but PIECE at least."""
    rows, segments = run
    count = rows.stop - rows.start
    pieces = -(-count // max(PIECE, most // PIECE * PIECE))
    each = max(1, -(-count // max(1, pieces * PIECE))) * PIECE
    borders = [*range(0, count, each), count]
    return [
        (slice(rows.start + a, rows.start + b), tuple(cut(segments, a, b))) for a, b in itertools.pairwise(borders) if a < b
    ]


@functools.lru_cache(maxsize=4096)
def ascending_runs(segments: Segments) -> tuple[SegmentRows, ...]:
    """In row order, covering all rows."""
    runs: list[SegmentRows] = []
    row = 0
    for segment in segments:
        start, _, count = segment
        if runs and len(runs[-1][1]) == 1:
            rows, (before,) = runs[-1]
            if before[0] + before[1] * (before[2] - 1) < start:
                runs[-1] = slice(rows.start, row + count), (before, segment)
                row += count
                continue
        runs.append((slice(row, row + count), (segment,)))
        row += count
    return tuple(runs)
