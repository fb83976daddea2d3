"""`ringspan compare`: the table, the page in a real browser, long, running and damaged runs."""

import cProfile
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.config import compose
from ringspan.trainer.reports import charts, compare, page
from ringspan.trainer.reports.read_run import differing_options, read

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def make_run(folder: Path, steps: int, options: tuple[str, ...] = (), finished: bool = True) -> Path:
    """Write the records of a run whose loss at step n is 2 + 2 / n; a step has 1000 tokens and takes 0.5 s."""
    folder.mkdir(parents=True)
    composed = compose.load(["experiment=laptop", "parallel.device=cpu", f"steps={steps}", *options])
    (folder / "config.yaml").write_text(composed.yaml)
    (folder / "starts.jsonl").write_text(json.dumps(dict(device="NVIDIA <H200>", ranks=2, versions=dict(torch="2.9"))) + "\n")
    rows: list[dict[str, Any]] = [dict(kind="start", phase="start", planned=1.5, allocated=1.25, seconds_planned=0.4)]
    for n in range(1, steps + 1):
        rows.append(dict(kind="train", step=n, time=time.time(), loss=2 + 2 / n, tokens=1000 * n, seconds=0.5))
        rows[-1] |= dict(tokens_per_s=2000.0, phases=dict(forward=dict(seconds=0.125, planned=2.5, allocated=2.25)))
        if n % max(1, steps // 4) == 0:
            rows.append(dict(kind="held_out", step=n, loss=2.5 + 2 / n))
            rows.append(dict(kind="table", step=n, title="text: loss by position", bins=["0", "1-9"], means=[3.0, 2.5]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "finished.json").write_text(json.dumps(dict(steps=steps)))
    return folder


def browse(path: Path) -> tuple[str, str]:
    """Return the page's elements after a headless browser has rendered it, and the browser's console."""
    if BROWSER is None:
        pytest.skip("needs chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={path.parent}/profile"]
    done = subprocess.run([BROWSER, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=600)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_table_matches_losses_by_tokens_and_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = make_run(tmp_path / "short", 20), make_run(tmp_path / "long", 40, ("optim.lr=0.02",), finished=False)
    assert compare.main([str(short), str(long)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: re.split(r"  +", line) for line in out.splitlines() if line.startswith(("short", "long", "run "))}
    matched = f"{sum(2 + 2 / n for n in range(11, 21)) / 10:.3f}"
    head = re.split(r"  +", next(line for line in out.splitlines() if line.startswith("run ")))
    assert head[6] == "loss at 20k tokens"
    tables = [re.split(r"  +", line) for line in out.splitlines()[1:3]]
    assert [row[6] for row in tables] == [matched, matched] and [row[1][:9] for row in tables] == ["finished", "last line"]
    assert [row[8] for row in tables] == ["2.600 (20)", "2.550 (40)"] and [row[10:] for row in tables] == [["2.25", "2.50"]] * 2
    assert "optim.lr" in out and re.search(r"steps +20 +40", out) and "█" in rows["short"][1]


def test_page_renders_every_figure_without_a_console_error(tmp_path: Path) -> None:
    """Two runs of different models, and one that still trains."""
    one = make_run(tmp_path / "one", 20)
    other = make_run(tmp_path / "other <b>", 30, ("model.dim=64", "model.heads=2", "model.kv_heads=2"), finished=False)
    target = tmp_path / "report.html"
    assert compare.main([str(one), str(other), f"--html={target}"]) == 0
    dom, console = browse(target)
    assert console == "" and "<b>" not in dom and "NVIDIA &lt;H200&gt;" in dom
    for name in ("runs", "options", "loss", "held-out", "speed", "table-0", "memory", "breakdown", "environment"):
        assert dom.count(f'id="{name}"') == 1, name
    assert dom.count("<polyline") == 8  # loss, held-out loss, speed and loss by position of two runs
    assert re.search(r"one, model.dim 96, model.heads 4: 2.6 at 20k", dom) and re.search(
        r"<td>forward</td><td>2.50</td><td>2.25</td>", dom
    )
    assert not re.search(r"https?://(?!www\.w3\.org)", target.read_text()) and "<script" not in dom


def test_page_of_a_hundred_thousand_steps_is_fast_and_small(tmp_path: Path) -> None:
    """Limits that do not depend on the machine: function calls per step, and CPU time for ten times as many steps."""
    calls, seconds, target = [], [], tmp_path / "report.html"
    for steps in (10_000, 100_000):
        run, profile = make_run(tmp_path / f"{steps}", steps), cProfile.Profile()
        began = time.process_time()
        assert profile.runcall(compare.main, [str(run), f"--html={target}"]) == 0
        seconds.append(time.process_time() - began)
        calls.append(sum(function.callcount for function in profile.getstats()))
    assert calls[1] - calls[0] < 100 * 90_000
    assert seconds[1] < 30 * seconds[0], "a quadratic cost would be 100 times as high"
    assert target.stat().st_size < 5e6


def test_what_is_no_run_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, damaged, empty = make_run(tmp_path / "good", 20), make_run(tmp_path / "damaged", 20), tmp_path / "empty"
    lines = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[5] = '{"kind": "train", "st\n'
    (damaged / "metrics.jsonl").write_text("".join(lines) + '{"cut')  # the last line is being written
    (damaged / "config.yaml").write_text("a: [1")
    empty.mkdir()
    assert compare.main([str(good), str(damaged), str(empty), str(tmp_path / "absent")]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("this is no folder of a run") == 2 and "empty: " in captured.err
    assert "damaged: config.yaml cannot be read" in captured.out
    assert "damaged: metrics.jsonl: 1 damaged line is left out" in captured.out and re.search(r"good +finished", captured.out)
    assert compare.main([str(empty)]) == 2


def test_runs_with_nothing_in_common_are_shown_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path / "one", 20), make_run(tmp_path / "two", 20, ("data=passkey", "evaluate.batches=1"))
    none = make_run(tmp_path / "none", 1)
    (none / "metrics.jsonl").write_text("")
    assert compare.main([str(one), str(two), str(none)]) == 0
    out = capsys.readouterr().out
    assert "the data differ: losses on other texts do not compare" in out and "none: no step is recorded" in out
    assert "loss at 20k tokens" in out and "evaluate.batches differs: held-out losses on other batches" in out
    assert "steps" in differing_options([read(one), read(none)])


def test_curves_are_thinned_to_means() -> None:
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    thinned = page.thin(points)
    assert len(thinned) == page.MAX_POINTS and thinned[-1][0] == 9999.0
    assert all(y == pytest.approx(0.5) for _, y in thinned) and page.thin(points[:3]) == points[:3]
    assert charts.ticks(0.0, 10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] and charts.ticks(2.0, 2.0) == [2.0]
