"""Checkpoints that do not depend on world size, ring or ZeRO stage, and that a kill cannot damage.

    <run>/checkpoints/step-00000120/
        weights-00003.safetensors     fp32 weights by parameter name, one file per rank that wrote
        moments-00003.safetensors     optimizer moments, <name>#exp_avg and so on
        state.json                    step, samples read, run id, random state, and the model's config
        manifest.json                 size and SHA-256 of every file

Each rank writes its share into step-N.tmp in a thread, overlapped with reading the next tensors, and flushes it to disk. Rank 0
then writes the manifest and renames the folder. The rename is the commit: a folder without .tmp is complete, and the newest
complete folder is the checkpoint. There is no pointer file. A start renames checkpoints that it does not continue, because they
are damaged or belong to another trajectory, to step-N.bad. Nothing is pickled. All ranks must see one file system.
"""

import base64
import hashlib
import json
import os
import random
import re
import shutil
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.checkpoint.safetensors import File, Writer
from ringspan.trainer.config.schema import Checkpoint as Options
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine

NAME = re.compile(r"step-(\d{8})$")
MAX_PENDING = 2**31  # bytes of tensors that wait for a rank's disk; a larger tensor waits alone


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0  # completed steps
    applied: int = 0  # completed steps that updated the weights; the others had non-finite gradients
    samples: int = 0  # number of the next sample
    tokens: int = 0
    run_id: str = ""


def save(
    folder: Path, engine: Engine, position: Position, config: dict[str, Any], distributed: DistributedContext, options: Options
) -> str:
    """Write the checkpoint of a step. All ranks call this together. Earlier checkpoints stay intact if it fails.

    Args:
        folder: folder of the run's checkpoints.
        engine: holds weights and moments.
        position: progress of the run; position.step names the checkpoint.
        config: the model's config, for state.json.
        distributed: this rank's place in the job.
        options: which checkpoints to keep.
    Returns:
        The problem, the same text on all ranks; "" on success.
    """
    final = folder / f"step-{position.step:08d}"
    tmp = final.with_name(final.name + ".tmp")
    problem = ""
    if distributed.rank == 0:
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
        except OSError as error:
            problem = _describe(error)
    problem = distributed.broadcast(problem)
    if problem:
        return problem
    share, problem = _write_share(tmp, engine, distributed)
    gathered = distributed.gather((problem, share))
    problem = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text)
    if distributed.rank == 0 and not problem:
        try:
            files = {name: entry for _, share in gathered for name, entry in share.items()}
            state = dict(vars(position), model=config, random=_random_state())
            files |= _write_json(tmp / "state.json", state)
            _write_json(tmp / "manifest.json", dict(format=1, files=files))
            _sync_folder(tmp)
            if final.exists():  # damaged, or of another trajectory
                _set_aside(final)
            os.rename(tmp, final)
            _sync_folder(folder)
            _prune(folder, options)
        except OSError as error:
            problem = _describe(error)
    problem = distributed.broadcast(problem)
    if problem and distributed.rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
    return problem


def _write_share(tmp: Path, engine: Engine, distributed: DistributedContext) -> tuple[dict[str, Any], str]:
    """Write the weights that this rank owns, with their moments; return its files and the problem."""
    owner = _assign_owners(engine, distributed.world)
    owned = [name for name in engine.names if owner[name] == distributed.rank]
    shapes = {name: (torch.float32, engine.shape(name)) for name in owned}
    moments = {f"{name}#{key}": shapes[name] for name in owned for key in engine.moments(name)}
    files: dict[str, Any] = {}
    writers: dict[str, Writer] = {}
    problem = ""
    try:
        for kind, entries in (("weights", shapes), ("moments", moments)):
            writers[kind] = Writer(tmp / f"{kind}-{distributed.rank:05d}.safetensors", entries, {})
    except OSError as error:
        problem = _describe(error)
    background = _BackgroundWriter()
    for name in engine.names:
        values = engine.read(name)  # a collective: a rank with a full disk still takes part
        if owner[name] != distributed.rank or problem:
            continue
        try:
            background.add(writers["weights"], values["weight"])
            for key in engine.moments(name):
                background.add(writers["moments"], values[key])
        except OSError as error:
            problem = _describe(error)
    try:
        background.close()
    except OSError as error:
        problem = problem or _describe(error)
    try:
        for kind, writer in writers.items():
            if problem:
                writer.abandon()
                continue
            writer.close()
            files[f"{kind}-{distributed.rank:05d}.safetensors"] = dict(size=writer.size, sha256=writer.digest)
    except OSError as error:
        problem = _describe(error)
    return files, problem


