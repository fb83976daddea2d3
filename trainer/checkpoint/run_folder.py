"""The folder of a run, shared by all ranks: config, versions, metrics, checkpoints.

The same command continues where it stopped. Without a `name`, the folder is named after the model, the length and a hash of the
options that define the run; options of sharding, tracking and saving do not count. A finished run is left alone, and the next
run with the same options gets the suffix -2.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from ringspan import ROOT
from ringspan.trainer import files
from ringspan.trainer.config import foreign
from ringspan.trainer.config.compose import Composed, ConfigError
from ringspan.trainer.config.help import RETIRED
from ringspan.trainer.config.schema import Config
from ringspan.trainer.monitoring import records

FINISHED = "finished.json"
IDENTITY = ("steps", "seed", "init_from", "model", "rope", "tokenizer", "data", "optim", "schedule")
NOT_IDENTITY = ("data.micro_batch", "data.prefetch", "data.cache", "data.verify")
_entered: list[Path] = []  # folders that this process has locked


def choose(config: Config, number: int = 0) -> Path:
    """Return the folder of a run.

    Args:
        config: the run's config.
        number: for a run without a name, which of the runs with the same options; 0: the first unfinished one.
    """
    runs = Path(config.runs).expanduser().resolve()
    if config.name:
        return runs / config.name
    name = f"{config.model.name}-{config.data.length}-{hashlib.blake2b(identity(config).encode(), digest_size=3).hexdigest()}"
    if not number:
        number = next(n for n in itertools.count(1) if not is_finished(runs / _numbered(name, n)))
    return runs / _numbered(name, number)


def identity(config: Config) -> str:
    """Return a text that is equal for runs with the same batches and the same expected losses, for any number of ranks."""
    options = asdict(config)
    for key in NOT_IDENTITY:
        options["data"].pop(key.removeprefix("data."), None)
    return json.dumps([options[key] for key in IDENTITY], sort_keys=True)


def config_of(folder: Path) -> Config:
    """Return the config in a run's folder; raise a ValueError if this version cannot read it."""
    path = folder / "config.yaml"
    tree = foreign.read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: not a config of this version: it has no options")
    for key in RETIRED:  # none of them defines the run
        group, _, name = key.partition(".")
        if isinstance(options := tree.get(group), dict):
            options.pop(name, None)
    config: Config = foreign.to_schema(Config, tree, str(path))
    return config


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl or starts.jsonl; raise a ValueError at a truncated one."""
    for number, line in enumerate(records.read(path), 1):
        if line is None:
            raise ValueError(f"{path}: line {number} is cut short or damaged: resume the run, or delete that line")
        yield line


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder has finished; a finished.json that cannot be read counts as absent."""
    return finished_steps(folder) is not None


def finished_steps(folder: Path) -> int | None:
    """Return the number of steps in finished.json, None if it is absent or damaged."""
    try:
        steps = files.read_json(folder / FINISHED).get("steps")
    except (OSError, ValueError):
        return None
    return steps if type(steps) is int else None


def enter(composed: Composed) -> tuple[Path, IO[str]]:
    """Create and lock the run's folder, on rank 0 before anything else.

    Returns:
        The folder, and the lock file: the lock is held while it is open.
    Raises:
        ConfigError: another process trains in the folder, it cannot be written, or it holds a finished run with other options.
    """
    config = composed.config
    try:
        folder = choose(config)
        folder.mkdir(parents=True, exist_ok=True)
        lock = io.TextIOWrapper(io.BufferedRandom(files.open_append(folder / "lock")), errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another process trains in this folder ({lock.read().strip() or 'unknown process'}); "
                "wait for it, end it, or give this run a name="
            ) from None
        except OSError as error:
            print(
                f"{folder}: this file system has no locks ({error.strerror}), so a second run in this folder is not detected",
                flush=True,
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
        if os.path.lexists(folder / FINISHED) and not is_finished(folder):
            bad = records.set_aside(folder / FINISHED)
            print(f"{folder / FINISHED} is damaged, so the run counts as not finished; it is renamed to {bad.name}", flush=True)
        _entered.append(folder)
        _validate_options(folder, config)
        _report_repeat(folder, config)
    except OSError as error:
        raise ConfigError(f"runs={config.runs}: the run's folder cannot be written: {error}") from None
    return folder, lock


def discard_unused() -> None:
    """Remove the folder that this process has locked if its run has never started: nothing is in it but the lock and ranks/."""
    for folder in _entered:
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} <= {"lock", "ranks"}:
                shutil.rmtree(folder)


