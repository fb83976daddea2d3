"""Reads the folder of a run for a comparison: also one that still trains, and the readable part of a damaged one.

Unlike `ringspan results`, which measures, this needs no complete records: a part that cannot be read is named in `notes`.
Imports no torch.
"""

import contextlib
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringspan.trainer import files
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.monitoring import records
from ringspan.trainer.monitoring.tracking import duration

LAST = 10  # steps that a final loss is averaged over, because a single one is noisy
# Options that describe where and how a run is recorded, not what it trains.
LOCAL_GROUPS = ("tracking", "hardware", "debug")
LOCAL = ("runs", "name", "data.cache", "data.verify", "checkpoint.resume", "checkpoint.changed")
Point = tuple[float, float]


@dataclass
class RecordedSteps:
    """Values of the steps, in the order of the steps."""

    step: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # since the start of the training, without evaluations and saves
    loss: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)  # tokens/s


@dataclass
class ComparedRun:
    """A run of a comparison."""

    name: str
    folder: Path
    state: str  # "finished", or how old the last line is
    options: dict[str, Any]  # by dotted name; empty if config.yaml cannot be read
    start: dict[str, Any]  # the last line of starts.jsonl
    steps: RecordedSteps
    held_out: list[tuple[int, float]]  # step, loss
    tables: dict[str, tuple[list[str], list[float]]]  # newest table of each title: bins, means
    memory: dict[str, tuple[float, float]]  # by phase: GiB planned and measured; 0: not measured
    phases: dict[str, float]  # seconds by phase of the last step that has them
    planned_seconds: float
    notes: list[str]

    @property
    def loss(self) -> float | None:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.steps.loss[-LAST:]) if self.steps.loss else None

    @property
    def speed(self) -> float | None:
        """Median tokens/s."""
        return statistics.median(self.steps.speed) if self.steps.speed else None

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best evaluation."""
        return min(self.held_out, key=lambda pair: pair[1], default=None)

    def axis(self, by: str) -> list[float]:
        """Return the steps' values of "tokens", "time" or "step"."""
        return {"tokens": self.steps.tokens, "time": self.steps.seconds}.get(by, [float(n) for n in self.steps.step])

    def held_out_points(self, by: str) -> list[Point]:
        """Return the evaluations over an axis; one before the first step is left out."""
        at = dict(zip(self.steps.step, self.axis(by), strict=True))
        return [(at[step], loss) for step, loss in self.held_out if step in at]

    def loss_at(self, by: str, value: float) -> float | None:
        """Return the mean loss of the last steps up to a value of an axis."""
        count = sum(x <= value for x in self.axis(by))
        return statistics.fmean(self.steps.loss[max(0, count - LAST) : count]) if count else None


def read(folder: Path) -> ComparedRun:
    """Read a run's folder.

    Raises:
        ValueError: the folder holds no run; the message names it.
    """
    names = ("config.yaml", "metrics.jsonl", "starts.jsonl")
    if not folder.is_dir() or not any((folder / name).is_file() for name in names):
        raise ValueError(f"{folder}: this is no folder of a run: it has none of {', '.join(names)}; name runs/NAME")
    notes: list[str] = []
    lines = _lines(folder / "metrics.jsonl", notes)
    options: dict[str, Any] = {}
    try:
        options = flat(asdict(run_folder.config_of(folder)))
    except (OSError, ValueError) as error:
        notes.append(f"config.yaml cannot be read, so that options are not compared: {error}")
    starts = _lines(folder / "starts.jsonl", notes)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault(str(line.get("kind")), []).append(line)
    steps = _steps(by_kind.get("train", []))
    if not steps.step:
        notes.append("no step is recorded, so that it has no curve")
    evaluations = [line for line in by_kind.get("held_out", []) if _has(line, "step", "loss")]
    equal = [line for line in evaluations if line.get("batches") == evaluations[-1].get("batches")]
    held_out = [(int(line["step"]), float(line["loss"])) for line in equal]
    if len(equal) < len(evaluations):
        notes.append(f"{len(evaluations) - len(equal)} evaluations on another number of batches are left out")
    memory, phases = _phases(by_kind)
    planned = next((_number(line, "seconds_planned") for line in by_kind.get("start", [])[::-1]), 0.0)
    return ComparedRun(
        folder.resolve().name,
        folder,
        _state(folder, lines),
        options,
        starts[-1] if starts else {},
        steps,
        held_out,
        _tables(by_kind.get("table", [])),
        memory,
        phases,
        planned,
        notes,
    )


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted name."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: value for name, item in node.items() for key, value in flat(item, f"{prefix}.{name}".lstrip(".")).items()}


