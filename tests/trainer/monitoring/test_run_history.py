"""Means between console lines, the change of the held-out loss, and the summary at the end of a run."""

import json
from pathlib import Path

import pytest

from ringspan.trainer.monitoring.run_history import RunHistory


def step(loss: float, labels: float, source: dict[str, float]) -> dict:
    return dict(loss=loss, labels=labels, seconds=2.0, tokens_per_s=50.0, source=source)


def test_console_losses_are_means_per_label_since_the_last_line(tmp_path: Path) -> None:
    """A step of the other source moves one step's loss by 2, and the mean by its share of the labels."""
    history = RunHistory(tmp_path)
    history.add_step(step(1.0, 30, dict(text=1.0)), 100, dict(text=30))
    history.add_step(step(3.0, 10, dict(text=2.0, recall=3.5)), 100, dict(text=3, recall=7))
    history.add_step(step(float("nan"), 10, {}), 100, {})
    loss, sources = history.recent()
    assert loss == pytest.approx(1.5) and sources == pytest.approx(dict(text=(30 + 6) / 33, recall=3.5))
    history.add_step(step(4.0, 10, {}), 100, {})
    assert history.recent() == (4.0, {})


def test_evaluations_are_compared_with_those_of_earlier_starts(tmp_path: Path) -> None:
    lines = [dict(kind="held_out", step=n, loss=loss) for n, loss in ((4, 3.0), (8, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{cut")
    history = RunHistory(tmp_path)
    assert history.add_evaluation(12, 2.25, 1.0) == " (+0.250 since step 8)"
    for saved in (8, 12):
        (tmp_path / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True)
    history.add_step(step(1.0, 30, {}), 100, {})
    text = "\n".join(history.report(dict(text=1.25), dict(text=520.0, other=0.5)))
    assert "held out: loss 2.250 at step 12, the best is 2.000 at step 8; text 1.250 bits per byte" in text
    assert f"best checkpoint: {tmp_path}/checkpoints/step-00000008, held-out loss 2.000" in text
    assert "warning: text was read 520 times" in text and "other read 0.5 times" in text
    assert "training 2s, evaluation 1s, saving 0s" in text and "1 steps of 100 tokens; 50 tokens/s" in text
    assert RunHistory(tmp_path).add_evaluation(12, 2.25, 1.0, batches=4) == "", "losses on other batches do not compare"
    assert RunHistory(tmp_path / "absent").add_evaluation(1, 2.0, 1.0) == ""


def test_best_step_that_is_not_saved_is_named(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    history.add_evaluation(4, 2.0, 1.0)
    history.add_evaluation(8, 3.0, 1.0)
    (tmp_path / "checkpoints" / "step-00000008").mkdir(parents=True)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step-2-rank-0.json").touch()
    text = "\n".join(history.report({}, {}))
    assert "step-00000008, held-out loss 3.000 (step 4, the best, is not saved" in text and "ui.perfetto.dev" in text
