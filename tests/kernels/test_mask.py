"""Masks against the words of their rule, pair by pair, and the errors that a wrong mask gives."""

import pytest
import torch

from ringspan import Mask, attention
from ringspan.kernels.segments import positions
from tests.kernels.cases import CASES, packed
from tests.kernels.dense import Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_intervals_are_the_rule(case: Case) -> None:
    keys = case.rows if case.keys is None else case.keys
    p = torch.arange(case.rows) + keys - case.rows
    seen = case.mask().visible(p, torch.arange(keys))
    expected = case.visible("cpu")
    assert torch.equal(*torch.broadcast_tensors(seen, expected))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_intervals_never_decrease(case: Case) -> None:
    """What lets the first and last row bound a tile. Behind the documents too, where padding of a layout stands."""
    lo, hi = case.mask().interval(torch.arange(case.rows + 9))
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()


def test_interval_bounds() -> None:
    lo, hi = Mask(causal=True, window=3).interval(torch.arange(5))
    assert lo.tolist() == [0, 0, 0, 1, 2] and hi.tolist() == [0, 1, 2, 3, 4]
    lo, hi = Mask().interval(torch.arange(3), num_keys=7)
    assert lo.tolist() == [0, 0, 0] and hi.tolist() == [6, 6, 6]
    lo, hi = Mask(documents=torch.tensor([3, 3, -1, 0])).interval(torch.arange(4))
    assert lo.tolist() == [0, 0, 2, 3] and hi.tolist() == [1, 1, 1, 3]
    lo, hi = Mask(causal=True, prefix=2).interval(torch.arange(4))
    assert lo.tolist() == [0] * 4 and hi.tolist() == [1, 1, 2, 3]
    lo, hi = Mask(documents=torch.tensor([[0, 0, 1], [0, 1, 1]])).interval(torch.arange(3))
    assert lo.tolist() == [[0, 0, 2], [0, 1, 1]] and hi.tolist() == [[1, 1, 2], [0, 2, 2]]


SEGMENTS = [[(0, 1, 4)], [(4, 1, 4)], [(3, 2, 3)], [(0, 1, 2), (6, 1, 2)], [(5, 1, 1)]]
BEFORE = [(-3, 1, 4)]  # queries may stand before the first key


@pytest.mark.parametrize("q_at", [*SEGMENTS, BEFORE], ids=str)
@pytest.mark.parametrize("k_at", SEGMENTS, ids=str)
def test_hides_nothing(q_at: list, k_at: list) -> None:
    """Exactly where everybody sees everything; documents and prefixes are not looked at."""
    at = positions(q_at), positions(k_at)
    for options in (dict(), dict(causal=True), dict(window=3), dict(causal=True, window=6), dict(window=(5, 2))):
        mask = Mask(**options)
        assert mask.hides_nothing(q_at, k_at) == bool(mask.visible(*at).all()), mask
    prefixed = Mask(causal=True, prefix=1)
    assert not prefixed.hides_nothing(q_at, k_at) or prefixed.visible(*at).all()
    assert not Mask(documents=torch.zeros(8, dtype=torch.int32)).hides_nothing(q_at, k_at)


def test_from_lengths() -> None:
    mask = Mask.from_lengths([2, 0, 3], causal=True)
    assert mask.documents.tolist() == [0, 0, 2, 2, 2] and mask.causal
    assert Mask.from_lengths([]).length == 0


def test_coarse_lets_through_at_least_as_much() -> None:
    for case in CASES:
        mask = case.mask()
        assert mask.coarse() is mask  # known on the CPU: nothing to leave out
    mask = Mask(causal=True, window=4, documents=torch.zeros(6, dtype=torch.int32, device="meta"))
    lo, hi = mask.coarse().interval(torch.arange(6))
    assert lo.tolist() == [0, 0, 0, 0, 1, 2] and hi.tolist() == list(range(6))


@pytest.mark.parametrize(
    "arguments, word",
    [
        (dict(window=0), "window"),
        (dict(window=-5), "window"),
        (dict(window=(-1, 0)), "window"),
        (dict(window=(1, 2, 3)), "window"),
        (dict(window=2.5), "window"),
        (dict(window=True), "window"),
        (dict(prefix=3), "prefix"),
        (dict(prefix=3, causal=True, window=4), "prefix"),
        (dict(prefix=-1, causal=True), "prefix"),
        (dict(prefix=1.5, causal=True), "prefix"),
        (dict(prefix=torch.tensor([1.0]), causal=True), "prefix"),
        (dict(documents=torch.tensor([0.0, 1.0])), "documents"),
        (dict(documents=torch.tensor([True, False])), "documents"),
        (dict(documents=torch.zeros(1, 2, 3, dtype=torch.int64)), "documents"),
    ],
)
def test_wrong_masks(arguments: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Mask(**arguments)


def test_wrong_lengths() -> None:
    with pytest.raises(ValueError, match="lengths"):
        Mask.from_lengths([3, -1])


def test_documents_need_no_order() -> None:
    same = Mask(documents=torch.tensor([7, 7, 3, 3, 7])).interval(torch.arange(5))
    expected = Mask(documents=torch.tensor(packed(2, 2, 1))).interval(torch.arange(5))
    assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))


def test_a_mask_of_inference_mode_can_be_trained_with(device: str) -> None:
    """Made there, or sent to a device there: its tensors are saved for a backward later."""
    ids = torch.arange(16) // 6
    with torch.inference_mode():
        masks = [
            Mask(causal=True, documents=x) for x in (ids, ids.tolist(), ids.clone())
        ]  # the clone is of inference mode itself
        masks += [Mask.from_lengths([10, 6]), *(Mask(causal=True, prefix=x) for x in (3, torch.tensor([3])))]
    sent = Mask(causal=True, documents=ids)
    with torch.inference_mode():
        assert not any(x.is_inference() for x in sent.bounds("meta")[3:] if x is not None)
    for mask in masks:
        q = torch.randn(1, 16, 2, 16, device=device, requires_grad=True)
        attention(q, q, q, mask).sum().backward()
        assert q.grad is not None
