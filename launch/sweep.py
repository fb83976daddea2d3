"""Table of the results of a sweep: one line per run, the best loss first.

    held out   loss    tokens/s   step
    4.599      5.308      15.2k      3   seed=1 optim.lr=0.002   runs/tiny-512-fb5327
    4.655      5.425      16.2k      3   seed=1 optim.lr=0.001   runs/tiny-512-8dca65
    (loss: the mean of the last 10 steps; held out: of the last evaluation, on 4 batches)

A held-out loss of another number of batches is marked with * and not ranked: losses on different texts do not compare.
"""

import contextlib
import math
import os
import statistics
from pathlib import Path
from typing import Any

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.reports.read_run import LAST


def table(runs: list[tuple[str, Path, int]], batches: int) -> str:
    """Return a table with a line per run: the best held-out loss first, failed runs last.

    Args:
        runs: (label, folder, exit code) of each run; the label has the options that differ between the runs.
        batches: batches of the sweep's evaluations; runs without a held-out loss on as many are ranked after the others.
    """
    rows = [(code, outcome(folder), label, folder) for label, folder, code in runs]
    compares = [row[1]["held_out"] is not None and row[1]["batches"] == batches for row in rows]
    ranked = [row for _, row in sorted(zip(compares, rows, strict=True), key=lambda pair: _rank(*pair))]
    others = sorted({row[1]["batches"] for row in rows if row[1]["held_out"] is not None} - {batches}, key=str)
    lines = [f"{'held out':<11}{'loss':<8}{'tokens/s':>8}{'step':>7}"]
    for code, result, label, folder in ranked:
        mark = "*" * (result["held_out"] is not None and result["batches"] != batches)
        cells = [
            _number(result["held_out"], 11, mark),
            _number(result["loss"], 8),
            _thousands(result["tokens_per_s"]),
            f"{result['step']:>7}",
        ]
        failed = f"   failed: exit code {code}" if code else ""
        lines.append(f"{''.join(cells)}   {label}   {os.path.relpath(folder)}{failed}")
    lines.append(f"(loss: the mean of the last {LAST} steps; held out: of the last evaluation, on {_batch_text(batches)})")
    if others:
        counts = " or ".join("an unknown number of batches" if count is None else _batch_text(count) for count in others)
        lines.append(f"* on {counts}, so it does not compare and is not ranked; checkpoint.resume=none runs it again")
    return "\n".join(lines)


def _batch_text(count: int) -> str:
    return f"{count} batch{'es' * (count != 1)}"


def _rank(compares: bool, row: tuple[int, dict[str, Any], str, Path]) -> tuple[bool, bool, float]:
    """Order of a run: failed runs last, before them runs whose held-out loss does not compare, by their training loss."""
    code, result = row[:2]
    return code != 0, not compares, _first(result["held_out"] if compares else result["loss"], math.inf)


def outcome(folder: Path) -> dict[str, Any]:
    """Return last step, last losses, batches of the last evaluation, and median speed; None if metrics.jsonl lacks a value."""
    metrics: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    with contextlib.suppress(OSError, ValueError):  # the run never started, or was killed during a write
        for line in run_folder.read_jsonl(folder / "metrics.jsonl"):
            metrics.setdefault(str(line.get("kind")), []).append(line)
    steps, held_out = metrics["train"], metrics["held_out"]
    losses = [_value(line, "loss") for line in steps[-LAST:]]  # a loss that is not finite is null, because JSON has no NaN
    finite = [loss for loss in losses if loss is not None]
    speeds = [speed for line in steps if (speed := _value(line, "tokens_per_s")) is not None]
    return {
        "step": int(_value(steps[-1], "step") or 0) if steps else 0,
        "loss": statistics.fmean(finite) if losses and len(finite) == len(losses) else None,
        "held_out": _value(held_out[-1], "loss") if held_out else None,
        "batches": _batches(folder, held_out[-1]) if held_out else None,
        "tokens_per_s": statistics.median(speeds) if speeds else None,
    }


def _batches(folder: Path, line: dict[str, Any]) -> int | None:
    """Batches of an evaluation. The lines of earlier versions lack them; config.yaml has those of the run's last start."""
    if (number := _value(line, "batches")) is not None:
        return int(number)
    with contextlib.suppress(OSError, ValueError):
        return run_folder.config_of(folder).evaluate.batches
    return None


def _value(line: dict[str, Any], key: str) -> float | None:
    """A number of a line; None if the line lacks it, holds null, or was damaged into something else."""
    value = line.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _first(*values: float | None) -> float:
    """The first value that is not None. NaN, which older files contain, sorts as the worst."""
    first = next(value for value in values if value is not None)
    return math.inf if math.isnan(first) else first


def _number(value: float | None, width: int, mark: str = "") -> str:
    return f"{'–' if value is None else format(value, '.3f') + mark:<{width}}"


def _thousands(value: float | None) -> str:
    return f"{'–' if value is None else format(value / 1000, '.1f') + 'k':>8}"
