"""A ring's rehearsal on one device: it gives the kernels what a ring would, and says how long that takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan import Mask
from ringspan.parallel import ring
from ringspan.parallel.bench import rehearse
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.layout import Layout
from ringspan.parallel.plan import make_plan
from ringspan.parallel.transport.select import blocks_per_step

TINY = [
    "--tokens", "48", "--heads", "4/2", "--head-dim", "16", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--rep", "1",
]  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_kernels_are_given_what_a_ring_gives_them(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, list[int]] = {"block_forward": [], "block_backward": []}

    def record(name: str, keys: int) -> None:
        run = getattr(ring, name)

        def recorded(*args: Any, **options: Any) -> Any:
            assert args[keys].isfinite().all()
            given[name].append(args[keys].shape[1])
            return run(*args, **options)

        monkeypatch.setattr(ring, name, recorded)

    record("block_forward", 1)
    record("block_backward", 2)
    layout, mask = Layout("zigzag", 192, 4), Mask(causal=True)
    shard = rehearse.tensors(Setting(48, 4, 2, 16), 48, torch.device("cpu"), torch.float32)
    ways = rehearse.passes(shard, layout, mask, rank, "chunked")
    for name, way, backward in zip(given, ways, (False, True), strict=True):
        given[name].clear()
        way()
        steps = make_plan(layout, mask, rank, blocks_per_step("copy", layout, True, 1, 2, backward)).steps
        # half of the own block, here of its heads, comes last
        own = [48] if not backward else [48, 48]
        assert sorted(given[name]) == sorted([*own, *(step.num_keys for step in steps[1:])])


def test_a_line_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rehearsal.json"
    assert rehearse.main([*TINY, "--ranks", "3", "--heads", "4/2", "4/4", "--json", str(path), "--link", "250"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("48-h4-2-d16", "alone", "rank 0", "rank 1", "rank 2")) and "rank 3" not in shown
    result = json.loads(path.read_text())
    rows = result["rows"]
    assert [row["rank"] for row in rows] == [None, 0, 1, 2] * 2 and rows[0]["both_share"] == rows[4]["both_share"] == 1
    assert result["command"].endswith("--heads 4/2 4/4 --link 250") and result["link"] == 250
    assert {row["setting"] for row in rows} == {"48-h4-2-d16", "48-h4-4-d16"}
    assert all(row["both_share"] > 0 and row["both_tflops"] > 0 for row in rows)


def test_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call of each, which may compile, comes before all turns."""
    calls: list[str] = []
    for name in ("ring_forward", "ring_backward"):
        run = getattr(rehearse, name)
        monkeypatch.setattr(rehearse, name, lambda *a, name=name, run=run, **o: (calls.append(name), run(*a, **o))[1])
    monkeypatch.setattr(rehearse, "spans", lambda way, device, times: (calls.append("timed"), [1.0])[1])
    rehearse.main([*TINY, "--rank", "0"])
    assert calls[:4] == ["ring_forward", "ring_backward"] * 2 and set(calls[4:]) == {"timed"}


@pytest.mark.parametrize(
    "given, word",
    [
        ("--ranks 1", "at least 2"),
        ("--rank 4", "0 … 3"),
        ("--heads 4/2 4", "pairs"),
        ("--link -1", "positive"),
        ("--heads 5/2", "multiple"),
        ("--window 0", "window"),
        ("--tokens 0", "at least 1"),
        ("--cycles", "cycles"),
        ("--json /nowhere/found.json", "no folder"),
    ],
)
def test_what_cannot_be_rehearsed(given: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rehearse.main([*TINY, *given.split()])
    assert word in capsys.readouterr().err