class _BackgroundWriter:
    """Hashes and writes tensors in order, in a thread: ranks wait for each other to read a tensor, but not for a slow disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: deque[tuple[int, Future[None]]] = deque()  # (bytes, write) of each tensor

    def add(self, writer: Writer, tensor: Tensor) -> None:
        """Enqueue a tensor; wait while MAX_PENDING bytes are pending. Raise the error of an earlier write."""
        while self._pending and (
            self._pending[0][1].done() or sum(size for size, _ in self._pending) + tensor.nbytes > MAX_PENDING
        ):
            self._pending.popleft()[1].result()
        self._pending.append((tensor.nbytes, self._thread.submit(writer.add, tensor.cpu())))

    def close(self) -> None:
        """Wait until all tensors are written, or raise the first error. The thread has ended on return."""
        try:
            for _, write in self._pending:
                write.result()
        finally:
            self._thread.shutdown(cancel_futures=True)


def _assign_owners(engine: Engine, world: int) -> dict[str, int]:
    """Assign weights to ranks, largest first, each to the rank with the smallest load."""
    load = [0] * world
    owner = {}
    for name in sorted(engine.names, key=lambda name: (-int(np.prod(engine.shape(name))), name)):
        owner[name] = min(range(world), key=lambda rank: load[rank])
        load[owner[name]] += int(np.prod(engine.shape(name)))
    return owner


class Reader:
    """Reads any part of any tensor of a checkpoint, without reading the rest.

    Args:
        folder: a folder step-N.
    Raises:
        OSError, ValueError: state.json or a tensor file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        self.files = [File(path) for path in sorted(folder.glob("*.safetensors"))]
        self.file_of = {name: file for file in self.files for name in file}

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

    def validate(self, shapes: Mapping[str, tuple[int, ...]], optimizer: str) -> None:
        """Raise a ValueError if this checkpoint is of another model or optimizer.

        Args:
            shapes: shape of each weight of the run's model.
            optimizer: the run's optim.kind.
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
        if self.position.applied and (("momentum_buffer" in moments) != (optimizer == "muon")):
            raise ValueError(
                f"{self.folder} was made with another optimizer than optim.kind={optimizer}: keep that one, or start anew"
            )

    def restore_random(self) -> None:
        """Restore the random state of torch and of Python."""
        state = self.state["random"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))


def find_newest(folder: Path, distributed: DistributedContext) -> tuple[Path | None, list[str]]:
    """Find the newest valid checkpoint. All ranks call this together and share the hashing.

    Returns:
        The checkpoint's folder, or None; and a line per newer checkpoint that is damaged.
    """
    for stale in folder.glob("step-*.tmp") if distributed.rank == 0 else []:
        shutil.rmtree(stale, ignore_errors=True)
    names = sorted((path.name for path in folder.glob("step-*") if NAME.search(path.name)), reverse=True)
    damaged: list[str] = []
    for name in distributed.broadcast(names):
        problems = verify(folder / name, distributed)
        if not problems:
            return folder / name, damaged
        damaged.append(f"{name} is damaged: {'; '.join(problems)}")
    return None, damaged


def set_aside(folder: Path, start: Path | None) -> list[str]:
    """Rename the checkpoints newer than the start to step-N.bad, so that pruning and the next start ignore them. Rank 0 only.

    Args:
        folder: folder of the run's checkpoints.
        start: the checkpoint that the run starts from; if it is not in `folder`, all checkpoints are renamed.
    Returns:
        The old names of the renamed checkpoints.
    """
    names = sorted(path.name for path in folder.glob("step-*") if NAME.search(path.name))
    newer = [name for name in names if start is None or start.parent != folder or name > start.name]
    for name in newer:
        _set_aside(folder / name)
    return newer


def _set_aside(path: Path) -> None:
    bad = path.with_name(path.name + ".bad")
    shutil.rmtree(bad, ignore_errors=True)
    os.rename(path, bad)


def verify(path: Path, distributed: DistributedContext) -> list[str]:
    """Return the problems of a checkpoint: files that are missing, truncated, changed or unreadable.

    All ranks call this together, and each hashes its share of the files.
    """
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        problems = [
            text
            for name in sorted(files)[distributed.rank :: distributed.world]
            if (text := _verify_file(path / name, files[name]))
        ]
    except OSError as error:
        problems = [_unreadable("manifest.json", error)]
    except (ValueError, KeyError, TypeError):
        problems = ["manifest.json is not readable"]
    return sorted({text for texts in distributed.gather(problems) for text in texts})


def _verify_file(path: Path, entry: dict[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size < entry["size"]:
            return f"{path.name} is cut short: {size} bytes of {entry['size']}"
        if size > entry["size"]:
            return f"{path.name} has grown"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return f"{path.name} has changed since it was written (its SHA-256 differs)"
    except OSError as error:
        return _unreadable(path.name, error)
    return ""


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read: {error.strerror or error}"


def _prune(folder: Path, options: Options) -> None:
    steps = sorted(int(match[1]) for path in folder.iterdir() if (match := NAME.search(path.name)))
    for step in steps[: -options.keep_last]:
        if not (options.keep_every and step % options.keep_every == 0):
            shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)


def _write_json(path: Path, content: Any) -> dict[str, Any]:
    data = json.dumps(content, indent=1).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: dict(size=len(data), sha256=hashlib.sha256(data).hexdigest())}


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_state() -> dict[str, Any]:
    """State of the global generators. The trainer draws nothing from them, but an extension might."""
    return dict(torch=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), python=random.getstate())


def _describe(error: OSError) -> str:
    return f"{error.strerror or error} ({Path(error.filename).name if error.filename else 'while writing'})"
