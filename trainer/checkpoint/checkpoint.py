"""Checkpoints that know no world size, ring or ZeRO stage, and that no kill can damage.

    <run>/checkpoints/step-00000120/
        weights-00003.safetensors     fp32 weights by parameter name, as many files as ranks wrote
        moments-00003.safetensors     the optimizer's averages, <name>#exp_avg and so on
        state.json                    step, samples seen, run id, random state, and the model's config
        manifest.json                 every file with its size and SHA-256

Every rank writes its share into step-N.tmp, behind the reading of the next tensors, and flushes it to the disk; rank 0 then
writes the manifest and renames the folder. The rename is the commit: a folder without .tmp is whole, and the newest whole one
is the checkpoint. There is no pointer file that could point at something else. What a start does not go on from, because it is
damaged or of a trajectory that was left, is renamed to step-N.bad. Nothing is pickled. All ranks have to see one file system.
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
AHEAD = 2**31  # bytes of tensors that may wait for a rank's disk; one that is larger waits alone


@dataclass
class Position:
    """Where a run stands, apart from its weights."""

    step: int = 0  # done
    applied: int = 0  # of these, those that moved the weights
    samples: int = 0  # the next sample's number
    tokens: int = 0
    run_id: str = ""


def save(
    folder: Path, engine: Engine, position: Position, config: dict[str, Any], ranks: DistributedContext, options: Options
) -> str:
    """Writes step-N; returns what went wrong, on all ranks alike, or nothing. What was there before stays whole."""
    final = folder / f"step-{position.step:08d}"
    tmp = final.with_name(final.name + ".tmp")
    problem = ""
    if ranks.rank == 0:
        try:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
        except OSError as error:
            problem = _say(error)
    problem = ranks.first(problem)
    if problem:
        return problem
    share, problem = _write_share(tmp, engine, ranks)
    gathered = ranks.gather((problem, share))
    problem = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text)
    if ranks.rank == 0 and not problem:
        try:
            files = {name: entry for _, part in gathered for name, entry in part.items()}
            state = dict(vars(position), model=config, random=_random_state())
            files |= _write_json(tmp / "state.json", state)
            _write_json(tmp / "manifest.json", dict(format=1, files=files))
            _sync_folder(tmp)
            if final.exists():  # of another trajectory, or damaged: what a run holds now is what counts
                _set_aside(final)
            os.rename(tmp, final)
            _sync_folder(folder)
            _prune(folder, options)
        except OSError as error:
            problem = _say(error)
    problem = ranks.first(problem)
    if problem and ranks.rank == 0:
        shutil.rmtree(tmp, ignore_errors=True)
    return problem


def _write_share(tmp: Path, engine: Engine, ranks: DistributedContext) -> tuple[dict[str, Any], str]:
    """This rank's tensors: those of every weight that fall to it, so that all write about as much, and at the same time."""
    owner = _owners(engine, ranks.world)
    mine = [name for name in engine.names if owner[name] == ranks.rank]
    shapes = {name: (torch.float32, engine.shape(name)) for name in mine}
    moments = {f"{name}#{key}": shapes[name] for name in mine for key in engine.moments(name)}
    files: dict[str, Any] = {}
    writers: dict[str, Writer] = {}
    problem = ""
    try:
        for kind, entries in (("weights", shapes), ("moments", moments)):
            writers[kind] = Writer(tmp / f"{kind}-{ranks.rank:05d}.safetensors", entries, {})
    except OSError as error:
        problem = _say(error)
    behind = _Behind()
    for name in engine.names:
        values = engine.read(name)  # a collective: a rank whose disk is full still takes part
        if owner[name] != ranks.rank or problem:
            continue
        try:
            behind.add(writers["weights"], values["weight"])
            for key in engine.moments(name):
                behind.add(writers["moments"], values[key])
        except OSError as error:
            problem = _say(error)
    try:
        behind.close()
    except OSError as error:
        problem = problem or _say(error)
    try:
        for kind, writer in writers.items():
            if problem:
                writer.abandon()
                continue
            writer.close()
            files[f"{kind}-{ranks.rank:05d}.safetensors"] = dict(size=writer.size, sha256=writer.digest)
    except OSError as error:
        problem = _say(error)
    return files, problem


