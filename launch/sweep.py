"""What the runs of a sweep came to, side by side.

held out   loss    tokens/s   step
4.599      5.308      15.2k      3   seed=1 optim.lr=0.002   runs/tiny-512-fb5327
4.655      5.425      16.2k      3   seed=1 optim.lr=0.001   runs/tiny-512-8dca65
(loss: the mean of the last 10 steps; held out: of the last evaluation)
"""

import contextlib
import math
import os
import statistics
from pathlib import Path
from typing import Any

from ringspan.trainer.checkpoint import run_folder

LAST = 10  # steps that a loss is the mean of: one alone is noise


def table(runs: list[tuple[str, Path, int]]) -> str:
    """A line for each (what was different, folder, exit code), the best loss first, and last those whose code is not 0."""
    found = [(code, outcome(folder), label, folder) for label, folder, code in runs]
    found.sort(key=lambda run: (run[0] != 0, _first(run[1]["held_out"], run[1]["loss"], math.inf)))
    lines = [f"{'held out':<11}{'loss':<8}{'tokens/s':>8}{'step':>7}"]
    for code, its, label, folder in found:
        cells = [_number(its["held_out"], 11), _number(its["loss"], 8), _thousands(its["tokens_per_s"]), f"{its['step']:>7}"]
        failed = f"   failed: exit code {code}" if code else ""
        lines.append(f"{''.join(cells)}   {label}   {os.path.relpath(folder)}{failed}")
    return "\n".join([*lines, f"(loss: the mean of the last {LAST} steps; held out: of the last evaluation)"])


def outcome(folder: Path) -> dict[str, Any]:
    """The last losses of a run, and its usual speed; None for what it has not."""
    found: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    with contextlib.suppress(OSError, ValueError):  # it never began, or was killed while it wrote
        for line in run_folder.lines(folder / "metrics.jsonl"):
            found.setdefault(line["kind"], []).append(line)
    steps, held_out = found["train"], found["held_out"]
    losses = [line["loss"] for line in steps[-LAST:]]  # null where it was not finite: JSON has no NaN
    return {
        "step": steps[-1]["step"] if steps else 0,
        "loss": statistics.fmean(losses) if losses and None not in losses else None,
        "held_out": held_out[-1]["loss"] if held_out else None,
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in steps) if steps else None,
    }


def _first(*values: float | None) -> float:
    """NaN, which older files hold and which has no place in an order, counts as the worst."""
    first = next(value for value in values if value is not None)
    return math.inf if math.isnan(first) else first


def _number(value: float | None, width: int) -> str:
    return f"{'–' if value is None else format(value, '.3f'):<{width}}"


def _thousands(value: float | None) -> str:
    return f"{'–' if value is None else format(value / 1000, '.1f') + 'k':>8}"
