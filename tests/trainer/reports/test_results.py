"""The command `ringspan results` on tiny runs: rows, loss differences, a hand-made trace, and errors."""

import json
import re
import shutil
import statistics
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.data import tokenizer
from ringspan.trainer.monitoring import profile_breakdown
from ringspan.trainer.monitoring.profile_breakdown import breakdown
from ringspan.trainer.planning import flops
from ringspan.trainer.planning.memory import GIB, footprint
from ringspan.trainer.reports import results
from ringspan.trainer.reports.loss_plot import draw
from tests.trainer import jobs

Folder = Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Runs with equal samples: `one` on one rank, `ring` and `again` on two."""
    root = tmp_path_factory.mktemp("runs")
    for name, world, extra in (("one", 1, []), ("ring", 2, ["debug.profile=[5]"]), ("again", 2, [])):
        options = [f"runs={root}", f"name={name}", "steps=7", *extra]
        assert jobs.run_ranks(world, jobs.train, options) == [0] * world
    return root


def result_of(arguments: list[str], path: Path) -> Any:
    assert results.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def edited(folder: Path, to: Path, device: str, **metrics: float) -> Path:
    """Copy a run to another device, with more metrics in each step."""
    shutil.copytree(folder, to)
    start = json.loads((to / "starts.jsonl").read_text()) | {"device": device}
    (to / "starts.jsonl").write_text(json.dumps(start) + "\n")
    lines = [json.loads(line) | metrics for line in (to / "metrics.jsonl").read_text().splitlines()]
    (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


def test_row_of_a_run(runs: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of([str(runs / "ring")], tmp_path / "out.json")
    (row,) = result["rows"]
    lines = [json.loads(line) for line in (runs / "ring" / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["kind"] == "train" and line["step"] in (3, 4, 6, 7)]  # 5 was profiled
    assert row["steps"] == [3, 7] and row["num_steps"] == 4
    assert row["seconds"] == statistics.median(line["seconds"] for line in measured)
    assert row["tokens_per_s"] == 600 / row["seconds"] and row["tokens"] == 600
    assert row["tflops_3.5x"] == statistics.median(line["tflops"] for line in measured)
    assert row["split"] == {"data": 1, "ring": 2, "ulysses": 1} and row["zero"] == 1 and row["ranks"] == 2
    assert row["data"] == ["recall", "text"] and row["dtype"] == "fp32" and "gib" not in row and "mfu_3x" not in row
    assert set(row["shares"]) == {"attention", "products", "other", "communication", "idle", "communication, hidden too"}
    assert sum(share for name, share in row["shares"].items() if "hidden" not in name) == pytest.approx(1)
    assert all(row["shares"][name] > 0 for name in ("attention", "products", "other"))
    assert row["command"].startswith("torchrun --nproc-per-node=2 -m ringspan.trainer.train data=text")
    assert not any(str(path) in json.dumps(result) for path in (runs, jobs.ROOT))
    assert "data.sources.text.paths=…" in row["command"] and "name=" not in row["command"]
    assert result["command"] == "ringspan results runs/ring --skip 2"
    out = capsys.readouterr().out
    assert "median of 4" in out and "with attention counted 3.5×" in out and "step 5, profiled" in out


def test_both_conventions_are_those_of_planning(runs: Folder, tmp_path: Path) -> None:
    """Counts every sequence of `one` again, from the model and the documents' lengths."""
    (row,) = result_of([str(runs / "one")], tmp_path / "out.json")["rows"]
    config = tokenizer.resolve_config(run_folder.config_of(runs / "one"))
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    counted = []
    for line in (line for line in lines if line["kind"] == "train" and line["step"] >= 3):
        matmuls = 6 * flops.parameters(config.model).matmuls * 600
        attention = line["tflops"] * 1e12 * line["seconds"] - matmuls
        assert 0 < attention < flops.attention_flops(config.model, [150] * 4, 3.5) * 1.0001
        counted.append((matmuls + attention / 3.5 * 3) / line["seconds"] / 1e12)
    assert row["tflops_3x"] == pytest.approx(statistics.median(counted), rel=1e-9)


