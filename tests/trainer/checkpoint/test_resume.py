"""A killed run resumes: bit for bit at the same number of ranks, to 1e-5 at another; and starts that are rejected."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer import export
from ringspan.trainer.checkpoint import reader, run_folder, safetensors
from tests.trainer import jobs
from tests.trainer.faults import SingleRank


def lines(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl."""
    parsed = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in parsed if line["kind"] == kind]


def weights(checkpoint: Path) -> dict[str, bytes]:
    files = [safetensors.File(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return {name: file[name].numpy().tobytes() for file in files for name in file}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, zero: int) -> None:
    options = [f"runs={tmp_path}", "steps=20", "debug.deterministic=true", "checkpoint.every=10", f"engine.zero={zero}"]
    assert jobs.run_ranks(2, jobs.train, [*options, "name=uninterrupted"]) == [0, 0]
    codes = jobs.run_ranks(2, jobs.train, [*options, "name=killed"], jobs.kill_after, 13)
    assert -signal.SIGKILL in codes
    assert jobs.run_ranks(2, jobs.train, [*options, "name=killed"]) == [0, 0]
    uninterrupted, killed = lines(tmp_path / "uninterrupted"), lines(tmp_path / "killed")
    assert [line["step"] for line in killed] == list(range(1, 21))
    for name in ("loss", "grad", "lr", "samples", "tokens"):
        assert [line[name] for line in killed] == [line[name] for line in uninterrupted], name
    last = "checkpoints/step-00000020"
    assert weights(tmp_path / "killed" / last) == weights(tmp_path / "uninterrupted" / last)
    assert len((tmp_path / "killed" / "starts.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_checkpoint_of_four_ranks_resumes_on_one_two_and_eight(tmp_path: Path, optimizer: str) -> None:
    options = [f"runs={tmp_path}", "steps=10", "checkpoint.every=5", f"optim={optimizer}"]
    assert (
        jobs.run_ranks(4, jobs.train, [*options, "name=four", "parallel.ring=2", "parallel.data=2", "engine.zero=2"]) == [0] * 4
    )
    expected = lines(tmp_path / "four")
    splits = [(1, ["engine.zero=1"]), (2, ["parallel.ulysses=2", "engine.zero=2"]), (8, ["parallel.ring=4", "parallel.data=2"])]
    if optimizer == "adamw":
        splits.append((2, ["parallel.ring=2", "engine.zero=3"]))
    for number, (world, split) in enumerate(splits):
        name = f"on-{world}-{number}"
        source = tmp_path / "four" / "checkpoints" / "step-00000005"
        shutil.copytree(source, tmp_path / name / "checkpoints" / "step-00000005")
        assert jobs.run_ranks(world, jobs.train, [*options, f"name={name}", *split]) == [0] * world
        resumed = lines(tmp_path / name)
        assert [line["step"] for line in resumed] == [6, 7, 8, 9, 10]
        assert [line["samples"] for line in resumed] == [line["samples"] for line in expected[5:]]
        for line, reference in zip(resumed, expected[5:], strict=True):
            assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5), (world, line["step"])
            assert line["labels"] == reference["labels"]


def test_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=4", "checkpoint.every=2"]
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    before = lines(tmp_path / "run")
    shard = tmp_path / "run" / "checkpoints" / "step-00000004" / "weights-00000.safetensors"
    intact = shard.read_bytes()
    shard.write_bytes(intact[:-1])
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    text = jobs.output
    assert shard.read_bytes() == intact, "the damaged checkpoint was not written again"
    assert "step-00000004 is damaged: weights-00000.safetensors is cut short" in text and "the previous one is used" in text
    assert "continuing after step 2" in text
    after = lines(tmp_path / "run")
    assert [(x["step"], x["loss"]) for x in after] == [(x["step"], x["loss"]) for x in before]
    assert reader.verify(shard.parent, SingleRank()) == []  # type: ignore[arg-type]
    assert "step-00000004 is renamed to step-00000004.bad" in text and Path(f"{shard.parent}.bad").is_dir()


def test_new_start_in_a_used_folder_replaces_the_checkpoints(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint.every=1"]
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    before = weights(last)
    assert jobs.run_ranks(1, jobs.train, [*options, "seed=1", "checkpoint.resume=none"]) == [0]
    assert weights(last) != before and weights(Path(f"{last}.bad")) == before


def test_rejected_start_leaves_the_checkpoints(tmp_path: Path) -> None:
    options, empty = [f"runs={tmp_path}", "name=run", "steps=1"], tmp_path / "empty"
    empty.mkdir()
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    assert jobs.run_ranks(1, jobs.train, [*options, "checkpoint.resume=none", f"init_from={empty}"]) == [1]
    assert "has no config.json that can be read" in jobs.output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert (tmp_path / "run" / run_folder.FINISHED).exists()


def test_run_started_from_a_path_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "steps=4", "checkpoint.every=1"]
    assert jobs.run_ranks(1, jobs.train, [*options, "name=first", "steps=1"]) == [0]
    path = tmp_path / "first" / "checkpoints" / "step-00000001"
    options += ["name=second", f"checkpoint.resume={path}"]
    jobs.run_ranks(1, jobs.train, options, jobs.kill_after, 3)
    assert "continuing after step 1" in jobs.output
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    assert "continuing after step 2" in jobs.output and "is not used" in jobs.output
    assert [line["step"] for line in lines(tmp_path / "second")] == [2, 3, 4]


def test_run_starts_from_either_a_checkpoint_or_published_weights(tmp_path: Path) -> None:
    options, weights = [f"runs={tmp_path}", "steps=1"], tmp_path / "weights"
    weights.mkdir()
    assert jobs.run_ranks(1, jobs.train, [*options, "name=first"]) == [0]
    path = tmp_path / "first" / "checkpoints" / "step-00000001"
    start = [options[0], "name=second", f"checkpoint.resume={path}"]
    assert jobs.run_ranks(2, jobs.train, [*start, "steps=2", f"init_from={weights}"]) == [1, 1]
    assert f"init_from={weights}, checkpoint.resume={path}: a run begins with one" in jobs.output
    assert jobs.run_ranks(1, jobs.train, [*start, "steps=2"]) == [0]
    assert jobs.run_ranks(1, jobs.train, [*start, "steps=3", f"init_from={weights}"]) == [0], (
        "with its own checkpoint init_from is allowed"
    )
    assert "continuing after step 2" in jobs.output


def test_run_from_published_weights_reports_another_position_scaling(tmp_path: Path) -> None:
    options, start = [f"runs={tmp_path}", "steps=1"], f"init_from={tmp_path}/model"
    assert jobs.run_ranks(1, jobs.train, [*options, "name=first"]) == [0]
    export.main([f"checkpoint={tmp_path}/first", f"to={tmp_path}/model"])
    assert jobs.run_ranks(2, jobs.train, [*options, "name=same", start]) == [0, 0] and "otherwise" not in jobs.output
    assert jobs.run_ranks(2, jobs.train, [*options, "name=longer", start, "rope=linear"]) == [0, 0]
    assert jobs.output.count("rope.kind=linear (there base), rope.factor=4.0 (there 1.0)") == 1


def test_checkpoint_of_another_model_or_optimizer_is_rejected(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2"]
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    for change, message in [
        ("model.layers=3", "has no weight layers.2."),
        ("model.mlp_dim=64", "mlp"),
        ("optim=muon", "another optimizer"),
    ]:
        assert jobs.run_ranks(1, jobs.train, [*options, "steps=3", change]) == [1]
        assert message in jobs.output


def test_same_command_resumes_a_run_and_leaves_a_finished_run_alone(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "steps=4", "checkpoint.every=2"]
    jobs.run_ranks(1, jobs.train, options, jobs.kill_after, 3)
    (first,) = tmp_path.iterdir()
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    assert [line["step"] for line in lines(first)] == [1, 2, 3, 4] and "starts again" not in jobs.output
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    assert jobs.output.count(f"{first.name} is finished; the same run starts again in {first.name}-2") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, first.name + "-2"]


@pytest.mark.parametrize("option", ["steps=4", "checkpoint.resume=none"])
def test_finished_run_that_trains_again_and_is_killed_is_not_finished(tmp_path: Path, option: str) -> None:
    options, finished = [f"runs={tmp_path}", "name=run", "steps=2"], tmp_path / "run" / run_folder.FINISHED
    assert jobs.run_ranks(1, jobs.train, options) == [0] and finished.exists()
    jobs.run_ranks(1, jobs.train, [*options, option], jobs.kill_after, 3 if option == "steps=4" else 1)
    assert not finished.exists(), "a sweep would skip it"
    assert jobs.run_ranks(1, jobs.train, [*options, option]) == [0] and finished.exists()


def test_extended_run_reports_a_jump_of_the_learning_rate(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run"]
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=2"]) == [0] and "lr goes" not in jobs.output
    assert jobs.run_ranks(2, jobs.train, [*options, "steps=4"]) == [0, 0]
    assert jobs.output.count("lr goes from 3.0e-4 to 7.0e-4") == 1
    assert jobs.run_ranks(1, jobs.train, [*options, "steps=4"]) == [0] and "lr goes" not in jobs.output
    start = ["name=other", f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002", "steps=8"]
    assert jobs.run_ranks(1, jobs.train, [options[0], *start]) == [0] and "lr goes from 7.0e-4 to 2.2e-3" in jobs.output


def test_finished_run_without_a_checkpoint_trains_again_only_on_request(tmp_path: Path) -> None:
    options = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint.at_end=false"]
    assert jobs.run_ranks(1, jobs.train, options) == [0]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    for extra in ([], ["steps=3"]):
        assert jobs.run_ranks(2, jobs.train, [*options, *extra]) == [1, 1]
        assert (
            "that run is finished, and nothing is left to continue from" in jobs.output and "has no checkpoint" in jobs.output
        )
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert jobs.run_ranks(1, jobs.train, [*options, "checkpoint.resume=none"]) == [0]


def in_bf16(options: list[str], *killed_after: int) -> None:
    """Train in bf16 as on GPUs. validate.py rejects it on a CPU, where it is only slow."""
    from ringspan.trainer import loop
    from ringspan.trainer.config import compose
    from ringspan.trainer.run import Run

    composed = compose.load([*jobs.TOY, *options])
    composed.config.engine.precision = "bf16"
    run = Run(composed)
    for step in killed_after:
        jobs.kill_after(run, step)
    loop.train(run)
    run.close()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_run_resumes_from_its_fp32_master_weights_bit_for_bit(tmp_path: Path, zero: int) -> None:
    options = [f"runs={tmp_path}", "steps=6", "debug.deterministic=true", "checkpoint.every=3", f"engine.zero={zero}"]
    assert jobs.run_ranks(2, in_bf16, [*options, "name=uninterrupted"]) == [0, 0]
    jobs.run_ranks(2, in_bf16, [*options, "name=killed"], 4)
    assert jobs.run_ranks(2, in_bf16, [*options, "name=killed"]) == [0, 0]
    uninterrupted, killed = lines(tmp_path / "uninterrupted"), lines(tmp_path / "killed")
    assert [line["loss"] for line in killed] == [line["loss"] for line in uninterrupted]
    last = "checkpoints/step-00000006"
    assert weights(tmp_path / "killed" / last) == weights(tmp_path / "uninterrupted" / last)
