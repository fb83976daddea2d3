"""Layouts, exhaustively: every kind, length and number of ranks; and what a plan makes of a mask."""

import itertools
from collections.abc import Callable

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.kernels.segments import ascending_runs, check_segments, num_rows, positions
from ringspan.parallel.layout import KINDS, cut
from ringspan.parallel.plan import GRAIN, make_plan
from ringspan.parallel.row_ranges import around, union, without
from ringspan.parallel.transport.select import PART_BYTES, SHORT, blocks_per_step

LENGTHS = [*range(0, 20), 31, 32, 33, 64, 97]
LAYOUTS = [
    Layout(kind, length, ranks, ulysses)
    for kind in KINDS
    for length in LENGTHS
    for ranks in range(1, 10)
    for ulysses in range(1, ranks + 1)
    if ranks % ulysses == 0 and (kind != "striped" or ulysses == 1)
]


def groups() -> list:
    """The layouts in lists, a test each."""
    return [pytest.param([x for x in LAYOUTS if (x.kind, x.ranks) == key], id=f"{key[0]}-{key[1]}") for key in KEYS]


KEYS = sorted({(layout.kind, layout.ranks) for layout in LAYOUTS})


@pytest.mark.parametrize("layouts", groups())
def test_unshard_undoes_shard(layouts: list[Layout]) -> None:
    for layout in layouts:
        for shape, dim in (((layout.length,), 0), ((2, layout.length, 3), 1), ((2, layout.length), -1)):
            x = torch.randn(shape)
            shards = [layout.shard(x, dim, rank, fill=float("nan")) for rank in range(layout.ranks)]
            assert {shard.shape[dim] for shard in shards} == {layout.local_length}
            assert torch.equal(layout.unshard(shards, dim), x), layout


@pytest.mark.parametrize("layouts", groups())
def test_positions_and_segments(layouts: list[Layout]) -> None:
    for layout in layouts:
        seen = []
        for rank in range(layout.ranks):
            at, real = layout.positions(rank), positions(layout.segments(rank))
            assert len(at) == layout.local_length
            assert at[: len(real)].equal(real) and (real < layout.length).all()  # real tokens come first
            assert (at[len(real) :] >= layout.length).all()
            assert layout.shard(torch.arange(layout.length), 0, rank, fill=-1)[: len(real)].equal(real)
            assert len(layout.segments(rank)) <= 2
            assert (at.diff() > 0).all()  # ascending, as kernels like it
            seen.append(real)
        assert torch.cat(seen).sort().values.equal(torch.arange(layout.length)), layout
        # padding is less than a row of each chunk, times what a Ulysses group needs
        assert layout.local_length * layout.ranks < layout.length + 2 * layout.ranks * layout.ulysses + 1


@pytest.mark.parametrize("layouts", groups())
def test_a_ulysses_group_holds_what_its_ring_rank_holds(layouts: list[Layout]) -> None:
    for layout in layouts:
        assert layout.ring.local_length == layout.local_length * layout.ulysses
        for ring_rank in range(layout.ring.ranks):
            together = [layout.positions(ring_rank * layout.ulysses + u) for u in range(layout.ulysses)]
            assert torch.cat(together).equal(layout.ring.positions(ring_rank))
            assert len(layout.ring.segments(ring_rank)) <= 2


def test_one_rank_pads_nothing() -> None:
    assert all(Layout(kind, length, 1).local_length == length for kind in KINDS for length in LENGTHS)


def test_labels_and_ids_are_filled() -> None:
    layout = Layout("zigzag", 5, 2)
    assert layout.local_length == 4
    assert layout.shard(torch.arange(5), 0, 0, fill=-100).tolist() == [0, 1, -100, -100]
    assert layout.shard(torch.arange(5), 0, 1, fill=-100).tolist() == [2, 3, 4, -100]


def test_shards_carry_gradients() -> None:
    x = torch.randn(7, 2, requires_grad=True)
    layout = Layout("striped", 7, 3)
    out = layout.unshard([layout.shard(x, 0, rank) for rank in range(3)], 0)
    (out * torch.arange(7)[:, None]).sum().backward()
    assert x.grad is not None and x.grad[:, 1].tolist() == list(range(7))


MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=5),
    "window-wide": Mask(causal=True, window=17),
    "window-both": Mask(window=(3, 6)),
    "window-1": Mask(window=1),
    "prefix": Mask(causal=True, prefix=9),
    "prefix-batch": Mask(causal=True, prefix=torch.tensor([2, 20])),
    "documents": Mask(causal=True, documents=torch.tensor([0] * 7 + [1] * 14 + [-1] * 5 + [2] * 5)),
    "documents-full": Mask(documents=torch.tensor([3] * 16 + [1] * 15)),
    "documents-batch": Mask(causal=True, documents=torch.tensor([[0] * 31, [1] * 10 + [-1] * 21])),
    "all-padding": Mask(documents=torch.full((31,), -1)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_work_counts_visible_pairs(kind: str, name: str) -> None:
    mask = MASKS[name]
    everyone = torch.arange(31)
    seen = mask.visible(everyone, everyone)
    for ranks in (1, 2, 3, 5, 8, 40):
        layout = Layout(kind, 31, ranks)
        expected = [int(seen[:, positions(layout.segments(rank))].sum()) for rank in range(ranks)]
        assert layout.work(mask) == expected


def test_a_ulysses_group_shares_its_work() -> None:
    mask = Mask(causal=True)
    assert Layout("zigzag", 64, 4, ulysses=2).work(mask) == [520] * 4
    assert Layout("contiguous", 5, 4, ulysses=2).work(mask) == [5, 5, 3, 2]  # no pair is lost


def test_zigzag_is_even_and_contiguous_is_not() -> None:
    for ranks in (2, 4, 8):
        work = Layout("zigzag", 64 * ranks, ranks).work(Mask(causal=True))
        assert max(work) == min(work)
        work = Layout("contiguous", 64 * ranks, ranks).work(Mask(causal=True))
        assert max(work) > 1.4 * sum(work) / ranks
        work = Layout("striped", 64 * ranks, ranks).work(Mask(causal=True, window=9))
        assert max(work) - min(work) <= 9 * ranks


def one_each(ranks: int) -> tuple[int, ...]:
    return ()


def doubling(ranks: int) -> tuple[int, ...]:
    return blocks_per_step("copy", Layout("zigzag", ranks, ranks), True, 1, 8, False)


def halving(ranks: int) -> tuple[int, ...]:
    return blocks_per_step("copy", Layout("zigzag", ranks, ranks), True, 1, 8, True)


def at_once(ranks: int) -> tuple[int, ...]:
    return blocks_per_step("copy_all", Layout("zigzag", ranks, ranks), True, 1, 8, False)


def test_steps_double_where_blocks_are_short() -> None:
    found = [(doubling(ranks), halving(ranks), at_once(ranks)) for ranks in (2, 3, 4, 6, 8)]
    assert [there for there, _, _ in found] == [(1,), (1, 1), (1, 2), (1, 2, 2), (1, 2, 4)]
    assert [back for _, back, _ in found] == [(1,), (1, 1), (2, 1), (2, 2, 1), (4, 2, 1)]
    assert [all_others for _, _, all_others in found] == [(1,), (2,), (3,), (5,), (7,)]
    for kind, by, causal in (("striped", "copy", True), ("zigzag", "copy", False), ("zigzag", "p2p", True)):
        assert blocks_per_step(by, Layout(kind, 8, 8), causal, 1, 8, False) == (1,) * 7


@pytest.mark.parametrize(
    "nbytes, heads, rows, blocks",
    [
        (PART_BYTES // 2, 8, 2 * SHORT, (1, 2, 2, 2)),
        (PART_BYTES, 8, 2 * SHORT, (1,) * 7),  # two would travel in four parts
        (PART_BYTES * 2, 8, 2 * SHORT, (1, 2, 2, 2)),  # one travels in four parts, and so do two
        (PART_BYTES * 2, 2, 2 * SHORT, (1,) * 7),  # one travels in two parts, which two would make larger
        (PART_BYTES * 2, 8, SHORT, (1,) * 7),  # one travels in one part
        (PART_BYTES * 4, 8, SHORT, (1,) * 7),
        (PART_BYTES // 4, 1, SHORT, (1, 2, 4)),
    ],
)
def test_larger_steps_go_in_as_many_parts_as_a_block(nbytes: int, heads: int, rows: int, blocks: tuple[int, ...]) -> None:
    assert blocks_per_step("copy", Layout("zigzag", 8 * rows, 8), True, nbytes, heads, False) == blocks


def test_room_for_gradients_is_the_same_for_all_documents() -> None:
    """To make more in the middle of a run all ranks would have to stop."""
    layout = Layout("zigzag", 1024, 8)
    for blocks in (one_each(8), doubling(8), halving(8)):
        masks = [Mask.from_lengths(lengths, causal=True) for lengths in ([1024], [300, 724], [37] * 27 + [25], [1000, 24])]
        assert {make_plan(layout, mask, 3, blocks).most_keys for mask in masks} == {128 * max(blocks, default=1)}


@pytest.mark.parametrize("ranks", [3, 4, 6, 8, 13])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_step_of_several_blocks_is_one_kernel(kind: str, ranks: int) -> None:
    layout = Layout(kind, 64 * ranks, ranks)
    for blocks, rank in itertools.product((doubling, halving, at_once), range(ranks)):
        steps = make_plan(layout, Mask(causal=kind == "zigzag"), rank, blocks(ranks)).steps
        assert len(steps) == 1 + len(blocks(ranks))
        for step in steps[1:]:
            q_at, k_at = (check_segments("rows", at, num_rows(at)) for at in (step.q_at, step.k_at))
            assert len(ascending_runs(q_at)) <= 1 and len(ascending_runs(k_at)) <= 1


@pytest.mark.parametrize("blocks", [one_each, doubling, at_once])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_move_what_is_seen(kind: str, name: str, blocks: Callable[[int], tuple[int, ...]]) -> None:
    """Every visible pair is in the reader's plan once; both ends of a message agree; steps are alike on all ranks."""
    mask, length = MASKS[name], 31
    for ranks in (1, 2, 3, 4, 7, 40):
        layout = Layout(kind, length, ranks)
        plans = [make_plan(layout, mask, rank, blocks(ranks)) for rank in range(ranks)]
        assert len({len(plan.steps) for plan in plans}) == 1
        assert len({plan.most_keys for plan in plans}) == 1
        at = [layout.positions(rank) for rank in range(ranks)]
        for reader, plan in enumerate(plans):
            found = torch.zeros(length, length, dtype=torch.int64)
            for index, step in enumerate(plan.steps):
                queries = positions(step.q_at)
                keys = positions(step.k_at)
                real = at[reader][step.queries]
                assert queries.equal(real[: len(queries)]) and (real[len(queries) :] >= length).all()
                rows = [at[piece.rank][piece.rows] for piece in step.pieces]
                assert keys.equal(torch.cat(rows)) if rows else len(keys) == 0
                assert step.num_keys == len(keys) <= plan.most_keys
                assert index == 0 or all(piece.rank != reader for piece in step.pieces)
                found[queries[:, None], keys[None, :]] += 1
                for piece in step.pieces if index else []:
                    gives = [g for g in plans[piece.rank].gives[index] if g.rank == reader]
                    assert [(g.rows, g.at) for g in gives if g.at == piece.at] == [(piece.rows, piece.at)]
            mine = positions(layout.segments(reader))
            seen = mask.visible(mine, torch.arange(length)).any(0)
            assert (found[mine][seen] == 1).all() and found.max() <= 1
            if kind != "striped":
                for step in plan.steps:
                    starts = [start for start, _, _ in step.k_at]
                    assert starts == sorted(starts)
        for index in range(len(plans[0].steps)):
            if index:
                assert any(plan.steps[index].pieces for plan in plans)  # else it would have been left out


@pytest.mark.parametrize("window", [1, 2, 17, 33, 65, 66, 160])
def test_a_window_takes_its_neighbours_only(window: int) -> None:
    """Contiguous: ⌈(w − 1) / n⌉ + 1 steps, and w − 1 keys (in whole grains); zigzag: the neighbour of each of two chunks."""
    ranks, n = 8, 64
    keys = -(-(window - 1) // GRAIN) * GRAIN
    layout = Layout("contiguous", ranks * n, ranks)
    for rank in range(ranks):
        plan = make_plan(layout, Mask(causal=True, window=window), rank)
        assert len(plan.steps) == -(-(window - 1) // n) + 1
        assert sum(step.num_keys for step in plan.steps[1:]) == min(keys, rank * n)
    if window <= n // 2 + 1:
        zigzag = Layout("zigzag", ranks * n, ranks)
        for rank in range(ranks):
            plan = make_plan(zigzag, Mask(causal=True, window=window), rank)
            taken = [(piece.rank, len(piece)) for step in plan.steps[1:] for piece in step.pieces]
            neighbours = [rank - 1] * (rank > 0) + [rank + 1] * (rank < ranks - 1)
            assert sorted(taken) == [(r, keys) for r in neighbours] * (window > 1)
            both = make_plan(zigzag, Mask(window=window), rank)  # two separate runs of a neighbour's rows, not all between
            assert sum(step.num_keys for step in both.steps[1:]) <= 4 * keys


@pytest.mark.parametrize("kind, window", [("contiguous", 6), ("contiguous", (3, 5)), ("zigzag", 6), ("striped", 6)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_a_window_leaves_to_the_own_block_goes_apart(kind: str, window: int | tuple[int, int], ranks: int) -> None:
    """Where others' blocks concern few of the own rows, these alone are handed on and have sums; and each row once."""
    n = 160
    layout, mask = Layout(kind, n * ranks - 5, ranks), Mask(causal=isinstance(window, int), window=window)
    rows = range(layout.local_length)
    for rank in range(ranks):
        plan = make_plan(layout, mask, rank)
        own, *others = plan.steps
        later = {row for step in others for row in rows[step.queries]}
        taken = {row for pieces in plan.gives for piece in pieces for row in rows[piece.rows]}
        padding = set(rows[num_rows(own.q_at) :])
        first, *rest = plan.parts
        assert sorted(row for part in first for row in rows[part.rows]) == list(rows)
        for part in first:
            assert positions(part.q_at).equal(positions(own.q_at)[part.rows])
        assert [[(part.rows, part.q_at) for part in its] for its in rest] == [
            [(step.queries, step.q_at)] if step.pieces else [] for step in others
        ]
        last_of = {row: index for index, its in enumerate(plan.parts) for part in its for row in rows[part.rows]}
        known = {row for index, its in enumerate(plan.parts) for part in its if part.last for row in rows[part.rows]}
        assert all(last_of[row] == index for index, its in enumerate(plan.parts) for p in its if p.last for row in rows[p.rows])
        assert {row for run in plan.unfinished for row in rows[run]} == set(rows) - known
        assert later | (set(rows) - known) <= set(rows[plan.carried])
        shared = [row for run in plan.shared for row in rows[run]]
        assert taken <= set(shared) and len(shared) == len(set(shared))
        if kind == "striped" and ranks > 1:  # all rows see others' keys
            assert [plan.carried] == plan.shared == [slice(0, layout.local_length)]
        else:
            assert len(later) <= 2 * GRAIN and not plan.unfinished and set(shared) == taken
            assert set(rows) - {row for part in first if part.last for row in rows[part.rows]} - padding == later


def test_a_causal_ring_and_documents_have_their_own_block_in_one_piece() -> None:
    """Where much is shared; and where what is shared differs from batch to batch, as memory then would."""
    documents = torch.arange(1024) // 500
    for kind, mask in itertools.product(("contiguous", "zigzag"), (Mask(causal=True), Mask(causal=True, documents=documents))):
        for rank in range(4):
            plan = make_plan(Layout(kind, 1024, 4), mask, rank)
            assert [part.rows for part in plan.parts[0]] == [slice(0, 256)]
            assert plan.shared in ([slice(0, 256)], [])


def test_runs() -> None:
    """Against sets of rows."""
    everything = [slice(a, b) for a, b in itertools.combinations_with_replacement(range(6), 2)]
    for one, two, taken in itertools.product(everything, repeat=3):
        rows = {*range(6)[one], *range(6)[two]}
        for found, wanted in ((union([one, two]), rows), (without([one, two], [taken]), rows - {*range(6)[taken]})):
            assert [row for run in found for row in range(6)[run]] == sorted(wanted)
            assert all(run.start < run.stop for run in found)
        for a, b in itertools.pairwise(union([one, two])):
            assert a.stop < b.start
        assert rows <= {*range(6)[around([one, two])]}


def test_a_causal_zigzag_moves_half_blocks_backwards() -> None:
    """Of an earlier rank a rank uses the first half only: 25 % less than a relay would move."""
    ranks, n = 4, 16
    for rank in range(ranks):
        plan = make_plan(Layout("zigzag", ranks * n, ranks), Mask(causal=True), rank)
        keys = {step.pieces[0].rank: step.num_keys for step in plan.steps[1:]}
        assert keys == {r: n // 2 if r < rank else n for r in range(ranks) if r != rank}
        queries = {step.pieces[0].rank: step.queries for step in plan.steps[1:]}
        assert all(queries[r] == (slice(0, n) if r < rank else slice(n // 2, n)) for r in queries)


def test_documents_bring_no_numbers_that_kernels_were_not_compiled_for() -> None:
    """Triton looks at which numbers 16 divides; those of a plan are such whatever the documents' lengths are."""
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([37, 301, 5, 403, 129, 149]))
    for kind, blocks in itertools.product(("contiguous", "zigzag"), (one_each, doubling, at_once)):
        layout = Layout(kind, 1024, 4)
        for rank in range(4):
            plan = make_plan(layout, Mask(causal=True, documents=ids), rank, blocks(4))
            assert len(plan.steps) > 1
            for step in plan.steps:
                numbers = [n for start, _, count in (*step.q_at, *step.k_at) for n in (start, count)]
                assert all(n % 16 == 0 for n in numbers), (kind, rank, step)


def test_what_only_a_device_knows_is_not_waited_for() -> None:
    """Documents on the meta device stand for documents on a GPU: every block moves, and nothing is read."""
    mask = Mask(causal=True, documents=torch.zeros(32, dtype=torch.int64, device="meta"))
    plan = make_plan(Layout("contiguous", 32, 4), mask, 3)
    assert [step.num_keys for step in plan.steps] == [8, 8, 8, 8]


def test_plans_are_made_once() -> None:
    layout = Layout("zigzag", 31, 4)
    for mask in (MASKS["causal"], MASKS["documents"]):
        assert make_plan(layout, mask, 1) is make_plan(layout, mask, 1)


def test_cut() -> None:
    segments = [(10, 1, 4), (3, 5, 3)]
    for a, b in itertools.combinations_with_replacement(range(8), 2):
        assert positions(cut(segments, a, b)).equal(positions(segments)[a:b])


@pytest.mark.parametrize(
    "make, remedy",
    [
        (lambda: Layout("spiral", 8, 2), "choose one of"),
        (lambda: Layout("zigzag", -1, 2), "length=-1"),
        (lambda: Layout("zigzag", 8, 0), "ranks=0"),
        (lambda: Layout("zigzag", 8.0, 2), "length=8.0"),
        (lambda: Layout("zigzag", 8, 6, 4), "multiple of ulysses"),
        (lambda: Layout("striped", 8, 4, 2), "zigzag"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(9), 0, 0), "dim 0 must be 8"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8), 1, 0), "dim=1"),
        (lambda: Layout("zigzag", 8, 2).shard(torch.zeros(8), 0, 2), "rank=2"),
        (lambda: Layout("zigzag", 8, 2).unshard([torch.zeros(4)], 0), "ranks=2"),
        (lambda: Layout("zigzag", 8, 2).unshard([torch.zeros(4), torch.zeros(3)], 0), "shard 1"),
        (lambda: Layout("zigzag", 8, 2).work(Mask(documents=[0] * 9)), "documents describe 9"),
    ],
)
def test_errors_name_a_remedy(make, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()
