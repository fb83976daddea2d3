"""Segments: validation, positions, and the row ranges that a kernel can take."""

import itertools

import pytest
import torch

from ringspan.kernels.segments import (
    Segment,
    ascending_ranges,
    check_segments,
    cut,
    num_rows,
    position_range,
    positions,
)


def test_empty_segments_are_dropped_and_adjacent_ones_merged() -> None:
    assert check_segments("q_at", [(0, 1, 4), (4, 1, 3), (9, 1, 0), (9, 2, 2)], 9) == ((0, 1, 7), (9, 2, 2))


def test_positions_and_number_of_rows() -> None:
    segments = [(3, 2, 3), (20, 1, 2)]
    assert positions(segments).tolist() == [3, 5, 7, 20, 21]
    assert num_rows(segments) == 5
    assert position_range(segments) == (3, 21)


def test_ascending_ranges_have_at_most_two_segments() -> None:
    assert ascending_ranges(((5, 1, 5), (0, 1, 5), (8, 1, 2), (20, 1, 1))) == (
        (slice(0, 5), ((5, 1, 5),)),
        (slice(5, 12), ((0, 1, 5), (8, 1, 2))),
        (slice(12, 13), ((20, 1, 1),)),
    )


def test_cut_returns_the_segments_of_a_row_range() -> None:
    assert cut([(0, 1, 5), (20, 2, 4)], 3, 7) == [(3, 1, 2), (20, 2, 2)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 0, 4)], "needs step >= 1 and count >= 0"),
        ([(0, 1, -1)], "needs step >= 1 and count >= 0"),
        ([(0, 1, 10)], "describes 10 rows, the tensor has 9"),
        ([(2**29, 1, 1)], "positions must stay below"),
        ([(0.0, 1, 4)], "must be three ints"),
        ([(0, 1)], "must be three ints"),
        ([(torch.tensor(0), 1, 4)], "must be three ints"),
    ],
)
def test_invalid_segments_are_rejected(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=f"q_at .*{message}"):
        check_segments("q_at", segments, 9)


def test_cut_keeps_the_positions_of_its_rows() -> None:
    segments = [(10, 1, 4), (3, 5, 3)]
    for start, stop in itertools.combinations_with_replacement(range(8), 2):
        assert positions(cut(segments, start, stop)).equal(positions(segments)[start:stop])
