"""Row ranges, compared with sets of rows."""

import itertools

from ringspan.parallel.row_ranges import bounding_range, difference, packed, packed_position, relative_to, union

RANGES = [slice(a, b) for a, b in itertools.combinations_with_replacement(range(6), 2)]


def test_union_difference_and_bounding_range() -> None:
    for first, second, removed in itertools.product(RANGES, repeat=3):
        rows = {*range(6)[first], *range(6)[second]}
        cases = (union([first, second]), rows), (difference([first, second], [removed]), rows - {*range(6)[removed]})
        for ranges, expected in cases:
            assert [row for r in ranges for row in range(6)[r]] == sorted(expected)
            assert all(r.start < r.stop for r in ranges)
        for lower, upper in itertools.pairwise(union([first, second])):
            assert lower.stop < upper.start
        assert rows <= {*range(6)[bounding_range([first, second])]}


def test_packed_ranges_follow_each_other() -> None:
    ranges = [slice(2, 5), slice(7, 7), slice(8, 12)]
    assert packed(ranges) == [(slice(2, 5), slice(0, 3)), (slice(7, 7), slice(3, 3)), (slice(8, 12), slice(3, 7))]
    rows, buffer = list(range(12)), [row for r in ranges for row in range(12)[r]]
    for outer in ranges:
        for start, stop in itertools.combinations(range(outer.start, outer.stop + 1), 2):
            assert buffer[packed_position(slice(start, stop), ranges)] == rows[start:stop]


def test_relative_to_counts_from_the_base() -> None:
    rows = list(range(12))
    for start, stop in itertools.combinations_with_replacement(range(3, 10), 2):
        assert rows[3:10][relative_to(slice(start, stop), slice(3, 10))] == rows[start:stop]
