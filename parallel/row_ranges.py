"""Runs of rows, as slices from their first row to behind their last."""

from collections.abc import Iterable
from itertools import accumulate


def union(runs: Iterable[slice]) -> list[slice]:
    """All of these rows, once and in order."""
    found: list[slice] = []
    for run in sorted(runs, key=lambda run: run.start):
        if found and run.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(run.stop, found[-1].stop))
        elif run.start < run.stop:
            found.append(run)
    return found


def without(runs: Iterable[slice], taken: Iterable[slice]) -> list[slice]:
    """The rows of the first that are none of the second, in order."""
    found: list[slice] = []
    gaps = union(taken)
    for run in union(runs):
        begin = run.start
        for gap in gaps:
            if begin < gap.start < run.stop:
                found.append(slice(begin, gap.start))
            if gap.start < run.stop:
                begin = max(begin, gap.stop)
        if begin < run.stop:
            found.append(slice(begin, run.stop))
    return found


def around(runs: list[slice]) -> slice:
    """One run that has all of these."""
    return slice(min(run.start for run in runs), max(run.stop for run in runs)) if runs else slice(0, 0)


def within(run: slice, whole: slice) -> slice:
    """The run, counted from where the whole begins."""
    return slice(run.start - whole.start, run.stop - whole.start)


def packed(whole: list[slice]) -> list[tuple[slice, slice]]:
    """Each of these runs, and where it is if they stand one behind another."""
    ends = list(accumulate(map(length, whole), initial=0))
    return [(run, slice(begin, end)) for run, begin, end in zip(whole, ends, ends[1:], strict=False)]


def place(run: slice, whole: list[slice]) -> slice:
    """Where a run is that is in one of these, if they stand one behind another."""
    begin = next(at.start - other.start for other, at in packed(whole) if other.start <= run.start and run.stop <= other.stop)
    return slice(run.start + begin, run.stop + begin)


def length(run: slice) -> int:
    return run.stop - run.start
