"""Tracking of a run's metrics: one console line per step, metrics.jsonl, and optionally wandb and TensorBoard.

metrics.jsonl is the source of truth. It is truncated to the checkpoint when a run resumes, so that each step appears once.
wandb is imported on rank 0 only, and only if it is enabled; without a network it gives up after `init_timeout` and continues
offline. An error of wandb or TensorBoard is one warning and turns the service off.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringspan.trainer import files
from ringspan.trainer.config.schema import Config
from ringspan.trainer.monitoring import records


class Tracker:
    """Writes metrics on rank 0; on the other ranks every call does nothing.

    Args:
        config: the run's config.
        folder: the run's folder.
        active: whether this is rank 0.
        run_id: wandb's id of the run that continues; "" makes a new one.
        step: the checkpoint's step.
    """

    def __init__(self, config: Config, folder: Path, active: bool, run_id: str = "", step: int = 0) -> None:
        self.config, self.folder, self.active = config, folder, active
        self.run_id = run_id
        self.wandb: Any = None
        self.board: Any = None
        self.clock = Clock(config.steps)
        if not active:
            return
        path = folder / "metrics.jsonl"
        for note in _truncate(path, step, config.steps):
            self.print(note)
        self.file = files.open_append(path)
        self.pending = b""  # lines that a full disk has not taken yet
        self.deleted = False  # whether metrics.jsonl has been deleted
        if config.tracking.wandb != "disabled":
            with self._off_if_it_fails("wandb"):
                self._start_wandb()
        if config.tracking.tensorboard:
            with self._off_if_it_fails("TensorBoard"):
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
        """Write a step's metrics; `kind` is "train", "held_out", "table", "phase" or "checkpoint"."""
        if not self.active:
            return
        line = {"kind": kind, "step": step, "time": round(time.time(), 3)} | records.strict(values)
        self._write(json.dumps(line, allow_nan=False).encode() + b"\n")
        named = {f"{kind}/{key}": value for key, value in _scalars(values)}
        if self.wandb is not None:
            with self._off_if_it_fails("wandb"):
                self.wandb.log(named, step=step)
        if self.board is not None:
            with self._off_if_it_fails("TensorBoard"):
                for key, value in named.items():
                    self.board.add_scalar(key, value, step)

    def log_table(self, step: int, title: str, labels: list[str], means: list[float]) -> None:
        """Write a table of one step, such as loss by position."""
        if not self.active:
            return
        self.log(step, {"title": title, "bins": labels, "means": means}, kind="table")
        if self.wandb is not None:
            import wandb

            with self._off_if_it_fails("wandb"):
                table = wandb.Table(columns=["bin", "mean"], data=[list(pair) for pair in zip(labels, means, strict=True)])
                self.wandb.log({title: wandb.plot.bar(table, "bin", "mean", title=title)}, step=step)

    def print(self, text: str) -> None:
        """Print to the console."""
        if self.active:
            with contextlib.suppress(OSError):  # the run continues without a terminal
                print(text, flush=True)

    def _write(self, line: bytes) -> None:
        """Append to metrics.jsonl. On a full disk lines wait until the disk takes them; the run continues."""
        warned = bool(self.pending)
        self.pending += line
        try:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]
            if not self.deleted and os.fstat(self.file.fileno()).st_nlink == 0:
                self.deleted = True
                self.print(f"{self.folder / 'metrics.jsonl'} has been deleted, so that no step is recorded; the run continues")
        except OSError as error:
            if not warned:
                self.print(f"{self.folder / 'metrics.jsonl'}: {error.strerror}; its lines wait until they can be written")

    def close(self, failed: bool = False) -> None:
        if not self.active:
            return
        self._write(b"")
        self.file.close()
        if self.board is not None:
            with self._off_if_it_fails("TensorBoard"):
                self.board.close()
        if self.wandb is not None:
            with self._off_if_it_fails("wandb"):
                self.wandb.finish(exit_code=int(failed))
        if self.config.tracking.wandb != "disabled" and self.wandb is None:
            with contextlib.suppress(Exception):  # at exit wandb would print a traceback about its dead service
                import wandb

                wandb.teardown()

    @contextlib.contextmanager
    def _off_if_it_fails(self, service: str) -> Iterator[None]:
        """Turn an error of wandb or TensorBoard into one warning. The service is off after it."""
        try:
            yield
        except Exception as error:
            if service == "wandb":
                self.wandb = None
            else:
                self.board = None
            text = f"{service}: {_reason(error)}; it is off, the run continues, and metrics.jsonl has every step"
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr, flush=True)

    def _start_wandb(self) -> None:
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
            except Exception as error:  # no key, no network, a proxy's answer; training depends on none of them
                text = f"wandb: {_reason(error)}; continuing offline, `wandb sync` sends the run later"
                print(text, file=sys.stderr, flush=True)
                wandb.teardown()
        if self.wandb is None:
            self.wandb = wandb.init(mode="offline", **common)
        self.run_id = self.wandb.id


