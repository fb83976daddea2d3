"""Forged and damaged checkpoints: each is damage with one line, and the one before is used."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.trainer.checkpoint import reader, safetensors
from ringspan.trainer.checkpoint.reader import Reader
from tests.trainer import faults
from tests.trainer.checkpoint.test_checkpoint import holds, newest
from tests.trainer.checkpoint.test_kill_points import save_step


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 to 3 of two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (3, 2, 1):  # each save keeps the newest one only
        assert faults.run_threads(2, lambda rank: save_step(folder / str(step), step, rank)) == ["", ""]  # noqa: B023
        shutil.move(folder / str(step) / f"step-{step:08d}", folder)
        (folder / str(step)).rmdir()
    assert newest(folder) == ("step-00000003", [])
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file, whose tensors stay; `change` may return a list or bytes to take its place."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(changed if isinstance(changed, list) else header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def test_tensors_of_unlisted_files_are_not_read(saved: Path) -> None:
    """A checkpoint of two ranks copied over one of more, or files from elsewhere."""
    for name in ("weights-00000", "moments-00000"):
        shutil.copy(saved / f"step-00000002/{name}.safetensors", saved / f"step-00000003/{name[:8]}00009.safetensors")
    assert newest(saved) == ("step-00000003", []) and holds(saved, "step-00000003", 3)


def test_an_unlisted_tensor_is_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded defect: every tensor file of the folder is read."""
    safetensors.write(saved / "step-00000003/weights-00009.safetensors", dict(foreign=torch.ones(2)))
    read = reader.read_manifest

    def read_folder(folder: Path) -> dict[str, dict[str, Any]]:
        return {path.name: {} for path in folder.glob("*.safetensors")} | read(folder)

    assert holds(saved, "step-00000003", 3)
    monkeypatch.setattr(reader, "read_manifest", read_folder)
    assert not holds(saved, "step-00000003", 3)


MANIFESTS: list[tuple[Any, str]] = [
    (dict(format=1, files={}), "lists no state.json"),
    ({}, "has format None, and this version of ringspan reads format 1"),
    (dict(format=2, files={}), "has format 2"),
    (dict(format=True, files={}), "has format True"),
    ([], "no JSON object"),
    (dict(format=1, files=[]), "lists no state.json"),
    (dict(format=1, files={"state.json": {}, "w.safetensors": {}}), "no file name with a size"),
]


@pytest.mark.parametrize(("manifest", "message"), MANIFESTS)
def test_an_empty_or_foreign_manifest_is_damage(saved: Path, manifest: Any, message: str) -> None:
    (saved / "step-00000003/manifest.json").write_text(json.dumps(manifest))
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and "step-00000003 is damaged: manifest.json" in problem and message in problem


@pytest.mark.parametrize("name", ["/dev/zero", "../step-00000002/state.json", "", ".", "a/b"])
def test_a_manifest_names_files_of_its_folder_only(saved: Path, name: str) -> None:
    entry = dict(size=10, sha256="0" * 64)
    change_json(saved / "step-00000003/manifest.json", lambda content: content["files"].update({name: entry}))
    assert newest(saved)[0] == "step-00000002"


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "weights-00000.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_special_files_do_not_hang_a_start(saved: Path, name: str, make: Callable[[Path], None]) -> None:
    (saved / "step-00000003" / name).unlink()
    make(saved / "step-00000003" / name)
    found, (problem,) = newest(saved)
    assert found == "step-00000002" and f"{name} cannot be read: not a regular file" in problem


def set_state(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("applied"), "step, applied, samples and tokens must be numbers"),
        (set_state("samples", -1), "must be numbers"),
        (set_state("tokens", "7"), "must be numbers"),
        (set_state("step", 2), "state.json is of step 2: the files are another checkpoint's"),
        (set_state("run_id", "../../../x"), "run_id='../../../x' is no id"),
        (set_state("random", {}), "random state"),
        (set_state("random", dict(torch="AAAA", python=[3, [1], None])), "random state"),
    ],
)
def test_a_forged_state_is_damage(saved: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    change_json(saved / "step-00000003/state.json", change)
    faults.seal(saved / "step-00000003")
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and message in problem


def test_ids_that_wandb_accepts_are_no_damage(saved: Path) -> None:
    for run_id in ("exp.1", "a" * 128, "long context"):
        change_json(saved / "step-00000003/state.json", set_state("run_id", run_id))
        faults.seal(saved / "step-00000003")
        assert newest(saved) == ("step-00000003", [])


def set_offsets(*offsets: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: next(iter(header.values())).update(data_offsets=list(offsets))


HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda header: [1], "no JSON object"),
    (lambda header: b"[" * 100_000, "nested too deep"),
    (lambda header: json.dumps(header).encode()[:-1] + b', "w0": 1, "w0": 2}', "twice"),
    (set_offsets("0", "8"), "needs dtype, shape and data_offsets"),
    (set_offsets(-8, 8), "needs dtype"),
    (set_offsets(0, 8), "not those of its shape"),
    (set_offsets(0), "needs dtype"),
    (lambda header: next(iter(header.values())).pop("dtype"), "needs dtype"),
    (lambda header: next(iter(header.values())).update(shape=[-40, -10]), "needs dtype"),
    (lambda header: next(iter(header.values())).update(dtype=["F32"]), "needs dtype"),
    (lambda header: header.pop(next(iter(header))), "follow a gap"),
    (lambda header: header.pop(list(header)[-1]), "bytes follow its last tensor"),
    (lambda header: header.update(copy=next(iter(header.values()))), "overlap"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_a_forged_header_is_damage(saved: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = saved / "step-00000003/weights-00000.safetensors"
    change_header(path, change)
    faults.seal(path.parent)
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and "weights-00000.safetensors is no safetensors file" in problem and message in problem


def test_a_tensor_in_two_files_is_damage(saved: Path) -> None:
    step = saved / "step-00000003"
    shutil.copy(step / "weights-00001.safetensors", step / "weights-00009.safetensors")
    faults.seal(step)
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and "is in weights-00001.safetensors and in weights-00009.safetensors" in problem


def test_missing_moments_are_damage(saved: Path) -> None:
    step = saved / "step-00000003"
    (step / "moments-00001.safetensors").unlink()
    faults.seal(step)
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and "are missing" in problem
    Reader(step)  # the weights alone can be read


def test_a_link_to_a_checkpoint_is_used_and_pruned(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "step-00000003", tmp_path / "elsewhere")
    (saved / "step-00000003").symlink_to(tmp_path / "elsewhere")
    assert newest(saved) == ("step-00000003", [])
    assert faults.run_threads(1, lambda rank: save_step(saved, 4, rank)) == [""]
    assert [path.name for path in saved.iterdir()] == ["step-00000004"]
    assert (tmp_path / "elsewhere" / "state.json").exists(), "its target stays"
