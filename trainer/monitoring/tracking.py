"""Where a run's numbers go: one line on the console, all of them to metrics.jsonl, and to wandb and TensorBoard if asked.

The JSONL is the source of truth; it is cut back to the checkpoint when a run resumes, so no step stands in it twice. wandb is
imported on rank 0 alone, and only if asked for; without a network it gives up after `init_timeout` and goes on offline.
"""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringspan.trainer.config.schema import Config


class Tracker:
    """On rank 0; elsewhere every call does nothing."""

    def __init__(self, config: Config, folder: Path, active: bool, run_id: str = "", step: int = 0) -> None:
        self.config, self.folder, self.active = config, folder, active
        self.run_id = run_id
        self.wandb: Any = None
        self.board: Any = None
        self.clock = Clock(config.steps, step)
        if not active:
            return
        path = folder / "metrics.jsonl"
        _cut(path, step, config.steps)
        self.file = path.open("ab", buffering=0)
        self.unwritten = b""  # where a disk was full
        if config.tracking.wandb != "disabled":
            self._start_wandb(step)
        if config.tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
        if not self.active:
            return
        line = {"kind": kind, "step": step, "time": round(time.time(), 3)} | {k: _plain(v) for k, v in values.items()}
        self._write(json.dumps(line, allow_nan=False).encode() + b"\n")
        named = {f"{kind}/{key}": value for key, value in _scalars(values)}
        if self.wandb is not None:
            self.wandb.log(named, step=step)
        if self.board is not None:
            for key, value in named.items():
                self.board.add_scalar(key, value, step)

    def curve(self, step: int, title: str, labels: list[str], means: list[float]) -> None:
        """A whole table at one step, such as loss by position."""
        if not self.active:
            return
        self.log(step, {"title": title, "bins": labels, "means": means}, kind="table")
        if self.wandb is not None:
            import wandb

            table = wandb.Table(columns=["bin", "mean"], data=[list(pair) for pair in zip(labels, means, strict=True)])
            self.wandb.log({title: wandb.plot.bar(table, "bin", "mean", title=title)}, step=step)

    def say(self, text: str) -> None:
        if self.active:
            with contextlib.suppress(OSError):  # a terminal that is gone is no reason to end
                print(text, flush=True)

    def _write(self, line: bytes) -> None:
        """A full disk is no reason to end: lines wait until there is room."""
        told = bool(self.unwritten)
        self.unwritten += line
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if not told:
                self.say(f"{self.folder / 'metrics.jsonl'}: {error.strerror}; its lines wait until they can be written")

    def close(self, failed: bool = False) -> None:
        if not self.active:
            return
        self._write(b"")
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(failed))

    def _start_wandb(self, step: int) -> None:
        import wandb

        tracking = self.config.tracking
        common: dict[str, Any] = dict(
            project=tracking.project,
            entity=tracking.entity or None,
            name=self.folder.name,
            tags=tracking.tags,
            dir=str(self.folder),
            config=asdict(self.config),
            id=self.run_id or None,
        )
        if tracking.wandb == "online":
            try:
                settings = wandb.Settings(init_timeout=tracking.init_timeout, login_timeout=int(tracking.init_timeout))
                self.wandb = wandb.init(mode="online", resume="allow", settings=settings, **common)
            except Exception as error:  # no key, no network, a proxy's answer: training does not depend on any of them
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                print(f"wandb: {reason}; going on offline, `wandb sync` sends the run later", file=sys.stderr, flush=True)
                wandb.teardown()
        if self.wandb is None:
            self.wandb = wandb.init(mode="offline", **common)
        self.run_id = self.wandb.id


class Clock:
    """Speeds and the time left, without what is not training: evaluations and saves."""

    def __init__(self, steps: int, step: int) -> None:
        self.steps, self.first = steps, step
        self.busy = 0.0
        self.since = time.perf_counter()
        self.started = self.since
        self.seen: list[float] = []

    def pause(self) -> None:
        self.busy -= time.perf_counter()

    def go_on(self) -> None:
        self.busy += time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        taken = now - self.since - self.busy
        self.since, self.busy = now, 0.0
        self.seen = [*self.seen[-49:], taken]
        return taken

    def left(self, step: int) -> float:
        typical = sorted(self.seen)[len(self.seen) // 2] if self.seen else 0.0
        return typical * (self.steps - step)


def line(step: int, steps: int, values: dict[str, Any], left: float) -> str:
    """step 9/90  loss 3.412  grad 0.83  lr 3.0e-4  131k tok/s  412 TFLOP/s/GPU  41.6% MFU (3.5×)  38.2 GiB (27%)  ETA 2h14m"""
    parts = [f"step {step:{len(str(steps))}}/{steps}", f"loss {values['loss']:.3f}", f"grad {values['grad']:.2f}"]
    parts += [f"lr {rate(values['lr'])}", f"{short(values['tokens_per_s'])} tok/s"]
    parts.append(f"{values['tflops']:.3g} TFLOP/s" + "/GPU" * ("mfu" in values))
    if "mfu" in values:
        parts.append(f"{100 * values['mfu']:.1f}% MFU (3.5×)")  # cost.py: attention counted as its kernels run
    if "gib" in values:
        parts.append(f"{values['gib']:.1f} GiB ({100 * values['gib_share']:.0f}%)")
    parts.append(f"ETA {duration(left)}")
    # of a mixture the loss goes up and down with what a step happens to hold
    return "  ".join([*parts, *(f"{name} {loss:.3f}" for name, loss in values.get("source", {}).items())])


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes}m{seconds % 60:02d}s"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def rate(lr: float) -> str:
    """3.0e-4"""
    return f"{lr:.1e}".replace("e-0", "e-")


def short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found.append((prefix + key, value))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None  # JSON has no NaN
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _cut(path: Path, step: int, steps: int) -> None:
    """Leaves out what a run wrote after the checkpoint that it now goes on from, and its last report if that comes again."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
            if line["step"] <= step and (line["kind"] == "train" or line["step"] < steps):
                kept.append(text)
        except (ValueError, KeyError):
            continue  # the last line of a killed process
    part = path.with_suffix(".part")
    part.write_text("".join(text + "\n" for text in kept))
    os.replace(part, path)
