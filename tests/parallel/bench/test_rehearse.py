"""The rehearsal of a ring on one device: its kernels get the blocks of a real ring, and every rank is timed."""

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
def test_kernels_get_the_blocks_of_a_ring(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_keys: dict[str, list[int]] = {"block_forward": [], "block_backward": []}

    def record(name: str, k_index: int) -> None:
        run = getattr(ring, name)

        def recorded(*args: Any, **options: Any) -> Any:
            assert args[k_index].isfinite().all()
            num_keys[name].append(args[k_index].shape[1])
            return run(*args, **options)

        monkeypatch.setattr(ring, name, recorded)

    record("block_forward", 1)
    record("block_backward", 2)
    layout, mask = Layout("zigzag", 192, 4), Mask(causal=True)
    shard = rehearse.tensors(Setting(48, 4, 2, 16), 48, torch.device("cpu"), torch.float32)
    passes = rehearse.make_passes(shard, layout, mask, rank, "chunked")
    for name, call, backward in zip(num_keys, passes, (False, True), strict=True):
        num_keys[name].clear()
        call()
        steps = make_plan(layout, mask, rank, blocks_per_step("copy", layout, True, 1, 2)).steps
        # the backward splits the local block into two halves, here of its heads
        local = [48] if not backward else [48, 48]
        assert sorted(num_keys[name]) == sorted([*local, *(step.num_keys for step in steps[1:])])


def test_the_report_has_a_line_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rehearsal.json"
    assert rehearse.main([*TINY, "--ranks", "3", "--heads", "4/2", "4/4", "--json", str(path), "--link", "250"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in ("48-h4-2-d16", "alone", "rank 0", "rank 1", "rank 2")) and "rank 3" not in table
    result = json.loads(path.read_text())
    rows = result["rows"]
    assert [row["rank"] for row in rows] == [None, 0, 1, 2] * 2 and rows[0]["both_share"] == rows[4]["both_share"] == 1
    assert result["command"].startswith("ringspan bench rehearse --tokens 48") and result["link"] == 250
    assert result["command"].endswith("--heads 4/2 4/4 --link 250")  # without the output path
    assert {row["setting"] for row in rows} == {"48-h4-2-d16", "48-h4-4-d16"}
    assert all(row["both_share"] > 0 and row["both_tflops"] > 0 for row in rows)


def test_compiling_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each pass, which may compile, precedes all timed calls."""
    calls: list[str] = []
    for name in ("ring_forward", "ring_backward"):
        run = getattr(ring, name)
        monkeypatch.setattr(ring, name, lambda *a, name=name, run=run, **o: (calls.append(name), run(*a, **o))[1])
    monkeypatch.setattr(rehearse, "call_times", lambda call, device, times: (calls.append("timed"), [1.0])[1])
    rehearse.main([*TINY, "--rank", "0"])
    assert calls[:4] == ["ring_forward", "ring_backward"] * 2 and set(calls[4:]) == {"timed"}


@pytest.mark.parametrize(
    "options, reason",
    [
        ("--ranks 1", "at least 2"),
        ("--rank 4", "0 … 3"),
        ("--heads 4/2 4", "pairs"),
        ("--link -1", "positive"),
        ("--heads 5/2", "multiple"),
        ("--window 0", "window"),
        ("--tokens 0", "at least 1"),
        ("--cycles", "cycles"),
        ("--json /missing/rehearsal.json", "no folder"),
    ],
)
def test_wrong_options_are_rejected(options: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rehearse.main([*TINY, *options.split()])
    assert reason in capsys.readouterr().err