class _Behind:
    """Hashes and writes in a thread, in the order given: all ranks wait for a tensor's reading, and none for another's disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._given: deque[tuple[int, Future[None]]] = deque()  # bytes of each tensor, and its writing

    def add(self, writer: Writer, tensor: Tensor) -> None:
        """Waits for room; raises what went wrong with an earlier tensor."""
        while self._given and (self._given[0][1].done() or sum(size for size, _ in self._given) + tensor.nbytes > AHEAD):
            self._given.popleft()[1].result()
        self._given.append((tensor.nbytes, self._thread.submit(writer.add, tensor.cpu())))

    def close(self) -> None:
        """All is in the files when this returns. If not, it raises why, and nobody writes any more."""
        try:
            for _, writing in self._given:
                writing.result()
        finally:
            self._thread.shutdown(cancel_futures=True)


def _owners(engine: Engine, world: int) -> dict[str, int]:
    """Largest first, always to the rank that has least."""
    load = [0] * world
    owner = {}
    for name in sorted(engine.names, key=lambda name: (-int(np.prod(engine.shape(name))), name)):
        owner[name] = min(range(world), key=lambda rank: load[rank])
        load[owner[name]] += int(np.prod(engine.shape(name)))
    return owner


class Reader:
    """A checkpoint's tensors, any part of any, without reading the rest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        self.files = [File(path) for path in sorted(folder.glob("*.safetensors"))]
        self.where = {name: file for file in self.files for name in file}

    @property
    def position(self) -> Position:
        return Position(**{name: self.state[name] for name in Position.__dataclass_fields__})

    @property
    def names(self) -> list[str]:
        return [name for name in self.where if "#" not in name]

    def weight(self, name: str) -> Tensor:
        return self.where[name][name]

    def values(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """What the engine asks for: part of a weight or of a moment, flat."""
        full = name if key == "weight" else f"{name}#{key}"
        return self.where[full][full].reshape(-1)[start:stop]

    def check(self, shapes: Mapping[str, tuple[int, ...]], optimizer: str) -> None:
        """That this is a checkpoint of such a model and optimizer."""
        found = {name: self.where[name].shape(name) for name in self.names}
        for name, shape in shapes.items():
            if name not in found:
                raise ValueError(f"{self.folder} has no weight {name}: it is of another model; give the run another name")
            if found[name] != tuple(shape):
                raise ValueError(
                    f"{self.folder}: {name} is {found[name]} there and {tuple(shape)} in this run's model: "
                    "give the model as it was, or the run another name"
                )
        if extra := set(found) - set(shapes):
            raise ValueError(f"{self.folder} has a weight {min(extra)}, which this run's model has not")
        moments = {name.partition("#")[2] for name in self.where} - {""}
        if self.position.applied and (("momentum_buffer" in moments) != (optimizer == "muon")):
            raise ValueError(
                f"{self.folder} was made with another optimizer than optim.kind={optimizer}: keep it, or start afresh"
            )

    def restore_random(self) -> None:
        state = self.state["random"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))


def newest(folder: Path, ranks: DistributedContext) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with the newer ones. The ranks share the hashing."""
    for stale in folder.glob("step-*.tmp") if ranks.rank == 0 else []:
        shutil.rmtree(stale, ignore_errors=True)
    names = sorted((path.name for path in folder.glob("step-*") if NAME.search(path.name)), reverse=True)
    damaged: list[str] = []
    for name in ranks.first(names):
        problems = verify(folder / name, ranks)
        if not problems:
            return folder / name, damaged
        damaged.append(f"{name} is damaged: {'; '.join(problems)}")
    return None, damaged


def set_aside(folder: Path, start: Path | None) -> list[str]:
    """On rank 0: renames the checkpoints that are newer than the start, all of them if it is none of these; their names.

    Otherwise they would be counted by the pruning, and be the newest again after the next kill.
    """
    names = sorted(path.name for path in folder.glob("step-*") if NAME.search(path.name))
    newer = [name for name in names if start is None or start.parent != folder or name > start.name]
    for name in newer:
        _set_aside(folder / name)
    return newer


def _set_aside(path: Path) -> None:
    away = path.with_name(path.name + ".bad")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(path, away)


def verify(path: Path, ranks: DistributedContext) -> list[str]:
    """What is wrong with a checkpoint: each file that is missing, cut short, changed or cannot be read."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        mine = [text for name in sorted(files)[ranks.rank :: ranks.world] if (text := _verify_file(path / name, files[name]))]
    except OSError as error:
        mine = [_unread("manifest.json", error)]
    except (ValueError, KeyError, TypeError):
        mine = ["manifest.json is not readable"]
    return sorted({text for part in ranks.gather(mine) for text in part})


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
        return _unread(path.name, error)
    return ""


def _unread(name: str, error: OSError) -> str:
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
    """Nothing in a run draws from these, but an extension might."""
    return dict(torch=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), python=random.getstate())


def _say(error: OSError) -> str:
    return f"{error.strerror or error} ({Path(error.filename).name if error.filename else 'while writing'})"
