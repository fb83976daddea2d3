"""The folder of a run, the same for all ranks: what was asked for, with which versions, on what.

The same command goes on where it stopped: without a `name`, the folder is called after the model, the length and a hash of
what makes the run what it is (not of how it is sharded, tracked or saved). A finished run is left alone; the next gets -2.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from .compose import Composed
from .config import Config

ROOT = Path(__file__).resolve().parent.parent
FINISHED = "finished.json"
IDENTITY = ("steps", "seed", "init_from", "model", "rope", "tokenizer", "data", "optim", "schedule")


def choose(config: Config) -> Path:
    """On rank 0; the others are told."""
    runs = Path(config.runs).expanduser().resolve()
    if config.name:
        return runs / config.name
    whole = asdict(config)
    for key in ("micro_batch", "prefetch", "cache"):
        whole["data"].pop(key, None)
    text = json.dumps([whole[key] for key in IDENTITY], sort_keys=True)
    name = f"{config.model.name}-{config.data.length}-{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"
    number = 1
    while (runs / _numbered(name, number) / FINISHED).exists():
        number += 1
    return runs / _numbered(name, number)


def record(folder: Path, composed: Composed, world: int, device: str) -> None:
    """Rank 0 writes it before anything else happens; a resumed run adds a line to starts.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(composed.yaml)
    start = dict(
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
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
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    changes = _git("diff", "HEAD")
    if changes:
        (folder / "changes.patch").write_text(changes + "\n")
    return dict(commit=commit, changed="changes.patch" if changes else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
