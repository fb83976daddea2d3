"""Tables of documents against a search of each row's counterparts, for random documents with gaps, on either side."""

import random

import pytest
import torch

from ringspan import Mask
from ringspan.kernels.document_tables import (
    GAP,
    ids_are_ordered,
    joint_tables_from_boundaries,
    query_origin,
    tables_from_boundaries,
    tables_from_ids,
)
from ringspan.kernels.segments import positions

LENGTHS = (0, 0, 1, 1, 2, 5, 17)
RULES = [dict(), dict(causal=True), dict(window=1), dict(causal=True, window=4), dict(window=(2, 3)), dict(window=(0, 50))]


def random_ids(generator: random.Random, padding: bool) -> list[int]:
    """Ids 0 to 5 in order, each some number of times, perhaps with padding between them."""
    ids: list[int] = []
    for document in range(6):
        ids += [-1] * generator.choice((0, 0, 1, 4)) * padding + [document] * generator.choice(LENGTHS)
    return ids + [-1] * generator.choice((0, 3)) * padding


def attends(i: int, j: int, q_ids: list[int], k_ids: list[int], rules: dict) -> bool:
    """The rule, with the last query of a document at its last key."""
    document = q_ids[i]
    if document < 0 or k_ids[j] != document:
        return False
    distance = i - j + (len(k_ids) - 1 - k_ids[::-1].index(document)) - (len(q_ids) - 1 - q_ids[::-1].index(document))
    window = rules.get("window", len(q_ids) + len(k_ids))
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    return -(0 if rules.get("causal") else right) <= distance <= left


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("padding", [False, True])
def test_joint_tables_of_ids_equal_the_rule_for_each_pair(rules: dict, padding: bool) -> None:
    """The keys of each query, and the queries of each key. Bounds never decrease, also in empty documents and padding."""
    generator = random.Random(f"{rules} {padding}")
    for _ in range(20):
        q_ids, k_ids = random_ids(generator, padding), random_ids(generator, padding)
        expected = [[attends(i, j, q_ids, k_ids, rules) for j in range(len(k_ids))] for i in range(len(q_ids))]
        visible = torch.tensor(expected, dtype=torch.bool).reshape(len(q_ids), len(k_ids))
        q_tensor, k_tensor = torch.tensor(q_ids, dtype=torch.int64), torch.tensor(k_ids, dtype=torch.int64)
        mask = Mask(**rules, documents=q_tensor, key_documents=k_tensor)
        q_at, k_at = (positions(at) for at in mask.joint_segments(len(q_ids), len(k_ids)))
        assert torch.equal(mask.visible(q_at, k_at)[0], visible)
        assert torch.equal(mask.visible(k_at, q_at)[0], visible.T)
        for rows in (q_at, torch.arange(len(k_ids) + GAP)):
            lo, hi = mask.interval(rows)
            assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_boundaries_and_ids_give_the_same_tables(rules: dict) -> None:
    generator = random.Random(str(rules))
    for _ in range(20):
        q_lengths, k_lengths = ([generator.choice(LENGTHS) for _ in range(7)] for _ in range(2))
        q_ids, k_ids = (torch.arange(7).repeat_interleave(torch.tensor(n)) for n in (q_lengths, k_lengths))
        q_bounds, k_bounds = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in (q_lengths, k_lengths))
        mask = Mask(**rules, documents=q_ids, key_documents=k_ids)
        left, right = Mask(**rules).bounds()[:2]
        joint = joint_tables_from_boundaries(q_bounds, k_bounds, len(q_ids), len(k_ids), left, right)
        visible, at = Mask().with_tables(joint, (len(q_ids), len(k_ids))), mask.joint_segments(len(q_ids), len(k_ids))
        rows, keys = (positions(x) for x in at)
        assert torch.equal(visible.visible(rows, keys), mask.visible(rows, keys))
        assert torch.equal(visible.visible(keys, rows), mask.visible(keys, rows))
        for from_ids, from_bounds in zip(tables_from_ids(q_ids), tables_from_boundaries(q_bounds, len(q_ids)), strict=True):
            assert torch.equal(from_ids, from_bounds) and from_bounds.dtype == torch.int32


def test_rows_past_the_last_key_are_empty_up_to_the_end_of_a_tile() -> None:
    for num_keys in (0, 1, 127, 128, 500):
        bounds = torch.tensor([0, num_keys], dtype=torch.int32)
        starts, ends = joint_tables_from_boundaries(bounds, bounds, num_keys, num_keys, -1, 0)
        first = query_origin(num_keys)
        assert first % 128 == 0 and first - num_keys >= GAP and len(starts) == first + num_keys
        assert (starts[num_keys:first] == len(starts)).all() and (ends[num_keys:first] == len(starts) - 1).all()


@pytest.mark.parametrize(
    ("ids", "ordered"),
    [([], True), ([0, 0, 3, 7], True), ([-1, 2, -5, 4, -1], True), ([1, 0], False), ([0, -1, 0], False), ([-1, -1], True)],
)
def test_ids_are_ordered(ids: list[int], ordered: bool) -> None:
    assert bool(ids_are_ordered(torch.tensor(ids, dtype=torch.int64))) is ordered
    batch = torch.tensor([ids, [8] * len(ids)], dtype=torch.int64)
    assert bool(ids_are_ordered(batch)) is ordered
