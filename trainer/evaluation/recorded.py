"""Results of `ringspan evaluate` in a run's folder, a line of evaluations.jsonl per call, as text and figures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.evaluation import long_suite, text_loss

NAME = "evaluations.jsonl"
Result = dict[str, Any]


def append(folder: Path, result: Result) -> None:
    """Record a result in a run's folder, in one write: calls that end at once mix no lines."""
    with (folder / NAME).open("ab", buffering=0) as out:
        out.write(json.dumps(result).encode() + b"\n")


def read(folder: Path) -> list[Result]:
    """Return a run's results: one per suite, checkpoint, --cut-ring, --seen and --rope.

    A row of a later call replaces the row of the same length, family and context.

    Raises:
        ValueError: a line is damaged.
    """
    merged: dict[tuple[Any, ...], Result] = {}
    rows: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
    for line in run_folder.read_jsonl(folder / NAME) if (folder / NAME).is_file() else ():
        key = line["kind"], line["checkpoint"], line["cut_ring"], *line.get("seen", ()), *rope_changes(line)
        merged[key] = line
        rows.setdefault(key, {}).update({(row["length"], row.get("family"), row.get("context")): row for row in line["rows"]})
    return [line | dict(rows=list(rows[key].values())) for key, line in merged.items()]


def rope_changes(result: Result) -> list[str]:
    """Return the options of --rope, as key=value."""
    values = result.get("rope_changes", {}).items()
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values]


def title(result: Result) -> str:
    """Return what was evaluated: checkpoint, trained length, whether the ring was cut, what is training's own, and --rope."""
    trained = long_suite.short(result["trained_length"])
    seen = f", {' and '.join(result['seen'])} of training" if result.get("seen") else ""
    rope = "".join(f", rope.{change}" for change in rope_changes(result))
    return f"{result['checkpoint']}, trained at {trained}{', ring cut' * result['cut_ring']}{seen}{rope}"


def text(result: Result) -> str:
    """Return the tables, and for lengths that no rope rule covers the option that helps."""
    rows, trained = result["rows"], result["trained_length"]
    if result["kind"] == "text-suite":
        tables = text_loss.report(rows)
    else:
        tables = long_suite.report(rows, trained, result["trained_families"])
    if result["rope"]["kind"] == "base" and (longest := max(row["length"] for row in rows)) > trained:
        tables += (
            f"\n\nrope.kind=base: positions beyond the {trained} tokens of training are not scaled; extend the run with "
            f"init_from, rope=yarn, rope.factor={-(-longest // trained)} and rope.original_length={trained}"
        )
    return f"{title(result)}\n\n{tables}"


def draw(plt: Any, result: Result, path: Path) -> None:
    """Draw the figure of the long suite.

    Args:
        plt: matplotlib.pyplot.
        result: one of `read`, of kind long-suite.
        path: the file to write.
    """
    figure = long_suite.plot(plt, result["rows"], result["trained_length"], title(result))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_all(plt: Any, results: list[Result], folder: Path) -> Iterator[str]:
    """Draw each figure of the long suite into a folder, and yield a line that names it."""
    for result in results:
        if result["kind"] == "long-suite":
            other = *["cut"] * result["cut_ring"], *result.get("seen", ()), *rope_changes(result)
            name = "-".join(["suite", *result["checkpoint"].split("/"), *other])
            draw(plt, result, folder / f"{name}.png")
            yield f"plotted: {folder / name}.png"
