"""The table of a sweep's results."""

import json
from pathlib import Path

import pytest

from ringspan.launch import __main__ as launcher
from ringspan.launch import sweep
from ringspan.launch.supervisor import Outcome
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose


def test_killed_and_unstarted_runs_have_a_line(tmp_path: Path) -> None:
    for name, losses, end in (("good", (3.0, 2.0), ""), ("killed", (1.5,), '{"kind": "tra')):
        (tmp_path / name).mkdir()
        lines = [json.dumps(dict(kind="train", step=i, loss=x, tokens_per_s=2000.0)) for i, x in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n" + end)
    table = sweep.table([(f"name={name}", tmp_path / name, 0) for name in ("unstarted", "good", "killed")], 4).splitlines()
    assert "last 10 steps" in table[-1]
    assert [line.split()[:5] for line in table[1:-1]] == [
        ["–", "1.500", "2.0k", "1", "name=killed"],
        ["–", "2.500", "2.0k", "2", "name=good"],
        ["–", "–", "–", "0", "name=unstarted"],
    ]


def finished_run(folder: Path, loss: float, batches: int) -> Path:
    folder.mkdir()
    lines = [dict(kind="train", step=20, loss=loss, tokens_per_s=2000.0), dict(kind="held_out", loss=loss, batches=batches)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_loss_of_other_batches_is_marked_and_not_ranked(tmp_path: Path) -> None:
    """The reused run would lead with 3.277; on the sweep's batches its loss is 3.349."""
    runs = [(name, finished_run(tmp_path / name, loss, n), 0) for name, loss, n in (("reused", 3.277, 4), ("new", 3.815, 1))]
    lines = sweep.table(runs, 1).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["3.815", "3.277*"]
    assert "of the last evaluation, on 1 batch)" in lines[3] and lines[4].startswith("* on 4 batches, so it does not compare")


def test_a_finished_run_of_other_batches_is_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["experiment=laptop", "parallel.device=cpu", f"runs={tmp_path}", "steps=20", "evaluate.batches=1"]
    sweep_words = ["--ranks=1", "--multirun", *options, "optim.lr=5e-3,1e-2"]
    first, second = (run_folder.choose(compose.load([*options, f"optim.lr={lr}"]).config) for lr in ("5e-3", "1e-2"))
    for folder, batches in ((first, 4), (second, 1)):
        finished_run(folder, 3.0, batches)
        (folder / "finished.json").write_text('{"steps": 20}')
        (folder / "checkpoints" / "step-00000020").mkdir(parents=True)
    started: list[list[str]] = []

    def start(words: list[str], num_ranks: int) -> Outcome:
        started.append(words)
        return Outcome(0, False)

    monkeypatch.setattr(launcher, "start", start)
    assert launcher.main(sweep_words) == 0
    assert [words[-1] for words in started] == [f"name={first.name}"] and "optim.lr=0.005" in started[0]
    assert "it was evaluated on 4 batches, this sweep takes 1: it is evaluated again" in capsys.readouterr().out
    (first / "checkpoints" / "step-00000020").rmdir()  # without weights the figure is marked
    assert launcher.main(sweep_words) == 0 and len(started) == 1 and "3.000*" in capsys.readouterr().out
