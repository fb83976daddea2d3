"""The benchmark of ringspan.compat: its baseline is right, and a run completes on two gloo ranks."""

import json
from pathlib import Path

import pytest

from tests.compat import ring_jobs


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_baseline_computes_what_our_function_does(ranks: int, pools) -> None:
    """ring-flash-attn's algorithm, with out and all gradients."""
    for gaps in pools(ranks)(ring_jobs.baseline_gaps):
        assert max(gaps) < 1e-5, gaps


def test_benchmark_completes_on_two_ranks(tmp_path: Path, pools) -> None:
    path = tmp_path / "rings.json"
    arguments = ["--device", "cpu", "--tokens", "24", "--heads", "4/2", "--head-dim", "16", "--rounds", "1", "--rep", "1"]
    assert pools(2)(ring_jobs.run_bench, [*arguments, "--json", str(path)]) == [0, 0]
    result = json.loads(path.read_text())
    assert "-m ringspan.compat.bench --tokens 24" in result["command"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["alone", "ring-zigzag-compat", "ring-zigzag-compat-varlen", "ring-zigzag-merged"]
    for name, row in rows.items():
        assert row["status"] == "ok", row
        assert name == "alone" or row["error"] < 1e-5
