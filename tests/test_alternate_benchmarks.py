"""Two checkouts measure in turns, and their comparison has ratios of a round and points of share."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringspan import ROOT
from tests.alternate_benchmarks import ALONE, ROLES, Turns, compare


def test_checkouts_take_turns_and_base_is_first(tmp_path: Path) -> None:
    order: list[str] = []
    running = threading.Lock()

    def measure(role: str) -> None:
        assert running.acquire(blocking=False), "both measure at the same time"
        order.append(role)
        running.release()

    def run(role: str) -> None:
        turns = Turns(tmp_path, role)
        for _ in range(5):
            turns.take(lambda: measure(role))

    threads = [threading.Thread(target=run, args=(role,)) for role in ROLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == list(ROLES) * 5


def test_ratios_and_points_are_those_of_a_round() -> None:
    def row(name: str, ms: float, flops: float) -> dict:
        return dict(case="32k", name=name, flops=flops, forward=ms)

    base = [row(ALONE, 8.0, 2.0), row("ring", 5.0, 1.0), row(ALONE, 9.0, 2.0), row("ring", 5.0, 1.0)]
    new = [row(ALONE, 8.0, 2.0), row("ring", 4.0, 1.0), row(ALONE, 9.0, 2.0), row("ring", 5.0, 1.0), row(ALONE, 1.0, 2.0)]
    alone, ring = compare(base, new)  # the last measurement has no partner
    assert alone["forward_ratio"] == [1.0, 1.0, 1.0] and alone["rounds"] == 2
    assert ring["forward_ms"] == [5.0, 4.5] and ring["forward_ratio"] == [1.0625, 1.125, 1.1875]
    assert ring["forward_share"] == pytest.approx([0.925, 0.95, 0.975])
    assert ring["forward_points"] == pytest.approx([5.0, 10.0, 15.0])


@pytest.mark.slow
def test_a_checkout_compared_with_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.alternate_benchmarks", "--base", str(ROOT), "--out", str(tmp_path / "out.json")]
    command += ["kernels", "--shapes", "tiny", "--device", "cpu", "--only", "chunked", "--rounds", "2", "--rep", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["rounds"] for row in result["rows"]] == [2] and result["times"].keys() == set(ROLES)