class Clock:
    """Step times and the remaining time, without evaluations and saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.paused = 0.0  # seconds since the last lap that do not count
        self.last_lap = time.perf_counter()
        self.laps: list[float] = []  # the last 50

    def pause(self) -> None:
        self.paused -= time.perf_counter()

    def resume(self) -> None:
        self.paused += time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, without pauses."""
        now = time.perf_counter()
        seconds = now - self.last_lap - self.paused
        self.last_lap, self.paused = now, 0.0
        self.laps = [*self.laps[-49:], seconds]
        return seconds

    def remaining(self, step: int) -> float:
        """Return the estimated seconds after `step`: the median lap times the remaining steps."""
        median = sorted(self.laps)[len(self.laps) // 2] if self.laps else 0.0
        return median * (self.steps - step)


def line(step: int, steps: int, values: dict[str, Any], elapsed: float, left: float) -> str:
    """step 9/90  loss 3.412  grad 0.83  lr 3.0e-4  131k tok/s  412 TFLOP/s/GPU  41.6% MFU (3.5×)  38.2 GiB (27%)  1m, ETA 9m

    Args:
        step: the step.
        steps: the run's last step.
        values: the step's metrics, with the mean losses since the previous line.
        elapsed: seconds since the training began.
        left: estimated seconds to the end.
    """
    parts = [f"step {step:{len(str(steps))}}/{steps}", f"loss {values['loss']:.3f}", f"grad {values['grad']:.2f}"]
    parts += [f"lr {rate(values['lr'])}", f"{with_unit(values['tokens_per_s'])} tok/s"]
    parts.append(f"{values['tflops']:.3g} TFLOP/s" + "/GPU" * ("mfu" in values))
    if "mfu" in values:
        parts.append(f"{100 * values['mfu']:.1f}% MFU (3.5×)")  # attention counted as its kernels run (planning/flops.py)
    if "gib" in values:
        parts.append(f"{values['gib']:.1f} GiB ({100 * values['gib_share']:.0f}%)")
    parts.append(f"{duration(elapsed)}, ETA {duration(left)}")
    # The loss of a mixture varies with the sources of the steps, so that each source has a loss of its own.
    return "  ".join([*parts, *(f"{name} {loss:.3f}" for name, loss in values.get("source", {}).items())])


def duration(seconds: float) -> str:
    """59s, 12m05s, 2h14m or 3d01h."""
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


def with_unit(number: float) -> str:
    """1.31M, 131k or 950."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    scalars = []
    for key, value in values.items():
        if isinstance(value, dict):
            scalars += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            scalars.append((prefix + key, value))
    return scalars


def _reason(error: Exception) -> str:
    """First line of an error's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _truncate(path: Path, step: int, steps: int) -> list[str]:
    """Remove all lines after the checkpoint's step, and the report after the last step, which will be written again.

    A curve that the run does not continue is kept under another name. Return lines for the console.
    """
    notes = []
    if step == 0 and path.is_file() and any(line and line.get("kind") == "train" for line in records.read(path)):
        notes.append(f"{path}: the steps of the earlier training are kept in {records.set_aside(path, '.old').name}")

    def keep(line: dict[str, Any]) -> bool:
        return bool(line["step"] <= step and (line["kind"] in ("train", "checkpoint") or line["step"] < steps))

    return [*notes, *filter(None, [records.rewrite(path, keep)])]
