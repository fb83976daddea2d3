"""The folder of a run, the same for all ranks: what was asked for, with which versions, on what.

The same command goes on where it stopped: without a `name`, the folder is called after the model, the length and a hash of
what makes the run what it is (not of how it is sharded, tracked or saved). A finished run is left alone; the next gets -2.
"""

import fcntl
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ringspan import ROOT
from ringspan.trainer.config.compose import Composed, ConfigError
from ringspan.trainer.config.schema import Config

FINISHED = "finished.json"
IDENTITY = ("steps", "seed", "init_from", "model", "rope", "tokenizer", "data", "optim", "schedule")
NOT_IDENTITY = ("data.micro_batch", "data.prefetch", "data.cache")


def choose(config: Config, number: int = 0) -> Path:
    """The run's folder; the first of that name which is not finished, if not told the `number`."""
    runs = Path(config.runs).expanduser().resolve()
    if config.name:
        return runs / config.name
    name = f"{config.model.name}-{config.data.length}-{hashlib.blake2b(identity(config).encode(), digest_size=3).hexdigest()}"
    if not number:
        number = next(n for n in itertools.count(1) if not (runs / _numbered(name, n) / FINISHED).exists())
    return runs / _numbered(name, number)


def identity(config: Config) -> str:
    """Equal for runs that see the same batches and should have the same losses, however they are split."""
    whole = asdict(config)
    for key in NOT_IDENTITY:
        whole["data"].pop(key.removeprefix("data."), None)
    return json.dumps([whole[key] for key in IDENTITY], sort_keys=True)


def config_of(folder: Path) -> Config:
    """What was asked for in a run's folder."""
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(folder / "config.yaml")))
    except (OmegaConfBaseException, YAMLError) as error:
        said = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder / 'config.yaml'}: not a config of this version: {said}") from None
    assert isinstance(config, Config)
    return config


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of metrics.jsonl or starts.jsonl."""
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError:
            raise ValueError(f"{path}: line {number} is cut short: let the run go on, or delete that line") from None


def enter(composed: Composed) -> tuple[Path, IO[str]]:
    """On rank 0, before anything else happens: the run's folder, and the lock that is held while the file is open."""
    config = composed.config
    try:
        folder = choose(config)
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another process trains in this folder ({lock.read().strip() or 'nobody knows which'}); "
                "wait for it, end it, or give this run a name="
            ) from None
        except OSError as error:
            print(
                f"{folder}: this file system has no locks ({error.strerror}), so nobody looks for a second run here", flush=True
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
        _check_options(folder, config)
        _say_if_again(folder, config)
    except OSError as error:
        raise ConfigError(f"runs={config.runs}: the run's folder cannot be written: {error}") from None
    return folder, lock


def _say_if_again(folder: Path, config: Config) -> None:
    before = choose(config, number=1)
    if folder != before and not (folder / "config.yaml").exists():
        print(
            f"{before.name} is finished; the same starts again beside it (steps=, seed= or any option makes another)",
            flush=True,
        )


def _check_options(folder: Path, config: Config) -> None:
    """A named run that goes on with other options says so; one that is over would do nothing, which is not what was meant."""
    if config.checkpoint.resume == "none" or not (folder / "config.yaml").exists():
        return
    changed = _changed(folder, config)
    told = ", ".join([*changed.values()][:5]) + ", …" * (len(changed) > 5)
    over = (folder / FINISHED).exists() and config.steps <= json.loads((folder / FINISHED).read_text())["steps"]
    if changed and not over and [*changed] != ["steps"] and any((folder / "checkpoints").glob("step-*[0-9]")):
        print(f"name={config.name}: goes on with other options: {told}", flush=True)
    if changed and over:
        raise ConfigError(
            f"name={config.name}: that run is finished, and had other options: {told}; "
            "give another name, more steps, or checkpoint.resume=none"
        )


def _changed(folder: Path, config: Config) -> dict[str, str]:
    """Options that make the run what it is and are not as its folder has them: what it has not got, it had as by default."""
    try:
        old, new = _flat(asdict(config_of(folder))), _flat(asdict(config))
    except ValueError as error:  # of a version with options that are gone
        return {"": str(error)}
    keys = [key for key in sorted(old | new) if key.partition(".")[0] in IDENTITY and key not in NOT_IDENTITY]
    return {key: f"{key}={new.get(key)} (was {old.get(key)})" for key in keys if old.get(key) != new.get(key)}


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: value for name, part in node.items() for key, value in _flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def record(folder: Path, composed: Composed, world: int, device: str, step: int) -> None:
    """What was asked for, with what, once nothing refuses it any more; a resumed run adds a line to starts.jsonl."""
    if step < composed.config.steps:  # it trains on, or anew, so it is not finished until it says so again
        (folder / FINISHED).unlink(missing_ok=True)
    part = folder / "config.yaml.part"
    part.write_text(composed.yaml)
    os.replace(part, folder / "config.yaml")  # a full disk leaves the one before
    start = dict(
        time=datetime.now().astimezone().isoformat(" ", "seconds"),  # with its zone: results are read elsewhere
        overrides=composed.overrides,
        ranks=world,
        device=device,
        host=platform.node(),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        versions=versions(),
        git=git_state(folder),
    )
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")


def finish(folder: Path, report: dict[str, Any]) -> None:
    (folder / FINISHED).write_text(json.dumps(report, indent=1))


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "deepspeed", "hydra-core", "numpy", "wandb", "ringspan"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, str]:
    """The commit, and what differed from it, as a patch beside the config."""
    commit = _git("rev-parse", "HEAD").decode().strip()
    if not commit:
        return {}
    changes = _git("diff", "--binary", "--no-color", "--no-ext-diff", "HEAD")
    if changes:
        (folder / "changes.patch").write_bytes(changes)
    return dict(commit=commit, changed="changes.patch" if changes else "")


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
