"""Two checkouts measure in turns, and their comparison has ratios of a round and points of share."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringspan import ROOT
from tests.kernels.bench.alternate import ALONE, ROLES, Turns, compare


def test_checkouts_take_turns_and_who_is_first_alternates(tmp_path: Path) -> None:
    order: list[str] = []
    running = threading.Lock()

    def measure(role: str) -> None:
        assert running.acquire(blocking=False), "both measure at the same time"
        order.append(role)
        running.release()

    def run(role: str) -> None:
        turns = Turns(tmp_path, role)
        for _ in range(5):
            turns.take("d64/16k hopper", lambda: measure(role))

    threads = [threading.Thread(target=run, args=(role,)) for role in ROLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == ["base", "new", "new", "base", "base", "new", "new", "base", "base", "new"]


def test_a_checkout_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.bench.alternate.TIMEOUT", 0.01)
    with pytest.raises(TimeoutError, match="the new checkout has not arrived in round d64 hopper 0"):
        Turns(tmp_path, "base").take("d64 hopper", lambda: None)


def test_ratios_and_points_are_those_of_a_round() -> None:
    def row(name: str, ms: float, flops: float) -> dict:
        return dict(case="32k", name=name, flops=flops, forward=ms)

    base = [row(ALONE, 8.0, 2.0), row("ring", 5.0, 1.0), row(ALONE, 9.0, 2.0), row("ring", 5.0, 1.0)]
    new = [row(ALONE, 8.0, 2.0), row("ring", 4.0, 1.0), row(ALONE, 9.0, 2.0), row("ring", 5.0, 1.0)]
    # both ended early: in the third round only the kernel alone was measured, and by new also the ring
    third = [row(ALONE, 3.0, 2.0)]
    alone, ring = compare(base + third, [*new, *third, row("ring", 4.0, 1.0)])
    assert alone["forward_ratio"] == [1.0, 1.0, 1.0] and (alone["rounds"], ring["rounds"]) == (3, 2)
    assert ring["forward_ms"] == [5.0, 4.5] and ring["forward_ratio"] == [1.0625, 1.125, 1.1875]
    assert ring["forward_share"] == pytest.approx([0.925, 0.95, 0.975])
    assert ring["forward_points"] == pytest.approx([5.0, 10.0, 15.0])


@pytest.mark.slow
def test_a_checkout_compared_with_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.bench.alternate", "--base", str(ROOT), "--out", str(tmp_path / "out.json")]
    command += ["kernels", "--shapes", "tiny", "--device", "cpu", "--only", "chunked,sdpa-math", "--rounds", "2", "--rep", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(row["name"], row["rounds"]) for row in result["rows"]] == [("chunked", 2), ("sdpa-math", 2)]
    assert result["base"] == result["new"] and result["times"].keys() == set(ROLES)
