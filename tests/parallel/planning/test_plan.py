"""Plans: which rows each step reads, sends and receives."""

import itertools
from collections.abc import Callable

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.kernels.segments import ascending_ranges, check_segments, num_rows, positions
from ringspan.parallel.layout import KINDS
from ringspan.parallel.plan import ROW_MULTIPLE, make_plan
from tests.parallel.helpers.plan_cases import LENGTH, MASKS, halving, one_per_step, single_step


def test_buffer_sizes_do_not_depend_on_the_documents() -> None:
    """To grow a buffer in the middle of a run, all ranks would have to synchronise."""
    layout = Layout("zigzag", 1024, 8)
    for blocks in (one_per_step(8), halving(8)):
        masks = [Mask.from_lengths(lengths, causal=True) for lengths in ([1024], [300, 724], [37] * 27 + [25], [1000, 24])]
        assert {make_plan(layout, mask, 3, blocks).max_keys for mask in masks} == {128 * max(blocks, default=1)}


@pytest.mark.parametrize("ranks", [3, 4, 6, 8, 13])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_step_of_several_blocks_is_one_kernel(kind: str, ranks: int) -> None:
    layout = Layout(kind, 64 * ranks, ranks)
    for blocks, rank in itertools.product((halving, single_step), range(ranks)):
        steps = make_plan(layout, Mask(causal=kind == "zigzag"), rank, blocks(ranks)).steps
        assert len(steps) == 1 + len(blocks(ranks))
        for step in steps[1:]:
            q_at, k_at = (check_segments("rows", at, num_rows(at)) for at in (step.q_at, step.k_at))
            assert len(ascending_ranges(q_at)) <= 1 and len(ascending_ranges(k_at)) <= 1


@pytest.mark.parametrize("blocks", [one_per_step, halving, single_step])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_move_each_visible_key_once(kind: str, name: str, blocks: Callable[[int], tuple[int, ...]]) -> None:
    """Each visible pair is in the reader's plan once; both ends of a transfer agree; all ranks have the same steps."""
    mask = MASKS[name]
    for ranks in (1, 2, 3, 4, 7, 40):
        layout = Layout(kind, LENGTH, ranks)
        plans = [make_plan(layout, mask, rank, blocks(ranks)) for rank in range(ranks)]
        assert len({len(plan.steps) for plan in plans}) == 1
        assert len({plan.max_keys for plan in plans}) == 1
        at = [layout.positions(rank) for rank in range(ranks)]
        for reader, plan in enumerate(plans):
            num_computed = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
            for index, step in enumerate(plan.steps):
                queries = positions(step.q_at)
                keys = positions(step.k_at)
                rows = at[reader][step.queries]
                assert queries.equal(rows[: len(queries)]) and (rows[len(queries) :] >= LENGTH).all()
                key_rows = [at[piece.rank][piece.rows] for piece in step.pieces]
                assert keys.equal(torch.cat(key_rows)) if key_rows else len(keys) == 0
                assert step.num_keys == len(keys) <= plan.max_keys
                assert index == 0 or all(piece.rank != reader for piece in step.pieces)
                num_computed[queries[:, None], keys[None, :]] += 1
                for piece in step.pieces if index else []:
                    sends = [send for send in plans[piece.rank].sends[index] if send.rank == reader]
                    matching = [(send.rows, send.offset) for send in sends if send.offset == piece.offset]
                    assert matching == [(piece.rows, piece.offset)]
            local = positions(layout.segments(reader))
            visible = mask.visible(local, torch.arange(LENGTH)).any(0)
            assert (num_computed[local][visible] == 1).all() and num_computed.max() <= 1
            if kind != "striped":
                for step in plan.steps:
                    starts = [start for start, _, _ in step.k_at]
                    assert starts == sorted(starts)
        for index in range(len(plans[0].steps)):
            if index:
                assert any(plan.steps[index].pieces for plan in plans)  # a step that is empty on all ranks is dropped


