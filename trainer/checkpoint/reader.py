"""Reads and verifies a checkpoint. Only files that its manifest lists are read, and only tensors of these files exist.

    manifest.json   {"format": 1, "files": {NAME: {"size": BYTES, "sha256": HEX}}}

A checkpoint that a kill, a bad disk or another program left incomplete is *damaged*: its problems are one line each, and a
start takes the one before. A checkpoint from elsewhere may hold anything, so sizes, names and types are checked before use.
"""

import base64
import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.trainer import files
from ringspan.trainer.checkpoint.safetensors import File
from ringspan.trainer.distributed import DistributedContext

NAME = re.compile(r"step-(\d{8})$")
FORMAT = 1
MOMENTS = ({"exp_avg", "exp_avg_sq"}, {"momentum_buffer"})  # of a weight: AdamW's or Muon's
_FILE = re.compile(r"\w[\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0  # completed steps
    applied: int = 0  # completed steps that updated the weights; the others had non-finite gradients
    samples: int = 0  # number of the next sample
    tokens: int = 0
    run_id: str = ""


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file of a checkpoint.

    Raises:
        OSError, ValueError: manifest.json is missing, damaged, or of another format.
    """
    manifest = files.read_json(folder / "manifest.json")
    version, listed = manifest.get("format"), manifest.get("files")
    if version != FORMAT or isinstance(version, bool):
        raise ValueError(f"manifest.json has format {version!r:.20}, and this version of ringspan reads format {FORMAT}")
    if not isinstance(listed, dict) or "state.json" not in listed or not any(map(_is_tensors, listed)):
        raise ValueError("manifest.json is not readable: it lists no state.json, or no file of tensors")
    for name, entry in listed.items():
        size, digest = (entry.get(key) for key in ("size", "sha256")) if isinstance(entry, dict) else (None, None)
        is_valid = type(size) is int and size >= 0 and isinstance(digest, str) and _SHA256.fullmatch(digest)
        if not _FILE.fullmatch(name) or not is_valid:
            raise ValueError(f"manifest.json is not readable: its entry {name!r:.40} is no file name with a size and a SHA-256")
    return listed


def _is_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


class Reader:
    """Reads any part of any tensor of a checkpoint, without reading the rest.

    Args:
        folder: a folder step-N.
    Raises:
        OSError, ValueError: manifest.json, state.json or a tensor file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = read_manifest(folder)
        self.state = files.read_json(folder / "state.json")
        self.files = [File(folder / name) for name in sorted(filter(_is_tensors, listed))]
        self.file_of: dict[str, File] = {}
        for file in self.files:
            for name in file:
                if name in self.file_of:
                    raise ValueError(f"{name} is in {self.file_of[name].path.name} and in {file.path.name}")
                self.file_of[name] = file

    @property
    def position(self) -> Position:
        """Progress of the run at this checkpoint."""
        return Position(**{name: self.state[name] for name in Position.__dataclass_fields__})

    @property
    def names(self) -> list[str]:
        """Names of the weights, without moments."""
        return [name for name in self.file_of if "#" not in name]

    def weight(self, name: str) -> Tensor:
        """Return a weight in fp32, mapped from the file."""
        return self.file_of[name][name]

    def values(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Return elements start … stop − 1 of a flattened weight (key "weight") or moment (such as "exp_avg")."""
        full = name if key == "weight" else f"{name}#{key}"
        return self.file_of[full][full].reshape(-1)[start:stop]

    def validate_content(self) -> None:
        """Raise a ValueError if a resume would fail: in state.json, or in the moments of a weight."""
        numbers = [self.state.get(name) for name in ("step", "applied", "samples", "tokens")]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("state.json is not readable: step, applied, samples and tokens must be numbers from 0")
        step, run_id, number = self.state["step"], self.state.get("run_id"), NAME.search(self.folder.name)
        if number and int(number[1]) != step:
            raise ValueError(f"state.json is of step {step}: the files are another checkpoint's")
        # what wandb takes as an id
        if not isinstance(run_id, str) or not re.fullmatch(r"[^/\\#?%:\x00-\x1f\x7f]{0,128}", run_id):
            raise ValueError(f"state.json is not readable: run_id={run_id!r:.80} is no id")
        self._random_states()
        moments: dict[str, set[str]] = {name: set() for name in self.names}
        for full, file in self.file_of.items():
            name, mark, key = full.partition("#")
            if mark and (name not in moments or file.shape(full) != self.file_of[name].shape(name)):
                raise ValueError(f"{file.path.name}: {full} has no weight of its shape")
            if mark:
                moments[name].add(key)
        for name, keys in moments.items():
            if keys not in MOMENTS:
                raise ValueError(f"the moments of {name} are {', '.join(sorted(keys)) or 'missing'}")

    def validate(self, shapes: Mapping[str, tuple[int, ...]], optimizer: str) -> None:
        """Raise a ValueError if this checkpoint is of another model or optimizer.

        Args:
            shapes: shape of each weight of the run's model.
            optimizer: the run's optim.kind; "" if the moments are not used.
        """
        saved = {name: self.file_of[name].shape(name) for name in self.names}
        for name, shape in shapes.items():
            if name not in saved:
                raise ValueError(f"{self.folder} has no weight {name}: it is of another model; give the run another name")
            if saved[name] != tuple(shape):
                raise ValueError(
                    f"{self.folder}: {name} has shape {saved[name]}, but {tuple(shape)} in this run's model: "
                    "use the model of the checkpoint, or give the run another name"
                )
        if extra := set(saved) - set(shapes):
            raise ValueError(
                f"{self.folder} has a weight {min(extra)}, which this run's model lacks: "
                "use the model of the checkpoint, or give the run another name"
            )
        moments = {name.partition("#")[2] for name in self.file_of} - {""}
        if optimizer and self.position.applied and (("momentum_buffer" in moments) != (optimizer == "muon")):
            raise ValueError(
                f"{self.folder} was made with another optimizer than optim.kind={optimizer}: keep that one, or start anew"
            )

    def restore_random(self) -> None:
        """Restore the random state of torch and of Python."""
        of_torch, of_python = self._random_states()
        torch.set_rng_state(of_torch)
        random.setstate(of_python)

    def _random_states(self) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the random states of torch and of Python, each of which a generator has accepted."""
        try:
            state = self.state["random"]
            of_torch = torch.frombuffer(bytearray(base64.b64decode(state["torch"], validate=True)), dtype=torch.uint8)
            torch.Generator().set_state(of_torch)
            version, internal, gauss = state["python"]
            of_python = (version, tuple(internal), gauss)
            random.Random().setstate(of_python)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
            raise ValueError("state.json is not readable: its random state is none of torch and Python") from None
        return of_torch, of_python


def verify(path: Path, distributed: DistributedContext) -> list[str]:
    """Return the problems of a checkpoint: files that are missing, truncated, changed or unreadable.

    All ranks call this together, and each hashes its share of the files.
    """
    problems = []
    try:
        listed = read_manifest(path)
        share = sorted(listed)[distributed.rank :: distributed.world]
        problems = [text for name in share if (text := _verify_file(path / name, listed[name]))]
    except OSError as error:
        problems = [_unreadable("manifest.json", error)]
    except ValueError as error:
        problems = [str(error)]
    found = sorted({text for texts in distributed.gather(problems) for text in texts})
    if not found and distributed.rank == 0:
        try:
            Reader(path).validate_content()
        except (OSError, ValueError) as error:  # its hash is right, but its content is not
            found = [str(error)]
    return list(distributed.broadcast(found))


def _verify_file(path: Path, entry: dict[str, Any]) -> str:
    try:
        with files.open_regular(path) as file:
            size = path.stat().st_size
            if size < entry["size"]:
                return f"{path.name} is cut short: {size} bytes of {entry['size']}"
            if size > entry["size"]:
                return f"{path.name} has grown"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return f"{path.name} has changed since it was written (its SHA-256 differs)"
    except OSError as error:
        return _unreadable(path.name, error)
    return ""


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read: {error.strerror or error}"
