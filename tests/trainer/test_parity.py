"""Sharding changes nothing: every split of 1, 2 and 4 ranks and every ZeRO stage against one rank alone, in fp32."""

from typing import Any

import pytest

from ringspan.trainer import parity
from ringspan.trainer.config import compose
from ringspan.trainer.parity import Split
from tests.trainer import jobs

REFERENCE = Split(1, 1, 1, 0)
NAMED = {  # for fifty steps
    "ring": Split(2, 1, 1, 1),
    "ulysses": Split(1, 2, 1, 2),
    "data": Split(1, 1, 2, 3),
    "ring of four, ZeRO 0": Split(4, 1, 1, 0),
    "ring and ulysses, ZeRO 3": Split(2, 2, 1, 3),
    "ring and data, ZeRO 2": Split(2, 1, 2, 2),
}


def forked(num_ranks: int, task: dict[str, Any]) -> list[int | None]:
    return jobs.run_ranks(num_ranks, parity.work, task, limit=500)


def measure(*args: Any) -> dict[Split, dict[str, Any]]:
    return parity.measure(*args, start=forked)


@pytest.fixture(scope="module")
def alone() -> dict:
    """In a process of its own, as the command does it."""
    return parity.measure(1, [REFERENCE])[REFERENCE]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_step_is_the_same_under_every_split(alone: dict, ranks: int) -> None:
    wanted = list(parity.splits(ranks, [0, 1, 2, 3]))
    assert len(wanted) == 4 * {1: 1, 2: 3, 4: 6}[ranks]
    for split, result in measure(ranks, wanted).items():
        row = parity.compare(result, alone)
        assert row["loss"] < 1e-5 and row["gradients"] < 1e-5, f"{split}: {row}"


@pytest.mark.parametrize(("ranks", "kept"), [(3, {(3, 1, 1)}), (6, {(6, 1, 1), (3, 2, 1), (3, 1, 2)}), (5, {(5, 1, 1)})])
def test_splits_that_the_toy_is_too_small_for_are_left_out(
    ranks: int, kept: set[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[int, list[Split]] = {}

    def measured(num_ranks: int, wanted: list[Split], steps: int) -> dict[Split, Any]:
        asked[num_ranks] = wanted
        return {split: dict(losses=[1.0], gradients=dict(w=[1.0])) for split in wanted}

    monkeypatch.setattr(parity, "measure", measured)
    assert parity.main([f"ranks=[{ranks}]", "zero=[0]"]) == 0
    told = capsys.readouterr().out
    assert {(split.ring, split.ulysses, split.data) for split in asked[ranks]} == kept
    for split in asked[ranks]:
        compose.load([*parity.TOY, *split.options], world_size=ranks)  # the rules allow it
    assert f"left out: ring 1 × ulysses {ranks} × data 1, as the toy's 4 heads are no multiple of ulysses {ranks}" in told
    assert f"left out: ring 1 × ulysses 1 × data {ranks}, as the toy's 4 sequences at a time are no multiple" in told


def test_no_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parity.main(["ranks=[0,2]"])
    assert stop.value.code == 2 and "ranks=[0, 2]: it must be at least 1" in capsys.readouterr().err


def test_a_gradient_that_is_off_is_seen(alone: dict) -> None:
    name = next(iter(alone["gradients"]))
    off = alone | dict(gradients=alone["gradients"] | {name: [x * 1.0001 for x in alone["gradients"][name]]})
    row = parity.compare(off, alone)
    assert row["where"] == name and 5e-5 < row["gradients"] < 2e-4


@pytest.mark.slow
def test_fifty_steps_of_six_named_combinations() -> None:
    options = ["data.batch=4", "optim.lr=3e-3", "optim.clip=1"]
    expected = measure(1, [REFERENCE], 50, options)[REFERENCE]["losses"]
    assert len(expected) == 50 and expected[-1] < expected[0]
    for ranks in (2, 4):
        wanted = [split for split in NAMED.values() if split.ring * split.ulysses * split.data == ranks]
        for split, result in measure(ranks, wanted, 50, options).items():
            worst = max(abs(a - b) / b for a, b in zip(result["losses"], expected, strict=True))
            assert worst < 1e-3, f"{split}: {worst}"
