"""Memory of whole runs: refused and failing starts, plans that change no number, planned phases, running out of memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.config import compose
from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

DETERMINISTIC = ["steps=3", "debug.deterministic=true"]


def train_with_one_mebibyte(options: list[str]) -> None:
    from ringspan.trainer.monitoring import profiling

    profiling.rank_memory = lambda device: 2**20
    jobs.run_train_command(options)


def test_far_too_little_memory_is_refused_and_a_warning_if_ignored(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=1"]
    assert jobs.run_ranks(2, train_with_one_mebibyte, options) == [2, 2]
    assert jobs.output.count("a run that needs more than 1.5 × the memory at hand is not started") == 1
    assert "engine.memory='x/1 outs=0' lacks" in jobs.output and not (tmp_path / "run").exists()
    assert jobs.run_ranks(2, train_with_one_mebibyte, [*options, "hardware.ignore_plan=true"]) == [0, 0]
    assert jobs.output.count("memory: the plan does not fit, so the run may run out of memory: engine.memory=") == 1
    assert "GiB on each rank (it needs" in jobs.output


@pytest.fixture(scope="module")
def keeping_everything(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Metrics of runs with the memory plan `none`, by ZeRO stage."""
    root = tmp_path_factory.mktemp("plain")
    for zero in (1, 3):
        options = [*DETERMINISTIC, f"runs={root}", f"name={zero}", f"engine.zero={zero}", "engine.memory=none"]
        assert jobs.run_ranks(2, jobs.train, options) == [0, 0]
    return {zero: lines(root / str(zero)) for zero in (1, 3)}


@pytest.mark.parametrize("plan", ["none", "auto", "x/1", "x/1@2 outs=2@2"])
@pytest.mark.parametrize("zero", [1, 3])
def test_memory_plans_change_no_number(
    keeping_everything: dict[int, list[dict[str, Any]]], tmp_path: Path, plan: str, zero: int
) -> None:
    """Plans whose rows and heads are one chunk; one sum of three gradients is rounded in another order."""
    options = [*DETERMINISTIC, f"runs={tmp_path}", "name=run", f"engine.zero={zero}", f"engine.memory={plan}"]
    assert jobs.run_ranks(2, jobs.train, options) == [0, 0]
    for step, expected in zip(lines(tmp_path / "run"), keeping_everything[zero], strict=True):
        pair = (step["loss"], step["grad"]), (expected["loss"], expected["grad"])
        assert pair[0] == (pair[1] if plan in ("none", "auto") else pytest.approx(pair[1], rel=1e-6))


@pytest.mark.parametrize("zero, ranks", [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_warm_up_changes_no_number(tmp_path: Path, zero: int, ranks: int) -> None:
    shared = [f"runs={tmp_path}", "steps=2", f"engine.zero={zero}", f"parallel.ring={ranks}", "debug.deterministic=true"]
    for name, tokens in (("cold", 0), ("warm", 40)):
        assert set(jobs.run_ranks(ranks, jobs.train, [*shared, f"name={name}", f"debug.warm_up={tokens}"])) == {0}
    cold, warm = (lines(tmp_path / name) for name in ("cold", "warm"))
    assert [(line["loss"], line["grad"]) for line in cold] == [(line["loss"], line["grad"]) for line in warm]


def test_planned_and_measured_phases_are_written(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2", "engine.memory=x/2@1 outs=1@1"]
    assert jobs.run_ranks(2, jobs.train, options) == [0, 0]
    assert jobs.output.count("memory plan x/2@1 outs=1@1: ") == 2 and "GiB of host memory planned" in jobs.output
    (start,) = lines(tmp_path / "run", "start")
    assert start["plan"] == "x/2@1 outs=1@1" and start["planned"] > 0 and start["host_pinned"] > 0
    phases = lines(tmp_path / "run", "phase")
    assert [line["phase"] for line in phases] == ["forward", "backward"] * 2 + ["step"]  # of the first step: two micro-batches
    assert all(line["planned"] > 0 and line["seconds"] > 0 for line in phases)
    assert json.loads((tmp_path / "run" / "starts.jsonl").read_text())["memory"] == "x/2@1 outs=1@1"


def run_out_of_memory(run: Any) -> None:
    """Raise torch's error in the third backward."""
    import torch

    backward, calls = run.engine.backward, []

    def failing(loss: Any, labels: float) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        backward(loss, labels)

    run.engine.backward = failing


def run_train_command_out_of_memory(options: list[str]) -> None:
    from ringspan.trainer import run as run_module
    from ringspan.trainer import train

    start = run_module.Run.__init__

    def start_and_break(self: Any, composed: Any) -> None:
        start(self, composed)
        run_out_of_memory(self)

    run_module.Run.__init__ = start_and_break  # type: ignore[method-assign]
    raise SystemExit(train.run(compose.load([*jobs.TOY, *options])))


def test_out_of_memory_names_phase_bytes_and_the_next_plan(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=3", "checkpoint.every=1", "data.length=4096", "engine.bucket_mb=1"]
    assert jobs.run_ranks(
        1, run_train_command_out_of_memory, [*options, "data.batch=1", "data.micro_batch=1", "engine.memory=none"]
    ) == [1]
    assert "ringspan train: rank 0: out of memory in phase 'backward': " in jobs.output
    assert "GiB were planned for it" in jobs.output and "try engine.memory='x/" in jobs.output
    assert "step-00000002 is the last checkpoint" in jobs.output and "GiB are available" in jobs.output
    assert "Traceback" not in jobs.output and jobs.output.count("traceback is in") == 1
    assert "OutOfMemoryError" in (tmp_path / "run" / "traceback-rank-0.txt").read_text()


@pytest.mark.parametrize(
    ("key", "message"), [("host", "GiB of host memory are planned"), ("plan", "outs=9 is more than the model's 2 layers")]
)
def test_plan_that_cannot_start_is_named_before_step_1(tmp_path: Path, key: str, message: str) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=1"]
    if key == "plan":
        with pytest.raises(compose.ConfigError, match=message):
            compose.load([*jobs.TOY, *options, "engine.memory=x/1 outs=9"])
        return
    assert jobs.run_ranks(2, train_without_host_memory, [*options, "engine.memory=x/1@2"]) == [2, 2]
    assert jobs.output.count(message) == 1 and "take another plan" in jobs.output
    assert "Traceback" not in jobs.output and not (tmp_path / "run" / "metrics.jsonl").exists()


def train_without_host_memory(options: list[str]) -> None:
    from ringspan.trainer.memory import kept

    kept.available_host_memory = lambda: 1.0
    jobs.run_train_command(options)
