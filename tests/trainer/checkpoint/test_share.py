"""A rank's files: their largest size, and tensors that are not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.trainer.checkpoint import checkpoint, share
from ringspan.trainer.checkpoint.reader import Position, Reader
from ringspan.trainer.config import schema
from tests.trainer import faults, jobs
from tests.trainer.checkpoint.test_checkpoint import newest
from tests.trainer.checkpoint.test_kill_points import save_step


class LargeEngine(jobs.FakeEngine):
    """Weights of 1.5, 0.4, 0.4 and 0.4 MiB."""

    def __init__(self) -> None:
        sizes = [393_216, 104_857, 104_857, 104_857]
        self.values = {f"w{i}": torch.arange(size).float() for i, size in enumerate(sizes)}
        self.names, self.applied = list(self.values), 1


def test_files_are_cut_at_tensors_to_the_largest_size(tmp_path: Path) -> None:
    engine: Any = LargeEngine()
    for limit in (0, 1):
        options = schema.Checkpoint(max_file_mib=limit)
        assert checkpoint.save(tmp_path, engine, Position(step=limit + 1), {}, faults.SingleRank(), options) == ""  # type: ignore[arg-type]
    for step, expected in ((1, ["weights-00000"]), (2, ["weights-00000", "weights-00000-00001", "weights-00000-00002"])):
        folder = tmp_path / f"step-{step:08d}"
        assert sorted(path.stem for path in folder.glob("weights-*")) == sorted(expected)
        reader = Reader(folder)
        reader.validate_content()
        assert all(torch.equal(reader.weight(name), value) for name, value in engine.values.items())
    large = [path for path in folder.glob("*.safetensors") if path.stat().st_size > 2**20 + 1000]
    assert len(large) == 3, "w0 and its two moments are larger than the limit, so that each has a file of its own"
    assert newest(tmp_path) == ("step-00000002", [])


BAD = [("w1", float("nan")), ("w2", float("inf")), ("w0", -float("inf")), ("w3", 1e30)]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, name: str, value: float) -> None:
    assert faults.run_threads(2, lambda rank: save_step(tmp_path, 10, rank)) == ["", ""]

    def save(rank: Any) -> str:
        engine: Any = jobs.FakeEngine(20.0)
        engine.values[name][3, 1] = value
        return checkpoint.save(tmp_path, engine, Position(step=20), {}, rank, schema.Checkpoint(keep_last=1))

    first, second = faults.run_threads(2, save)
    assert first == second and f"{name} is not finite: its elements reach from" in first
    assert newest(tmp_path) == ("step-00000010", []) and len(list(tmp_path.iterdir())) == 1


def test_moments_may_be_large_but_not_infinite(tmp_path: Path) -> None:
    share._require_finite("w#exp_avg_sq", torch.tensor([1e30]))
    share._require_finite("w", torch.empty(0, 3))
    with pytest.raises(share.NotFiniteError, match="w#exp_avg is not finite"):
        share._require_finite("w#exp_avg", torch.tensor([1.0, torch.inf]))


def test_manifest_and_state_are_strict_json(tmp_path: Path) -> None:
    assert faults.run_threads(1, lambda rank: save_step(tmp_path, 1, rank)) == [""]

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    for name in ("manifest.json", "state.json"):
        json.loads((tmp_path / "step-00000001" / name).read_text(), parse_constant=refuse)
