"""The safetensors format: round trip, and errors for damaged files and wrong tensors."""

from pathlib import Path

import pytest
import torch

from ringspan.trainer.checkpoint import safetensors


def test_tensors_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = dict(a=torch.randn(3, 5), b=torch.arange(7).to(torch.bfloat16), c=torch.tensor(3.0), d=torch.empty(0, 4))
    safetensors.write(path, tensors, dict(made="here"))
    file = safetensors.File(path)
    assert list(file) == list(tensors) and file.metadata == dict(made="here")
    for name, x in tensors.items():
        assert file[name].dtype == x.dtype and torch.equal(file[name], x) and file.shape(name) == tuple(x.shape)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.write(path, dict(a=torch.randn(3, 5)))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is cut short"):
        safetensors.File(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no safetensors file"):
        safetensors.File(path)


def test_tensor_of_another_shape_than_announced_is_rejected(tmp_path: Path) -> None:
    writer = safetensors.Writer(tmp_path / "x.safetensors", dict(a=(torch.float32, (2,))), {})
    with pytest.raises(ValueError, match="announced"):
        writer.add(torch.zeros(3))