def test_row_has_measured_and_planned_memory(runs: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edited(runs / "again", tmp_path / "gpu", "NVIDIA H200", gib=0.5, gib_reserved=0.75, tflops=98.9)
    (row,) = result_of([str(folder)], tmp_path / "out.json")["rows"]
    start = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    assert row["memory"] == start["memory"] == "none"
    planned = footprint(tokenizer.resolve_config(run_folder.config_of(folder)), 2, gpu=True).peak / GIB
    assert row["planned_gib"] == planned and row["planned_of_measured"] == planned / 0.5 and row["gib_reserved"] == 0.75
    assert row["mfu_3.5x"] == pytest.approx(0.1) and row["dtype"] == "bf16"
    out = capsys.readouterr().out
    assert "0.50 GiB allocated at the peak, 0.75 reserved" in out and "debug.profile=[6]" in out


def test_loss_differences_and_kernel_noise(runs: Folder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = [str(runs / name) for name in ("one", "ring", "again")]
    result = result_of([*folders, "--plot", str(tmp_path / "loss.png")], tmp_path / "out.json")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    pairs = {tuple(row["runs"]): row for row in result["differences"]}
    assert {pair: row["differ_in"] for pair, row in pairs.items()} == {
        ("one", "ring"): "split", ("one", "again"): "split", ("ring", "again"): "kernel noise"
    }  # fmt: skip
    by_name = {
        name: {
            line["step"]: line["loss"]
            for line in map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
            if line["kind"] == "train"
        }
        for name in ("one", "ring")
    }
    row = pairs["one", "ring"]
    gaps = {step: abs(by_name["one"][step] - by_name["ring"][step]) for step in by_name["one"]}
    assert row["largest"] == max(gaps.values()) == gaps[row["step"]] and row["steps"] == 7
    assert row["largest"] < 1e-4  # fp32, another split


def test_runs_with_other_samples_are_not_compared(runs: Folder, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs / "one", other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("seed: 0", "seed: 1"))
    assert result_of([str(runs / "one"), str(other)], tmp_path / "out.json")["differences"] == []


def test_only_steps_after_the_last_start_are_measured(runs: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(runs / "again", folder)
    start = json.loads((folder / "starts.jsonl").read_text())
    over = start | {"time": "2099-01-01 00:00:00", "ranks": 8}  # the run was finished: no step followed
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(over) + "\n")
    (row,) = result_of([str(folder)], tmp_path / "out.json")["rows"]
    assert row["ranks"] == 2


@pytest.mark.parametrize("hours", [-11, 0, 13])
def test_start_time_has_its_own_time_zone(runs: Folder, tmp_path: Path, hours: int) -> None:
    """The time zone of this machine does not matter."""
    folder = tmp_path / "again"
    shutil.copytree(runs / "again", folder)
    start = json.loads((folder / "starts.jsonl").read_text())
    began = datetime.fromisoformat(start["time"])
    assert began.tzinfo is not None
    local = began.astimezone(timezone(timedelta(hours=hours)))
    before = start | {"time": (local - timedelta(hours=1)).isoformat(" ", "seconds"), "ranks": 8}
    last = start | {"time": local.isoformat(" ", "seconds")}
    (folder / "starts.jsonl").write_text(json.dumps(before) + "\n" + json.dumps(last) + "\n")
    run = results.read(folder)
    assert run.start["ranks"] == 2 and len(run.since) == 7


def test_trace_of_an_earlier_start_is_ignored(runs: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    shutil.copytree(runs / "ring", folder)
    assert "shares" in results.measure(results.read(folder), skip=2)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("profile:\n  - 5", "profile: []"))  # a new start without a profile
    assert "shares" not in results.measure(results.read(folder), skip=2)
    (folder / "config.yaml").write_text(config)
    run = results.read(folder)
    run.since = [step for step in run.since if step["step"] > 5]  # resumed after the profiled step
    assert results._profiled(run) == {}


def test_runs_without_a_common_curve_are_not_compared(runs: Folder) -> None:
    one, ring = (results.read(runs / name) for name in ("one", "ring"))
    assert len(results.loss_differences([one, ring])) == 1
    ring.config.engine.precision = "bf16"
    assert results.loss_differences([one, ring]) == []
    one, ring = (results.read(runs / name) for name in ("one", "ring"))
    one.steps, ring.steps = one.steps[:3], ring.steps[3:]
    assert results.loss_differences([one, ring]) == []


def test_folders_that_give_no_result_are_errors(runs: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = edited(runs / "one", tmp_path / "elsewhere", "NVIDIA H200")
    unknown = tmp_path / "unknown"
    shutil.copytree(runs / "one", unknown)
    (unknown / "config.yaml").write_text("speed: fast\n")
    twin = tmp_path / "two" / "one"
    shutil.copytree(runs / "one", twin)
    broken = tmp_path / "broken"
    shutil.copytree(runs / "ring", broken)
    (broken / "profile" / "step-5-rank-0.json").write_text("{")
    diverged = edited(runs / "one", tmp_path / "diverged", "CPU rank", loss=None)
    killed = tmp_path / "killed"
    shutil.copytree(runs / "one", killed)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    cases = [
        ([str(killed)], "metrics.jsonl: line"),
        ([str(diverged)], "the loss of step 1 is not finite"),
        ([str(tmp_path)], "there is no config.yaml, starts.jsonl, metrics.jsonl: name the folder of a run"),
        ([str(runs / "one"), "--skip", "5"], "2 remain"),
        ([str(runs / "one"), "--skip", "-1"], "--skip -1: it must be at least 0"),
        ([str(runs / "one"), str(elsewhere)], "on CPU rank and on NVIDIA H200"),
        ([str(runs / "one"), str(twin)], "two runs have one name"),
        ([str(unknown)], "not a config of this version"),
        ([str(broken)], "no trace of torch.profiler"),
        ([str(runs / "one"), "--json", str(tmp_path / "no" / "out.json")], "is no folder: make it first"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as stop:
            results.main(arguments)
        assert stop.value.code == 2 and message in capsys.readouterr().err, arguments


def event(category: str, name: str, start: float, seconds: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return dict(ph="X", cat=category, name=name, ts=start * 1e6, dur=seconds * 1e6, tid=thread, args=args)


def test_kinds_of_a_gpu_step_add_up(tmp_path: Path) -> None:
    """A kernel has the kind of the operator that launched it; overlapped communication is not exposed."""
    events = [
        event("cpu_op", "ringspan::ring_forward", 0, 1),
        event("cpu_op", "aten::mm", 0.1, 0.1),  # inside attention, as a backend's matmuls are
        event("cuda_runtime", "cudaLaunchKernel", 0.15, 0.01, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 0.5, 0.01, correlation=2),
        event("cpu_op", "aten::addmm", 1, 0.5),
        event("cuda_runtime", "cudaLaunchKernel", 1.1, 0.01, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 1.2, 0.01, thread=2, correlation=4),  # launched by another thread
        event("kernel", "gemm", 2, 3, correlation=1),
        event("kernel", "flash", 5, 4, correlation=2),
        event("kernel", "ncclDevKernel_SendRecv", 8, 3, correlation=2),  # overlaps attention for one second
        event("kernel", "gemm", 11, 2, correlation=3),
        event("kernel", "triton_poi_add(float*)", 14, 1, correlation=4),
        event("gpu_memset", "Memset", 14.5, 1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 16, 0.5, correlation=2),  # the ring's transfer from another GPU
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 17, 0.25, correlation=4),  # a copy within this GPU
        dict(ph="i", name="not a span", ts=0),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(dict(traceEvents=events)))
    result = breakdown(path)
    expected = dict(attention=7, products=2, other=1.5 + 0.25, communication=2 + 0.5, idle=2 + 1 + 0.5 + 0.5)
    assert result["seconds"] == pytest.approx(expected) and result["communication_with_hidden"] == pytest.approx(3 + 0.5)
    assert result["most_of_other"] == pytest.approx({"triton_poi_add": 1, "Memset": 1, "Memcpy DtoD ": 0.25})


def test_runs_without_steps_are_skipped_and_named(runs: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs/*` also has folders of other programs and of runs that have just started."""
    started = tmp_path / "started"
    shutil.copytree(runs / "one", started)
    (started / "metrics.jsonl").write_text("")
    assert results.main([str(runs / "one"), str(started), str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"skipped: {started}: this run has not finished a step" in out and f"skipped: {tmp_path}: there is no" in out
    assert re.search(r"  loss \d\.\d{3}, the mean of the last 10 steps; held out \d\.\d{3}, the best \d\.\d{3} at step 7", out)
    assert re.search(r"[\d.]+k tokens in \d+s of training", out)


def test_plot_is_written_with_the_runs_and_labelled_by_what_differs(runs: Folder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "again"):
        shutil.copytree(runs / name, tmp_path / name)
    text = (tmp_path / "again" / "config.yaml").read_text()
    (tmp_path / "again" / "config.yaml").write_text(text.replace("lr: 0.003", "lr: 0.004"))
    assert results.main([str(tmp_path / "one"), str(tmp_path / "again"), "--plot"]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["loss-cpu.png"]
    labels = list(results.curves([results.read(tmp_path / name) for name in ("one", "again")]))
    assert labels[0].startswith("one, optim.lr 0.003, split data 1 × ring 1") and labels[1].startswith("again, optim.lr 0.004")


@pytest.mark.parametrize(("largest", "panels"), [(0.0, 1), (0.5, 2)])
def test_equal_curves_get_no_panel_of_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: float, panels: int
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    curves = {"one, seed 1": {1: 3.0, 2: 2.0}, "two, seed 1": {1: 3.0, 2: 2.0 + largest}}
    rows = [dict(runs=["one", "two"], differ_in="kernel noise", largest=largest)]
    draw(plt, curves, rows, "two runs", tmp_path / "loss.png")
    assert len(figures[0].axes) == panels and (tmp_path / "loss.png").is_file()
    monkeypatch.undo()
    plt.close(figures[0])


@pytest.mark.parametrize("operator", ["other", "attention", "ring"])
def test_attention_kernels_count_as_attention_also_outside_of_an_operator(operator: str) -> None:
    assert profile_breakdown._kind("attention_backward", operator) == "attention"
    assert profile_breakdown._kind("triton_poi_fused_mul_silu_1", "other") == "other"
