"""Map the rows of a local tensor to global positions with segments `(start, step, count)`.

Row i of a segment is at position `start + i * step`. The rows of a tensor follow the segments in order:

    contiguous shard    [(32, 1, 32)]
    zigzag shard        [(16, 1, 16), (64, 1, 16)]
    striped shard       [(1, P, 32)]                  one of P ranks

Rows past the end of the last segment are padding. They attend to no key, no query attends to them, and the contents of
their memory never affect a result.

A kernel takes at most two ascending segments: positions then ascend with the row, so each interval of positions is an
interval of rows. `ascending_ranges` splits any other list into row ranges of that kind.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Segment = tuple[int, int, int]
Segments = tuple[Segment, ...]  # validated and hashable, so usable as a cache key
SegmentRows = tuple[slice, Segments]  # a row range and its segments: at most two, with ascending positions
POSITION_LIMIT = 2**29  # kernels compute positions in int32, and sums of three of them must not overflow


def one_segment(length: int, start: int = 0) -> list[Segment]:
    """Return the segments of a tensor that is not sharded: positions start … start + length − 1."""
    return [(start, 1, length)]


def check_segments(name: str, segments: Iterable[Segment], rows: int) -> Segments:
    """Validate segments for a tensor with `rows` rows; drop empty ones and merge those that continue each other.

    Raises:
        ValueError: A segment is not three ints, has step < 1 or count < 0, reaches position 2**29, or the segments
            describe more than `rows` rows. The message begins with `name`.
    """
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
    """Return the number of rows that the segments describe."""
    return sum(count for _, _, count in segments)


def position_range(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return the lowest and the highest position."""
    return min(start for start, _, _ in segments), max(start + step * (count - 1) for start, step, count in segments)


def cut(segments: Sequence[Segment], first: int, end: int) -> list[Segment]:
    """Return the segments of rows first … end − 1."""
    pieces = []
    for start, step, count in segments:
        low, high = max(first, 0), min(end, count)
        if low < high:
            pieces.append((start + low * step, step, high - low))
        first, end = first - count, end - count
    return pieces


def positions(segments: Sequence[Segment], device: torch.device | str = "cpu") -> Tensor:
    """Return the global position of each row: (num_rows,) int64."""
    parts = [torch.arange(count, device=device) * step + start for start, step, count in segments]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4096)
def ascending_ranges(segments: Segments) -> tuple[SegmentRows, ...]:
    """Split segments into row ranges that a kernel can take, in row order; together they cover all rows."""
    ranges: list[SegmentRows] = []
    row = 0
    for segment in segments:
        start, _, count = segment
        if ranges and len(ranges[-1][1]) == 1:
            rows, (previous,) = ranges[-1]
            if previous[0] + previous[1] * (previous[2] - 1) < start:
                ranges[-1] = slice(rows.start, row + count), (previous, segment)
                row += count
                continue
        ranges.append((slice(row, row + count), (segment,)))
        row += count
    return tuple(ranges)
