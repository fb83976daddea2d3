"""Operations on row ranges: slices from the first row to one past the last row."""

from collections.abc import Iterable
from itertools import accumulate


def union(ranges: Iterable[slice]) -> list[slice]:
    """Return the rows of all ranges as disjoint, non-adjacent ranges in ascending order."""
    merged: list[slice] = []
    for rows in sorted(ranges, key=lambda rows: rows.start):
        if merged and rows.start <= merged[-1].stop:
            merged[-1] = slice(merged[-1].start, max(rows.stop, merged[-1].stop))
        elif rows.start < rows.stop:
            merged.append(rows)
    return merged


def difference(ranges: Iterable[slice], removed: Iterable[slice]) -> list[slice]:
    """Return the rows of `ranges` that are not in `removed`, in ascending order."""
    remaining: list[slice] = []
    gaps = union(removed)
    for rows in union(ranges):
        start = rows.start
        for gap in gaps:
            if start < gap.start < rows.stop:
                remaining.append(slice(start, gap.start))
            if gap.start < rows.stop:
                start = max(start, gap.stop)
        if start < rows.stop:
            remaining.append(slice(start, rows.stop))
    return remaining


def bounding_range(ranges: list[slice]) -> slice:
    """Return the smallest range that contains all ranges; an empty one if there are none."""
    return slice(min(rows.start for rows in ranges), max(rows.stop for rows in ranges)) if ranges else slice(0, 0)


def contains(outer: slice, rows: slice) -> bool:
    return outer.start <= rows.start and rows.stop <= outer.stop


def relative_to(rows: slice, base: slice) -> slice:
    """Return `rows` counted from the first row of `base`."""
    return slice(rows.start - base.start, rows.stop - base.start)


def packed(ranges: list[slice]) -> list[tuple[slice, slice]]:
    """Return each range with its position in a buffer that holds the ranges one after another."""
    ends = list(accumulate(map(length, ranges), initial=0))
    return [(rows, slice(start, end)) for rows, start, end in zip(ranges, ends, ends[1:], strict=False)]


def packed_position(rows: slice, ranges: list[slice]) -> slice:
    """Return the position of `rows`, which lie inside one of the ranges, in a buffer that packs the ranges."""
    offset = next(at.start - outer.start for outer, at in packed(ranges) if contains(outer, rows))
    return slice(rows.start + offset, rows.stop + offset)


def length(rows: slice) -> int:
    return rows.stop - rows.start
