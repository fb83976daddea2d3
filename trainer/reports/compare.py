"""Compare runs, also while they train: a table, and a page with curves.

    ringspan compare runs/a runs/b
    ringspan compare runs/* --by=time --html=report.html

Losses are matched: "loss at" is the mean of the last 10 steps at the last point that all runs have reached, in tokens, time or
steps. Runs are labelled with the options that differ. A folder that is no run is named, and the rest is shown.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ringspan.trainer.monitoring.tracking import duration, with_unit
from ringspan.trainer.reports import page
from ringspan.trainer.reports.read_run import ComparedRun, differing_options, read, text_table

PROGRAM = "ringspan compare"
AXES = ("tokens", "time", "step")
BLOCKS = "█▇▆▅▄▃▂▁"
SPARK_WIDTH = 30  # characters of a curve on the console
MAX_OPTIONS = 8  # differing options on the console; the page has all


def matched_point(runs: list[ComparedRun], by: str) -> float:
    """Return the last value of an axis that all runs with steps have reached; 0 if no run has steps."""
    return min((run.axis(by)[-1] for run in runs if run.steps.step), default=0.0)


def point_text(by: str, value: float) -> str:
    """Return a value of an axis as text."""
    return {"tokens": f"{with_unit(value)} tokens", "time": duration(value)}.get(by, f"step {value:.0f}")


def summary(runs: list[ComparedRun], by: str) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of runs."""
    value = matched_point(runs, by)
    head = ["run", "state", "step", "tokens", "time", "loss", f"loss at {point_text(by, value)}", "held out", "best"]
    head += ["tokens/s", "GiB", "planned"]
    rows = []
    for run in runs:
        steps, best = run.steps, run.best
        measured = max((pair[1] for pair in run.memory.values()), default=0.0)
        planned = max((pair[0] for pair in run.memory.values()), default=0.0)
        rows.append([
            run.name, run.state, f"{steps.step[-1]}" if steps.step else "–", with_unit(steps.tokens[-1]) if steps.step else "–",
            duration(steps.seconds[-1]) if steps.step else "–", _loss(run.loss), _loss(run.loss_at(by, value)),
            _loss(run.held_out[-1][1] if run.held_out else None), f"{best[1]:.3f} ({best[0]})" if best else "–",
            with_unit(run.speed) if run.speed else "–", f"{measured:.2f}" if measured else "–",
            f"{planned:.2f}" if planned else "–",
        ])  # fmt: skip
    return head, rows


def sparkline(values: list[float], width: int = SPARK_WIDTH) -> str:
    """Draw a curve with one character per bin; the highest value is a full block."""
    means = [y for _, y in page.thin([(float(i), value) for i, value in enumerate(values)], width)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((high - mean) * scale)] for mean in means)


def warnings(runs: list[ComparedRun]) -> list[str]:
    """Return what a reader must know: notes of each run, and why losses do not compare."""
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    different = differing_options(runs)
    if "evaluate.batches" in different:
        lines.append("evaluate.batches differs: held-out losses on other batches do not compare")
    tokens = [key for key in different if key.partition(".")[0] == "tokenizer" or key == "model.vocabulary"]
    data = [key for key in different if key.startswith("data.sources.")]
    if tokens:
        lines.append(f"{', '.join(tokens)} differ: losses per token of other tokenizers do not compare")
    elif data:
        lines.append("the data differ: losses on other texts do not compare")
    return lines


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _report(runs: list[ComparedRun], by: str) -> str:
    head, rows = summary(runs, by)
    parts = [text_table([head, *rows])]
    different = differing_options(runs)
    if different:
        options = [[key, *map(_value, values)] for key, values in list(different.items())[:MAX_OPTIONS]]
        more = f"\n… and {len(different) - MAX_OPTIONS} more options; --html shows all" * (len(different) > MAX_OPTIONS)
        parts.append(text_table([["differing options", *(run.name for run in runs)], *options]) + more)
    elif len(runs) > 1:
        parts.append("no option of the training differs")
    curves = [run for run in runs if run.steps.loss]
    width = max((len(run.name) for run in curves), default=0)
    parts.append(
        "\n".join(
            f"{run.name:{width}}  {sparkline(run.steps.loss)}  loss {max(run.steps.loss):.2f} to {min(run.steps.loss):.2f}"
            for run in curves
        )
    )
    return "\n\n".join(part for part in [*parts, "\n".join(warnings(runs))] if part)


def _value(value: Any) -> str:
    return "–" if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, finished or not")
    parser.add_argument("--by", choices=AXES, default="tokens", help="what losses are matched by (default %(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page, which needs no network")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; return 1 if a folder could not be read."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.html is not None and not args.html.resolve().parent.is_dir():
        parser.error(f"--html={args.html}: {args.html.parent} is no folder: make it first")
    runs: list[ComparedRun] = []
    problems = []
    for folder in dict.fromkeys(args.runs):
        try:
            runs.append(read(folder))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    print(*(f"{PROGRAM}: {problem}" for problem in problems), sep="\n", end="\n" * bool(problems), file=sys.stderr)
    if not runs:
        return 2
    _name_apart(runs)
    print(_report(runs, args.by))
    if args.html is not None:
        head, rows = summary(runs, args.by)
        args.html.write_text(page.render(runs, args.by, head, rows, [*problems, *warnings(runs)]))
        print(f"\nwritten: {args.html}; open it in a browser")
    else:
        print(f"\n{PROGRAM} … --html=report.html writes a page with curves, loss by position and memory")
    return int(bool(problems))


def _name_apart(runs: list[ComparedRun]) -> None:
    """Name runs by their paths if several have one name."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = os.path.relpath(run.folder)


if __name__ == "__main__":
    sys.exit(main())
