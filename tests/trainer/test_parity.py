"""Sharding changes no result: every split of 1, 2 and 4 ranks and every ZeRO stage against one rank, in fp32."""

from typing import Any

import pytest

from ringspan.trainer import parity
from ringspan.trainer.config import compose
from ringspan.trainer.parity import Split
from tests.trainer import jobs

REFERENCE = Split(1, 1, 1, 0)
NAMED = {  # splits for fifty steps
    "ring": Split(2, 1, 1, 1),
    "ulysses": Split(1, 2, 1, 2),
    "data": Split(1, 1, 2, 3),
    "ring of four, ZeRO 0": Split(4, 1, 1, 0),
    "ring and ulysses, ZeRO 3": Split(2, 2, 1, 3),
    "ring and data, ZeRO 2": Split(2, 1, 2, 2),
}


def forked(num_ranks: int, task: dict[str, Any]) -> list[int | None]:
    return jobs.run_ranks(num_ranks, parity.run_rank, task, limit=500)


def measure(*args: Any) -> dict[Split, dict[str, Any]]:
    return parity.measure(*args, start=forked)


@pytest.fixture(scope="module")
def one_rank() -> dict:
    """Result of one rank, in a new process, as in the command, on a terminal without ×."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONIOENCODING", "ascii")
        return parity.measure(1, [REFERENCE], show=True)[REFERENCE]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_step_is_equal_under_every_split(one_rank: dict, ranks: int) -> None:
    selected = list(parity.splits(ranks, [0, 1, 2, 3]))
    assert len(selected) == 4 * {1: 1, 2: 3, 4: 6}[ranks]
    for split, result in measure(ranks, selected).items():
        row = parity.compare(result, one_rank)
        assert row["loss"] < 1e-5 and row["gradients"] < 1e-5, f"{split}: {row}"


@pytest.mark.parametrize(("ranks", "kept"), [(3, {(3, 1, 1)}), (6, {(6, 1, 1), (3, 2, 1), (3, 1, 2)}), (5, {(5, 1, 1)})])
def test_indivisible_splits_are_left_out(
    ranks: int, kept: set[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    selected: dict[int, list[Split]] = {}

    def record(num_ranks: int, splits: list[Split], steps: int, **options: Any) -> dict[Split, Any]:
        selected[num_ranks] = splits
        return {split: dict(losses=[1.0], gradients=dict(w=[1.0])) for split in splits}

    monkeypatch.setattr(parity, "measure", record)
    assert parity.main([f"ranks=[{ranks}]", "zero=[0]"]) == 0
    out = capsys.readouterr().out
    assert {(split.ring, split.ulysses, split.data) for split in selected[ranks]} == kept
    for split in selected[ranks]:
        compose.load([*parity.TOY, *split.options], world_size=ranks)  # the config is valid
    assert f"left out: ring 1 × ulysses {ranks} × data 1, because the toy's 4 heads are no multiple of ulysses {ranks}" in out
    assert f"left out: ring 1 × ulysses 1 × data {ranks}, because the toy's 4 sequences per micro-batch are no multiple" in out


def test_zero_ranks_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parity.main(["ranks=[0,2]"])
    assert stop.value.code == 2 and "ranks=[0, 2]: it must be at least 1" in capsys.readouterr().err


def fail_in_the_second_split(task: dict[str, Any]) -> None:
    train, calls = parity._train, []

    def train_once(composed: compose.Composed) -> dict[str, Any]:
        if calls:
            raise RuntimeError("the second split fails")
        calls.append(1)
        return train(composed)

    parity._train = train_once
    parity.run_rank(task)


def test_each_row_is_printed_as_soon_as_it_is_known(one_rank: dict) -> None:
    def start(num_ranks: int, task: dict[str, Any]) -> list[int | None]:
        return jobs.run_ranks(num_ranks, fail_in_the_second_split, task)

    with pytest.raises(RuntimeError, match="ranks ended"):
        parity.measure(1, [REFERENCE, Split(1, 1, 1, 1)], start=start, expected=one_rank, show=True)
    rows = [line for line in jobs.output.splitlines() if line.startswith(str(REFERENCE))]
    assert len(rows) == 1 and len(rows[0].removeprefix(str(REFERENCE)).split()) == 3


def test_deviating_gradient_is_detected() -> None:
    expected = dict(losses=[2.0, 1.0], gradients=dict(embedding=[3.0, -4.0], head=[0.5, -0.1]))
    off = dict(losses=[2.0, 1.001], gradients=expected["gradients"] | dict(head=[0.5, -0.10005]))
    assert parity.compare(expected, expected) == dict(loss=0, gradients=0, where="embedding")
    row = parity.compare(off, expected)
    assert row["where"] == "head" and row["gradients"] == pytest.approx(1e-4) and row["loss"] == pytest.approx(1e-3)


@pytest.mark.slow
def test_fifty_steps_of_six_splits() -> None:
    options = ["data.batch=4", "optim.lr=3e-3", "optim.clip=1"]
    expected = measure(1, [REFERENCE], 50, options)[REFERENCE]["losses"]
    assert len(expected) == 50 and expected[-1] < expected[0]
    for ranks in (2, 4):
        selected = [split for split in NAMED.values() if split.ring * split.ulysses * split.data == ranks]
        for split, result in measure(ranks, selected, 50, options).items():
            worst = max(abs(a - b) / b for a, b in zip(result["losses"], expected, strict=True))
            assert worst < 1e-3, f"{split}: {worst}"
