"""Layout: every kind, length and number of ranks."""

import copy
import dataclasses
import pickle

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.kernels.segments import positions
from ringspan.parallel.layout import KINDS
from tests.parallel.helpers.plan_cases import LENGTH, MASKS

LENGTHS = [*range(0, 20), 31, 32, 33, 64, 97]
LAYOUTS = [
    Layout(kind, length, ranks, ulysses)
    for kind in KINDS
    for length in LENGTHS
    for ranks in range(1, 10)
    for ulysses in range(1, ranks + 1)
    if ranks % ulysses == 0 and (kind != "striped" or ulysses == 1)
]


def by_kind_and_ranks() -> list:
    """One list of layouts per test case."""
    keys = sorted({(layout.kind, layout.ranks) for layout in LAYOUTS})
    return [pytest.param([x for x in LAYOUTS if (x.kind, x.ranks) == key], id=f"{key[0]}-{key[1]}") for key in keys]


@pytest.mark.parametrize("layouts", by_kind_and_ranks())
def test_unshard_inverts_shard(layouts: list[Layout]) -> None:
    for layout in layouts:
        for shape, dim in (((layout.length,), 0), ((2, layout.length, 3), 1), ((2, layout.length), -1)):
            x = torch.randn(shape)
            shards = [layout.shard(x, dim, rank, fill=float("nan")) for rank in range(layout.ranks)]
            assert {shard.shape[dim] for shard in shards} == {layout.local_length}
            assert torch.equal(layout.unshard(shards, dim), x), layout


@pytest.mark.parametrize("layouts", by_kind_and_ranks())
def test_segments_cover_the_sequence_once(layouts: list[Layout]) -> None:
    for layout in layouts:
        covered = []
        for rank in range(layout.ranks):
            all_rows, real_rows = layout.positions(rank), positions(layout.segments(rank))
            assert len(all_rows) == layout.local_length
            assert all_rows[: len(real_rows)].equal(real_rows) and (real_rows < layout.length).all()  # real tokens come first
            assert (all_rows[len(real_rows) :] >= layout.length).all()
            assert layout.shard(torch.arange(layout.length), 0, rank, fill=-1)[: len(real_rows)].equal(real_rows)
            assert len(layout.segments(rank)) <= 2
            assert (all_rows.diff() > 0).all()  # ascending, as kernels require
            covered.append(real_rows)
        assert torch.cat(covered).sort().values.equal(torch.arange(layout.length)), layout
        # padding is less than one row per chunk, times the size of a Ulysses group
        assert layout.local_length * layout.ranks < layout.length + 2 * layout.ranks * layout.ulysses + 1


@pytest.mark.parametrize("layouts", by_kind_and_ranks())
def test_shards_of_a_ulysses_group_form_the_ring_shard(layouts: list[Layout]) -> None:
    for layout in layouts:
        assert layout.ring.local_length == layout.local_length * layout.ulysses
        for ring_rank in range(layout.ring.ranks):
            gathered = [layout.positions(ring_rank * layout.ulysses + u) for u in range(layout.ulysses)]
            assert torch.cat(gathered).equal(layout.ring.positions(ring_rank))
            assert len(layout.ring.segments(ring_rank)) <= 2


def test_one_rank_has_no_padding() -> None:
    assert all(Layout(kind, length, 1).local_length == length for kind in KINDS for length in LENGTHS)


def test_fill_sets_padding_rows() -> None:
    layout = Layout("zigzag", 5, 2)
    assert layout.local_length == 4
    assert layout.shard(torch.arange(5), 0, 0, fill=-100).tolist() == [0, 1, -100, -100]
    assert layout.shard(torch.arange(5), 0, 1, fill=-100).tolist() == [2, 3, 4, -100]


