"""Where a run begins, by function calls: its checkpoints, init_from, accepted changes, and nothing whole to resume from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.trainer.checkpoint import checkpoint, compatibility, run_folder
from ringspan.trainer.checkpoint.reader import Position
from ringspan.trainer.checkpoint.start import Start, StartFinder
from ringspan.trainer.config import compose, schema
from ringspan.trainer.data import tokenizer
from ringspan.trainer.model import GPT
from ringspan.trainer.monitoring import records
from tests.trainer import faults, jobs
from tests.trainer.checkpoint.test_kill_points import SMALL


class Weights(jobs.FakeEngine):
    """An engine of a GPT's weights, each filled with a number."""

    def __init__(self, shapes: dict[str, torch.Size], value: float) -> None:
        self.values = {name: torch.full(shape, value) for name, shape in shapes.items()}
        self.names, self.applied = list(self.values), 1


class Beginning:
    """A command and its run, as far as the start needs it."""

    def __init__(self, runs: Path, *options: str) -> None:
        self.composed = compose.load([*SMALL, f"runs={runs}", *options])
        self.config = tokenizer.resolve_config(self.composed.config)
        self.folder = run_folder.choose(self.composed.config)
        with torch.device("meta"):
            model = GPT(self.config.model, self.config.rope, seed=None)
        self.shapes = {name: weight.shape for name, weight in model.named_parameters()}

    def find(self) -> Start:
        return StartFinder(self.composed, self.folder, self.config.model, self.shapes, {}, faults.SingleRank()).find()  # type: ignore[arg-type]

    def save(self, *steps: int) -> "Beginning":
        described = compatibility.describe(self.config, self.config.model)
        for step in steps:
            engine: Any = Weights(self.shapes, float(step))
            position, rank = Position(step=step, applied=step), faults.SingleRank()
            assert checkpoint.save(self.folder / "checkpoints", engine, position, described, rank, schema.Checkpoint()) == ""  # type: ignore[arg-type]
        return self


def read(start: Start) -> float:
    return float(start.values("norm.weight", "weight", 0, 1)[0])


def test_a_resume_with_another_meaning_is_an_error_until_it_is_accepted(tmp_path: Path) -> None:
    first = Beginning(tmp_path, "name=first").save(3)
    path = f"checkpoint.resume={first.folder}/checkpoints/step-00000003"
    changes = ["rope.base=500", "model.softcap=2", "data.length=128", "seed=1"]
    for name in (["name=first"], ["name=second", path]):  # its own run, and another
        with pytest.raises(compose.ConfigError, match=r"rope.base=500.0 \(there 10000.0\)") as error:
            Beginning(tmp_path, *name, *changes).find()
        assert "accept the change with checkpoint.changed=[data.length,model.softcap,rope.base,seed]" in str(error.value)
        with pytest.raises(compose.ConfigError, match="made with other options than seed=1"):
            Beginning(tmp_path, *name, *changes, "checkpoint.changed=[rope,model,data.length]").find()
        start = Beginning(tmp_path, *name, *changes, "checkpoint.changed=[rope,model,data.length,seed]").find()
        assert start.source is not None and start.source.position.step == 3 and read(start) == 3
        assert start.accepted.keys() == {"rope.base", "model.softcap", "data.length", "seed"}


def test_init_from_a_checkpoint_of_ours_takes_weights_alone(tmp_path: Path) -> None:
    """Also of a model that Hugging Face's format cannot express."""
    own = ["model.softcap=3", "model.sinks=true", "model.windows=[8]"]
    first = Beginning(tmp_path, "name=first", *own).save(4, 5)
    for path in (first.folder, first.folder / "checkpoints", first.folder / "checkpoints/step-00000005"):
        other = Beginning(tmp_path, "name=second", f"init_from={path}", "data.length=128", "seed=7", *own)
        start = other.find()
        assert start.source is None and read(start) == 5 and start.accepted == {}
    with pytest.raises(compose.ConfigError, match=r"model.sinks=False|has a weight layers.0.attention.sinks"):
        Beginning(tmp_path, "name=second", f"init_from={first.folder}").find()
    with pytest.raises(compose.ConfigError, match=r"model.softcap=4.0 \(there 3.0\)"):
        Beginning(tmp_path, "name=second", f"init_from={first.folder}", *own, "model.softcap=4").find()
    file = first.folder / "checkpoints/step-00000005/weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(compose.ConfigError, match=r"init_from=.* is damaged: weights-00000.safetensors is cut short"):
        Beginning(tmp_path, "name=second", f"init_from={first.folder}", *own).find()


def test_a_longer_run_without_a_rope_rule_is_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Beginning(tmp_path, "name=first", "data.length=64").save(1)
    changes = f"init_from={first.folder}", "data.length=200"
    yarn = "rope.kind=yarn", "rope.factor=4", "rope.original_length=64", "checkpoint.changed=[rope]"
    Beginning(tmp_path, "name=second", *changes).find()
    assert "trained at 64 tokens, and rope.kind=base scales no positions for data.length=200; " in (
        out := capsys.readouterr().out
    )
    assert "rope=yarn rope.factor=4 rope.original_length=64 checkpoint.changed=[rope] does" in out
    for other in ((f"init_from={first.folder}", "data.length=64"), (*changes, *yarn)):
        Beginning(tmp_path, "name=second", *other).find()
        assert "scales no positions" not in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["manifests", "mount"])
def test_no_whole_checkpoint_is_code_3_with_the_ways_on(tmp_path: Path, lost: str) -> None:
    run = Beginning(tmp_path, "name=run").save(5, 6)
    records.append(run.folder / "metrics.jsonl", dict(kind="checkpoint", step=6))
    if lost == "mount":
        shutil.move(run.folder / "checkpoints", tmp_path / "elsewhere")
    else:
        for path in run.folder.glob("checkpoints/*/manifest.json"):
            path.unlink()
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(checkpoint.NoCheckpointError) as error:
        run.find()
    assert error.value.exit_code == 3 and sorted(run.folder.rglob("*")) == before
    text = str(error.value)
    missing, damaged = "step 6 was saved, and there is no checkpoint: is a disk not mounted?", "step-00000005 is damaged"
    assert (missing in text, damaged in text) == (lost == "mount", lost != "mount")
    assert "name=run checkpoint.resume=none   # from step 1; the old curve is kept" in text
    assert "name=NEW checkpoint.resume=FOLDER   # from another run's checkpoint" in text
    other = Beginning(tmp_path, "name=other").save(2)
    with pytest.raises(checkpoint.NoCheckpointError):  # the command began with another run's checkpoint
        Beginning(tmp_path, "name=run", f"checkpoint.resume={other.folder}/checkpoints/step-00000002").find()
    assert Beginning(tmp_path, "name=run", "checkpoint.resume=none").find().source is None
    if lost == "mount":
        shutil.move(tmp_path / "elsewhere", run.folder / "checkpoints")
        assert read(run.find()) == 6


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    run = Beginning(tmp_path, "name=run")
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text(json.dumps(dict(kind="train", step=1)) + "\n")
    assert run.find().source is None


def test_a_damaged_checkpoint_is_noted_and_the_one_before_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Beginning(tmp_path, "name=run").save(5, 6)
    (run.folder / "checkpoints/step-00000006/state.json").write_text("{}")
    assert read(run.find()) == 5
    assert "step-00000006 is damaged: state.json is cut short" in capsys.readouterr().out
