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
import contextlib
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from ringspan.trainer import files
from ringspan.trainer.checkpoint.reader import FORMAT, NAME, Position, verify
from ringspan.trainer.checkpoint.replicas import require_equal
from ringspan.trainer.checkpoint.share import describe, write_share
from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.config.schema import Checkpoint as Options
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine


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
    Raises:
        ReplicasDifferError: ranks hold different weights; nothing is written.
    """
    require_equal(engine, distributed)
    final = folder / f"step-{position.step:08d}"
    tmp = final.with_name(final.name + ".tmp")
    problem = ""
    if distributed.rank == 0:
        try:
            _remove_leftovers(folder)
            files.make_folder(tmp)
        except OSError as error:
            problem = describe(error)
    problem = distributed.broadcast(problem)
    if problem:
        return problem
    share, problem = write_share(tmp, engine, distributed, options.max_file_mib)
    gathered = distributed.gather([problem, share])
    problem = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text)
    if distributed.rank == 0 and not problem:
        try:
            listed = {name: entry for _, share in gathered for name, entry in share.items()}
            state = dict(vars(position), model=config, random=_random_state())
            listed |= _write_json(tmp / "state.json", state)
            _write_json(tmp / "manifest.json", dict(format=FORMAT, files=listed))
            files.sync_folder(tmp)
            if final.exists():  # damaged, or of another trajectory
                _set_aside(final)
            files.rename(tmp, final)
            files.sync_folder(folder)
            _prune(folder, options)
        except OSError as error:
            problem = describe(error)
    problem = distributed.broadcast(problem)
    if problem and distributed.rank == 0:
        _remove_leftovers(folder)
    return problem


class NoCheckpointError(ConfigError):
    """Checkpoints were saved, and none of them is whole."""

    exit_code = 3


def find_newest(folder: Path, distributed: DistributedContext) -> tuple[Path | None, list[str]]:
    """Find the newest valid checkpoint. All ranks call this together and share the hashing.

    Returns:
        The checkpoint's folder, or None; and a line per newer checkpoint that is damaged.
    """
    if distributed.rank == 0:
        _remove_leftovers(folder)
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
    if os.path.lexists(bad):
        files.discard(bad)
    files.rename(path, bad)


def _remove_leftovers(folder: Path) -> None:
    """Delete the folders of interrupted saves and prunes, as far as that is possible."""
    for stale in [*folder.glob("step-*.tmp"), *folder.glob("step-*.old")]:
        with contextlib.suppress(OSError):
            files.remove(stale)


def _prune(folder: Path, options: Options) -> None:
    steps = sorted(int(match[1]) for path in folder.iterdir() if (match := NAME.search(path.name)))
    for step in steps[: -options.keep_last]:
        if not (options.keep_every and step % options.keep_every == 0):
            with contextlib.suppress(OSError):  # the new checkpoint is complete; the next save tries again
                files.discard(folder / f"step-{step:08d}")


def _write_json(path: Path, content: Any) -> dict[str, Any]:
    data = json.dumps(content, indent=1, allow_nan=False).encode()
    with files.create(path) as file:
        files.write(file, path, data)
        files.sync(file, path)
    return {path.name: dict(size=len(data), sha256=hashlib.sha256(data).hexdigest())}


def _random_state() -> dict[str, Any]:
    """State of the global generators. The trainer draws nothing from them, but an extension might."""
    return dict(torch=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), python=random.getstate())