def enter_on_all_ranks(composed: Composed, distributed: Any) -> tuple[Path, IO[str] | None]:
    """Enter the run's folder on rank 0; all ranks get its path, or the same error.

    Args:
        composed: the config.
        distributed: the ranks' DistributedContext.
    Returns:
        The folder, and the lock file on rank 0.
    Raises:
        ConfigError: as `enter`, on all ranks.
    """
    folder, lock, problem = None, None, ""
    if distributed.rank == 0:
        try:
            folder, lock = enter(composed)
        except ConfigError as error:
            problem = str(error)
    path, problem = distributed.broadcast((str(folder), problem))
    if problem:
        raise ConfigError(problem)
    return Path(path), lock


def _report_repeat(folder: Path, config: Config) -> None:
    """Print that a finished run without a name starts again in a new folder."""
    first = choose(config, number=1)
    if folder != first and not (folder / "config.yaml").exists():
        print(
            f"{first.name} is finished; the same run starts again in {folder.name} (steps=, seed= or any option makes another)",
            flush=True,
        )


def _validate_options(folder: Path, config: Config) -> None:
    """Report that a named run continues with other options; raise a ConfigError if that run is finished."""
    if config.checkpoint.resume == "none" or not (folder / "config.yaml").exists():
        return
    changed = _changed(folder, config)
    text = ", ".join([*changed.values()][:5]) + ", …" * (len(changed) > 5)
    steps = finished_steps(folder)
    finished = steps is not None and config.steps <= steps
    if changed and not finished and [*changed] != ["steps"] and any((folder / "checkpoints").glob("step-*[0-9]")):
        print(f"name={config.name}: continues with other options: {text}", flush=True)
    if changed and finished:
        raise ConfigError(
            f"name={config.name}: that run is finished, and had other options: {text}; "
            "give another name, more steps, or checkpoint.resume=none"
        )


def _changed(folder: Path, config: Config) -> dict[str, str]:
    """Options that define the run and differ from its folder; an option that the folder lacks had its default."""
    try:
        old, new = _flat(asdict(config_of(folder))), _flat(asdict(config))
    except ValueError as error:  # of a version with options that this one lacks
        return {"": str(error)}
    keys = [key for key in sorted(old | new) if key.partition(".")[0] in IDENTITY and key not in NOT_IDENTITY]
    return {key: f"{key}={new.get(key)} (was {old.get(key)})" for key in keys if old.get(key) != new.get(key)}


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: value for name, item in node.items() for key, value in _flat(item, f"{prefix}.{name}".lstrip(".")).items()}


def record(
    folder: Path, composed: Composed, world: int, device: str, step: int, plan: str, changed: dict[str, str] | None = None
) -> None:
    """Record a start, after all validation: write config.yaml, and append overrides, ranks and versions to starts.jsonl.

    Args:
        folder: the run's folder.
        composed: config and overrides.
        world: number of ranks.
        device: name of the device.
        step: step of the checkpoint that the run starts from; 0 without one.
        plan: the memory plan.
        changed: options that differ from the checkpoint's and that checkpoint.changed accepts.
    """
    if note := records.rewrite(folder / "starts.jsonl", lambda line: True):
        print(note, flush=True)
    if step < composed.config.steps:  # the run trains, so it is not finished
        (folder / FINISHED).unlink(missing_ok=True)
    files.replace(folder / "config.yaml", composed.yaml.encode())
    start = dict(
        time=datetime.now().astimezone().isoformat(" ", "seconds"),  # with the time zone, for readers elsewhere
        overrides=composed.overrides,
        ranks=world,
        memory=plan,
        device=device,
        host=platform.node(),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        versions=versions(),
        git=git_state(folder),
        **(dict(changed=changed) if changed else {}),
    )
    records.append(folder / "starts.jsonl", start)


def finish(folder: Path, report: dict[str, Any]) -> str:
    """Mark a run as finished, with its report. Return a line for the console if the file cannot be written, else ""."""
    try:
        files.replace(folder / FINISHED, json.dumps(records.strict(report), indent=1, allow_nan=False).encode())
    except OSError as error:
        return (
            f"{folder / FINISHED}: {error.strerror or error}; the run is not marked as finished, so that the same command "
            "continues it"
        )
    return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a run uses."""
    result = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "deepspeed", "hydra-core", "numpy", "wandb", "ringspan"):
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def git_state(folder: Path) -> dict[str, str]:
    """Return the commit, and write uncommitted changes to changes.patch in the run's folder."""
    commit = _git("rev-parse", "HEAD").decode().strip()
    if not commit:
        return {}
    changes = _git("diff", "--binary", "--no-color", "--no-ext-diff", "HEAD")
    if changes:
        files.replace(folder / "changes.patch", changes)
    return dict(commit=commit, changed="changes.patch" if changes else "")


def _git(*arguments: str) -> bytes:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return result.stdout if result.returncode == 0 else b""


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