def differing_options(runs: list[ComparedRun]) -> dict[str, list[Any]]:
    """Return the options that differ between runs, each with its value in every run; None where a run lacks it."""
    return differing({str(index): run.options for index, run in enumerate(runs)})


def differing(options: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the options that differ.

    Args:
        options: each run's options by dotted name; those of an empty run are unknown and None.
    """
    known = [each for each in options.values() if each]
    keys = sorted({key for each in known for key in each})
    keys = [key for key in keys if key not in LOCAL and key.partition(".")[0] not in LOCAL_GROUPS]
    rows = {key: [each.get(key) for each in options.values()] for key in keys}
    return {key: row for key, row in rows.items() if len({str(each.get(key)) for each in known}) > 1}


def labels(runs: list[ComparedRun]) -> list[str]:
    """Return a label of each run for legends: its name and up to two options that differ."""
    different = {key: row for key, row in differing_options(runs).items() if not key.startswith("evaluate.")}
    chosen = list(different)[:2]
    return [", ".join([run.name, *(f"{key} {different[key][i]}" for key in chosen)]) for i, run in enumerate(runs)]


def text_table(rows: list[list[str]]) -> str:
    """Return rows of the same length with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file. A cut last line belongs to a running run; other damaged lines are counted in a note."""
    try:
        data = files.read(path, records.MAX_BYTES)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
        return []
    texts, lines, damaged = data.splitlines(), [], 0
    for number, text in enumerate(texts, 1):
        line = None
        with contextlib.suppress(ValueError, RecursionError):  # json.loads is three times as fast as files.parse_json
            line = json.loads(text)
        if isinstance(line, dict):
            lines.append(line)
        elif number < len(texts) or data.endswith(b"\n"):
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged line{'s are' if damaged > 1 else ' is'} left out")
    return lines


def _steps(lines: list[dict[str, Any]]) -> RecordedSteps:
    steps, seconds = RecordedSteps(), 0.0
    for line in lines:
        seconds += _number(line, "seconds")
        if not _has(line, "step", "loss"):  # a loss that is not finite is null
            continue
        steps.step.append(int(line["step"]))
        steps.loss.append(float(line["loss"]))
        steps.tokens.append(_number(line, "tokens"))
        steps.seconds.append(seconds)
        steps.speed.append(_number(line, "tokens_per_s"))
    return steps


def _tables(lines: list[dict[str, Any]]) -> dict[str, tuple[list[str], list[float]]]:
    tables = {}
    for line in lines:
        bins, means = line.get("bins"), line.get("means")
        if not isinstance(bins, list) or not isinstance(means, list) or len(bins) != len(means):
            continue
        if all(isinstance(mean, int | float) for mean in means):
            tables[str(line.get("title"))] = ([str(each) for each in bins], [float(mean) for mean in means])
    return tables


def _phases(by_kind: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Memory by phase, and seconds by phase: of the last step on a GPU, of the first step on a CPU."""
    rows: list[dict[str, Any]] = [*by_kind.get("start", []), *by_kind.get("phase", [])]
    for line in by_kind.get("train", []):
        if isinstance(found := line.get("phases"), dict):
            rows += [dict(phase=name, **row) for name, row in found.items() if isinstance(row, dict)]
    memory = {str(row.get("phase")): (_number(row, "planned"), _number(row, "allocated")) for row in rows}
    seconds = {str(row.get("phase")): _number(row, "seconds") for row in rows if _has(row, "seconds")}
    return memory, seconds


def _state(folder: Path, lines: list[dict[str, Any]]) -> str:
    if run_folder.is_finished(folder):
        return "finished"
    last = next((_number(line, "time") for line in reversed(lines) if _has(line, "time")), 0.0)
    return f"last line {duration(max(0.0, time.time() - last))} ago" if last else "not started"


def _number(line: dict[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _has(line: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(line.get(key), int | float) for key in keys)