def test_shard_and_unshard_are_differentiable() -> None:
    x = torch.randn(7, 2, requires_grad=True)
    layout = Layout("striped", 7, 3)
    out = layout.unshard([layout.shard(x, 0, rank) for rank in range(3)], 0)
    (out * torch.arange(7)[:, None]).sum().backward()
    assert x.grad is not None and x.grad[:, 1].tolist() == list(range(7))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_work_counts_visible_pairs(kind: str, name: str) -> None:
    mask = MASKS[name]
    sequence = torch.arange(LENGTH)
    visible = mask.visible(sequence, sequence)
    for ranks in (1, 2, 3, 5, 8, 40):
        layout = Layout(kind, LENGTH, ranks)
        expected = [int(visible[:, positions(layout.segments(rank))].sum()) for rank in range(ranks)]
        assert layout.work(mask) == expected


def test_work_is_split_within_a_ulysses_group() -> None:
    mask = Mask(causal=True)
    assert Layout("zigzag", 64, 4, ulysses=2).work(mask) == [520] * 4
    assert Layout("contiguous", 5, 4, ulysses=2).work(mask) == [5, 5, 3, 2]  # no pair is lost


def test_zigzag_balances_causal_work() -> None:
    for ranks in (2, 4, 8):
        work = Layout("zigzag", 64 * ranks, ranks).work(Mask(causal=True))
        assert max(work) == min(work)
        work = Layout("contiguous", 64 * ranks, ranks).work(Mask(causal=True))
        assert max(work) > 1.4 * sum(work) / ranks
        work = Layout("striped", 64 * ranks, ranks).work(Mask(causal=True, window=9))
        assert max(work) - min(work) <= 9 * ranks


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Layout("spiral", 8, 2), "kind='spiral': choose one of"),
        (lambda: Layout("zigzag", -1, 2), "length=-1 must be an int >= 0"),
        (lambda: Layout("zigzag", 8, 0), "ranks=0 must be an int >= 1"),
        (lambda: Layout("zigzag", 8.0, 2), "length=8.0 must be an int >= 0"),
        (lambda: Layout("zigzag", 8, 6, 4), "ranks=6 is not a multiple of ulysses=4"),
        (lambda: Layout("striped", 8, 4, 2), "kind='striped' with ulysses=2: .*'zigzag'"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(9), 0, 0), r"x has shape \(9,\): dim 0 must be 8"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8), 1, 0), "dim=1: x has 1 dimensions"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8), 0, 2), "rank=2: .*0 to 1"),
        (lambda: Layout("zigzag", 8, 2).positions(0.5), "rank=0.5: .*0 to 1"),
        (lambda: Layout("zigzag", 1, 2).shard([1], 0, 0), "x must be a tensor, not list"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8, dtype=torch.int64), 0, 0, 0.5), "fill=0.5: torch.int64 has no"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8, dtype=torch.uint8), 0, 0, -100), "fill=-100: torch.uint8 has no"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8, dtype=torch.bool), 0, 0, 2), "fill=2: torch.bool has no"),
        (lambda: Layout("zigzag", 8, 2).unshard([torch.zeros(4)], 0), "1 tensors, the layout has ranks=2"),
        (
            lambda: Layout("zigzag", 8, 2).unshard([torch.zeros(4), torch.zeros(3)], 0),
            r"shard 1 has shape \(3,\): dim 0 must be 4",
        ),
        (lambda: Layout("zigzag", 8, 2).work(Mask(documents=[0] * 9)), "documents describe 9 .*length=8: .*natural order"),
        (lambda: Layout("zigzag", 8, 2).work("causal"), "ringspan.Mask or None, not str"),
    ],
)
def test_errors_name_the_argument_and_a_remedy(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_documents_of_the_keys_have_no_place_in_a_layout() -> None:
    mask = Mask(causal=True, documents=[0] * 8, key_documents=[0] * 8)
    with pytest.raises(ValueError, match=r"^mask.key_documents describe 8 keys: .* call attention on one GPU"):
        Layout("zigzag", length=8, ranks=2).work(mask)


@pytest.mark.parametrize("layout", [Layout("zigzag", 8, 2), Layout("zigzag", 8, 4, 2)])
def test_a_layout_is_a_dataclass_like_others(layout: Layout) -> None:
    assert dataclasses.asdict(layout)["length"] == 8
    assert dataclasses.replace(layout, length=16).ring.length == 16
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