@pytest.mark.parametrize("window", [1, 2, 17, 33, 65, 66, 160])
def test_a_window_reads_neighbour_ranks_only(window: int) -> None:
    """Contiguous: ⌈(w − 1) / n⌉ + 1 steps and w − 1 keys, rounded up; zigzag: the neighbour of each of two chunks."""
    ranks, n = 8, 64
    keys = -(-(window - 1) // ROW_MULTIPLE) * ROW_MULTIPLE
    layout = Layout("contiguous", ranks * n, ranks)
    for rank in range(ranks):
        plan = make_plan(layout, Mask(causal=True, window=window), rank)
        assert len(plan.steps) == -(-(window - 1) // n) + 1
        assert sum(step.num_keys for step in plan.steps[1:]) == min(keys, rank * n)
    if window <= n // 2 + 1:
        zigzag = Layout("zigzag", ranks * n, ranks)
        for rank in range(ranks):
            plan = make_plan(zigzag, Mask(causal=True, window=window), rank)
            pieces = [(piece.rank, len(piece)) for step in plan.steps[1:] for piece in step.pieces]
            neighbours = [rank - 1] * (rank > 0) + [rank + 1] * (rank < ranks - 1)
            assert sorted(pieces) == [(r, keys) for r in neighbours] * (window > 1)
            two_sided = make_plan(zigzag, Mask(window=window), rank)  # two separate ranges of a neighbour's rows
            assert sum(step.num_keys for step in two_sided.steps[1:]) <= 4 * keys


@pytest.mark.parametrize("kind, window", [("contiguous", 6), ("contiguous", (3, 5)), ("zigzag", 6), ("striped", 6)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_without_remote_keys_are_computed_apart(kind: str, window: int | tuple[int, int], ranks: int) -> None:
    """If remote blocks involve few local rows, only these are carried and need sums; and each row is computed once."""
    n = 160
    layout, mask = Layout(kind, n * ranks - 5, ranks), Mask(causal=isinstance(window, int), window=window)
    rows = range(layout.local_length)
    for rank in range(ranks):
        plan = make_plan(layout, mask, rank)
        local_step, *remote_steps = plan.steps
        later = {row for step in remote_steps for row in rows[step.queries]}
        sent = {row for pieces in plan.sends for piece in pieces for row in rows[piece.rows]}
        padding = set(rows[num_rows(local_step.q_at) :])
        first_parts, *remote_parts = plan.query_parts
        assert sorted(row for part in first_parts for row in rows[part.rows]) == list(rows)
        for part in first_parts:
            assert positions(part.q_at).equal(positions(local_step.q_at)[part.rows])
        assert [[(part.rows, part.q_at) for part in parts] for parts in remote_parts] == [
            [(step.queries, step.q_at)] if step.pieces else [] for step in remote_steps
        ]
        all_parts = [(index, part) for index, parts in enumerate(plan.query_parts) for part in parts]
        last_index = {row: index for index, part in all_parts for row in rows[part.rows]}
        finished = {row for _, part in all_parts if part.is_last for row in rows[part.rows]}
        assert all(last_index[row] == index for index, part in all_parts if part.is_last for row in rows[part.rows])
        assert {row for r in plan.unfinished for row in rows[r]} == set(rows) - finished
        assert later | (set(rows) - finished) <= set(rows[plan.carried])
        shared = [row for r in plan.shared for row in rows[r]]
        assert sent <= set(shared) and len(shared) == len(set(shared))
        if kind == "striped" and ranks > 1:  # all rows attend to remote keys
            assert [plan.carried] == plan.shared == [slice(0, layout.local_length)]
        else:
            assert len(later) <= 2 * ROW_MULTIPLE and not plan.unfinished and set(shared) == sent
            assert set(rows) - {row for part in first_parts if part.is_last for row in rows[part.rows]} - padding == later


def test_the_local_block_is_one_part_if_causal_or_with_documents() -> None:
    """Causal: most rows are shared. Documents: shared rows differ between batches, so buffer sizes would too."""
    documents = torch.arange(1024) // 500
    for kind, mask in itertools.product(("contiguous", "zigzag"), (Mask(causal=True), Mask(causal=True, documents=documents))):
        for rank in range(4):
            plan = make_plan(Layout(kind, 1024, 4), mask, rank)
            assert [part.rows for part in plan.query_parts[0]] == [slice(0, 256)]
            assert plan.shared in ([slice(0, 256)], [])


def test_packed_documents_with_a_short_window_have_the_plan_of_the_window() -> None:
    """Buffers and kernels are then the same for every batch, and few rows move that documents hide."""
    documents = torch.arange(1024) // 333
    for kind, window, ranks in itertools.product(("contiguous", "zigzag"), (6, 20), (1, 2, 4)):
        layout = Layout(kind, 1024, ranks)
        for rank in range(ranks):
            packed = make_plan(layout, Mask(causal=True, window=window, documents=documents), rank)
            assert packed is make_plan(layout, Mask(causal=True, window=window), rank)
    masks = [Mask(causal=True, window=200, documents=ids) for ids in (None, documents)]  # most rows have remote keys
    whole, packed = (make_plan(Layout("contiguous", 1024, 4), mask, 2) for mask in masks)
    assert sum(step.num_keys for step in packed.steps) < sum(step.num_keys for step in whole.steps)


def test_a_causal_zigzag_reads_half_of_an_earlier_rank() -> None:
    """A rank reads only the first half of an earlier rank: 25 % less than a relay would move."""
    ranks, n = 4, 16
    for rank in range(ranks):
        plan = make_plan(Layout("zigzag", ranks * n, ranks), Mask(causal=True), rank)
        keys = {step.pieces[0].rank: step.num_keys for step in plan.steps[1:]}
        assert keys == {r: n // 2 if r < rank else n for r in range(ranks) if r != rank}
        queries = {step.pieces[0].rank: step.queries for step in plan.steps[1:]}
        assert all(queries[r] == (slice(0, n) if r < rank else slice(n // 2, n)) for r in queries)


def test_row_ranges_are_multiples_of_16_with_documents() -> None:
    """Triton compiles a kernel again for integers that 16 does not divide."""
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([37, 301, 5, 403, 129, 149]))
    for kind, blocks in itertools.product(("contiguous", "zigzag"), (one_per_step, halving, single_step)):
        layout = Layout(kind, 1024, 4)
        for rank in range(4):
            plan = make_plan(layout, Mask(causal=True, documents=ids), rank, blocks(4))
            assert len(plan.steps) > 1
            for step in plan.steps:
                numbers = [n for start, _, count in (*step.q_at, *step.k_at) for n in (start, count)]
                assert all(n % 16 == 0 for n in numbers), (kind, rank, step)


def test_planning_does_not_read_device_tensors() -> None:
    """Documents on the meta device stand for documents on a GPU: every block moves, and nothing is read."""
    mask = Mask(causal=True, documents=torch.zeros(32, dtype=torch.int64, device="meta"))
    plan = make_plan(Layout("contiguous", 32, 4), mask, 3)
    assert [step.num_keys for step in plan.steps] == [8, 8, 8, 8]


def test_plans_are_cached() -> None:
    layout = Layout("zigzag", LENGTH, 4)
    for mask in (MASKS["causal"], MASKS["documents"]):
        assert make_plan(layout, mask, 1) is make_plan(layout, mask, 1)
