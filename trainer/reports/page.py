"""The page of `ringspan compare --html`: one file without scripts, fonts or addresses, so that it opens anywhere.

A curve has at most MAX_POINTS points, each the mean of its steps, so that a run of 100,000 steps makes a page below 1 MB. Every
text of a run's folder is escaped, and a content security policy forbids what the page does not need.
"""

import html
import itertools
from typing import Any

from ringspan.trainer.monitoring.tracking import duration, with_unit
from ringspan.trainer.reports.charts import line_chart
from ringspan.trainer.reports.read_run import ComparedRun, Point, differing_options, labels

MAX_POINTS = 500  # of a curve: more than a screen shows
AXIS_LABELS = {"tokens": "tokens", "time": "training time", "step": "step"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:#1a1a1a;background:#fff}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
figure{margin:1.5em 0}figcaption{font-weight:600}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}.grid{stroke:#e4e4e4}
.legend{list-style:none;padding:0;margin:0}.legend li{display:inline-block;margin-right:1.4em}
.legend span{display:inline-block;width:1.4em;height:.25em;margin-right:.5em;vertical-align:middle}
.warning{color:#8a4500}
"""


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points, each the mean of consecutive points. The last point's x is kept."""
    if len(points) <= limit:
        return points
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    chunks = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def render(runs: list[ComparedRun], by: str, head: list[str], rows: list[list[str]], warnings: list[str]) -> str:
    """Return the page.

    Args:
        runs: the runs.
        by: axis of the curves: "tokens", "time" or "step".
        head: head of the table of runs.
        rows: its rows.
        warnings: lines that are shown first.
    """
    title = "Ringspan: " + ", ".join(run.name for run in runs)
    body = [f"<h1>{_text(title)}</h1>", *(f'<p class="warning">{_text(line)}</p>' for line in warnings)]
    body.append(_figure("runs", "Runs", _table(head, rows)))
    if different := differing_options(runs):
        cells = [[key, *("–" if value is None else str(value) for value in values)] for key, values in different.items()]
        body.append(_figure("options", "Differing options", _table(["option", *(run.name for run in runs)], cells)))
    body += _curves(runs, by)
    body += _tables(runs)
    body += _memory_and_time(runs)
    body.append(_figure("environment", "Environment", _environment(runs)))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _curves(runs: list[ComparedRun], by: str) -> list[str]:
    def x_text(x: float) -> str:
        return {"tokens": with_unit(x), "time": duration(x)}.get(by, f"{x:.0f}")

    label, named = AXIS_LABELS[by], list(zip(labels(runs), runs, strict=True))
    loss = [(name, thin(list(zip(run.axis(by), run.steps.loss, strict=True)))) for name, run in named]
    held_out = [(name, thin(run.held_out_points(by))) for name, run in named]
    speed = [(name, thin(list(zip(run.axis(by), run.steps.speed, strict=True)))) for name, run in named]
    charts = [("loss", "Training loss", loss, "loss per token"), ("held-out", "Held-out loss", held_out, "loss per token")]
    charts.append(("speed", "Speed", speed, "tokens/s"))
    return [
        _figure(name, title, line_chart(series, label, y_label, x_text))
        for name, title, series, y_label in charts
        if any(points for _, points in series)
    ]


def _tables(runs: list[ComparedRun]) -> list[str]:
    """A chart for each table of the newest evaluations: loss by position, recall by distance, passkey by depth."""
    figures = []
    for number, title in enumerate(dict.fromkeys(title for run in runs for title in run.tables)):
        bins = next(run.tables[title][0] for run in runs if title in run.tables)
        series, others = [], []
        for name, run in zip(labels(runs), runs, strict=True):
            own, means = run.tables.get(title, ([], []))
            series.append((name, [(float(i), mean) for i, mean in enumerate(means)] if own == bins else []))
            if own and own != bins:
                others.append(run.name)
        note = f'<p class="warning">{_text(", ".join(others))}: other bins, so that it is left out</p>' if others else ""
        y_label = "loss per token" if "loss" in title else "share of right answers"
        chart = line_chart(series, title.partition(" by ")[2] or "bin", y_label, str, bins)
        figures.append(_figure(f"table-{number}", title, chart + note))
    return figures


def _memory_and_time(runs: list[ComparedRun]) -> list[str]:
    figures = []
    memory = [
        [run.name, phase, f"{planned:.2f}", f"{measured:.2f}" if measured else "not measured"]
        for run in runs
        for phase, (planned, measured) in run.memory.items()
    ]
    if memory:
        head = ["run", "phase", "GiB planned", "GiB measured"]
        figures.append(_figure("memory", "Memory of each phase, planned and measured", _table(head, memory)))
    seconds = [
        [run.name, f"{run.planned_seconds:.3g}" if run.planned_seconds else "–"]
        + [f"{run.phases[phase]:.3g}" if phase in run.phases else "–" for phase in ("forward", "backward", "step")]
        for run in runs
        if run.phases
    ]
    if seconds:
        head = ["run", "step planned", "forward", "backward", "optimizer"]
        title = "Seconds of the newest measured step (on a CPU: of the first)"
        figures.append(_figure("breakdown", title, _table(head, seconds)))
    return figures


def _environment(runs: list[ComparedRun]) -> str:
    rows = []
    for run in runs:
        versions, git = run.start.get("versions"), run.start.get("git")
        text = ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else "unknown"
        commit = str(git.get("commit", ""))[:10] if isinstance(git, dict) else ""
        rows.append([run.name, *(str(run.start.get(key, "unknown")) for key in ("device", "ranks", "time")), commit, text])
    return _table(["run", "device", "ranks", "last start", "commit", "versions"], rows)


def _figure(name: str, title: str, content: str) -> str:
    return f'<figure id="{name}"><figcaption>{_text(title)}</figcaption>{content}</figure>'


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{_text(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
