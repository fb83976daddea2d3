"""The kernel benchmark: FLOP counts, checks before timing, counters, result files, and a run without a GPU."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringspan import ROOT
from ringspan.kernels.bench import __main__ as bench
from ringspan.kernels.bench import baselines, energy, gate, measure, shapes
from ringspan.kernels.bench.baselines import AttentionKernel
from ringspan.kernels.bench.shapes import Shape


def visible_pairs(shape: Shape) -> int:
    return int(shape.visible(torch.arange(shape.length)).sum())


MASKS = pytest.mark.parametrize(
    "options",
    [
        dict(causal=False),
        dict(causal=True, window=5),
        dict(causal=False, window=5),
        dict(causal=True, window=100),
        dict(causal=True, documents=(1, 20, 16)),
        dict(causal=False, documents=(1, 20, 16)),
        dict(causal=True, documents=(1, 20, 16), window=4),
    ],
)


@MASKS
def test_tiles_are_those_with_a_visible_pair(options: dict) -> None:
    shape = Shape("s", 3, 37, 2, 1, 16, **options)
    visible = torch.nn.functional.pad(shape.visible(torch.arange(37)), (0, 3, 0, 3))
    assert shape.tiles(8) == 3 * 2 * int(visible.view(5, 8, 5, 8).any(3).any(1).sum())


@MASKS
def test_pairs_are_the_visible_pairs(options: dict) -> None:
    shape = Shape("s", 1, 37, 2, 1, 16, **options)
    assert shape.pairs() == visible_pairs(shape)
    assert shapes.mask_of(shape).visible(torch.arange(37), torch.arange(37))[0].equal(shape.visible(torch.arange(37)))


def test_flops_and_speeds_follow_the_convention() -> None:
    assert Shape("s", 2, 1024, 16, 4, 128).flops() == 4 * 2 * 16 * 1024**2 / 2 * 128
    assert Shape("s", 2, 1024, 16, 4, 128, causal=False).flops() == 4 * 2 * 16 * 1024**2 * 128
    assert Shape("s", 2, 1024, 16, 4, 192, v_head_dim=128).flops() == 2 * 2 * 16 * 1024**2 / 2 * (192 + 128)
    row = measure.speeds([(1.0, 2.0), (2.0, 4.0), (4.0, 8.0)], flops=1e12)
    assert row["forward_tflops"] == pytest.approx(500) and row["backward_tflops"] == pytest.approx(2500 / 4)
    assert row["both_tflops"] == pytest.approx(3500 / 6)
    assert (row["forward_tflops_min"], row["forward_tflops_max"]) == pytest.approx((250, 1000))


def test_shapes_are_consistent() -> None:
    for name, shape in shapes.SHAPES.items():
        assert name == shape.name
        if shape.length >= 2048:
            assert 0.93 * 2048 < shape.heads * shape.v_width < 1.07 * 2048 and shape.batch * shape.length >= 16384
    groups = (*shapes.DEFAULT_SHAPES.values(), *shapes.GROUPS.values())
    assert {name for names in groups for name in names} <= set(shapes.SHAPES) and not set(shapes.GROUPS) & set(shapes.SHAPES)
    with pytest.raises(ValueError, match="length=37"):
        Shape("s", 1, 37, 2, 1, 16, documents=(1, 2))


@pytest.mark.parametrize("options", [dict(), dict(window=7), dict(documents=(5, 32)), dict(v_head_dim=24)])
def test_reference_equals_autograd_of_the_definition(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "CHUNK", 37 * 2 * 10)  # chunks of ten rows
    shape = Shape("s", 1, 37, 2, 1, 16, **options)
    sizes = ((2, 16), (1, 16), (1, shape.v_width), (2, shape.v_width))
    q, k, v, dout = (torch.randn(37, *size, dtype=torch.float64) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    s = torch.einsum("qgd,kgd->gqk", q, k.expand_as(q)) / 4
    p = s.masked_fill(~shape.visible(torch.arange(37)), -torch.inf).softmax(-1)
    out = torch.einsum("gqk,kgd->qgd", p, v.expand(-1, 2, -1))
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    assert out.shape == dout.shape
    singles = [x.detach().float() for x in (q, k, v, dout)]
    for x, ref in zip(baselines.reference_results(singles, shape), expected, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, ref, rtol=1e-5, atol=1e-5)


def run(tmp_path, *argv: str) -> tuple[int, dict]:
    path = tmp_path / "result.json"
    code = bench.main(["--device", "cpu", "--shapes", "tiny", "--rep", "1", "--rounds", "2", "--json", str(path), *argv])
    return code, json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_benchmark_completes_on_a_cpu(tmp_path, capsys: pytest.CaptureFixture) -> None:
    code, result = run(tmp_path)
    assert code == 0
    assert result["kind"] == "attention" and result["versions"]["torch"] and result["date"] and result["device"]
    assert str(tmp_path) not in json.dumps(result)
    assert [shape["name"] for shape in result["shapes"]] == ["tiny"]
    rows = {row["kernel"]: row for row in result["rows"]}
    for name in ("reference", "chunked", "sdpa-flash", "sdpa-math"):
        row = rows[name]
        assert row["status"] == "ok", row
        assert row["error_out"] < 1e-5 and row["error_grad"] < 1e-5
        for direction in ("forward", "backward"):
            low, mid, high = (row[f"{direction}_tflops{end}"] for end in ("_min", "", "_max"))
            assert 0 < low <= mid <= high < math.inf and row[f"{direction}_ms"] > 0
    assert all(row["status"] == "ok" or row["note"] for row in rows.values())
    assert rows["reference"]["ours"] and not rows["sdpa-math"]["ours"]
    assert "our best ÷ the best baseline: forward" in capsys.readouterr().out


def _crash(q, k, v, shape):
    raise RuntimeError("boom\n at dawn")


def _missing(q, k, v, shape):
    import no_such_baseline  # noqa: F401


def _nan_gradient(q, k, v, shape):
    out = baselines.BASELINES["sdpa-math"].run(q, k, v, shape)
    out.register_hook(lambda grad: grad * float("nan"))
    return out


FAULTY_KERNELS = {
    "garbage": (lambda q, k, v, shape: q * 1.0 + k.mean() + v.mean(), "wrong", "error above"),
    "nan": (lambda q, k, v, shape: q + k.mean() * v.mean() * float("nan"), "wrong", "NaN"),
    "nan-gradient": (_nan_gradient, "wrong", "NaN"),
    "crash": (_crash, "failed", "RuntimeError: boom at dawn"),
    "missing": (_missing, "skipped", "not installed"),
}


@pytest.mark.parametrize("name", FAULTY_KERNELS)
def test_faulty_baselines_are_not_timed(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, status, note = FAULTY_KERNELS[name]
    monkeypatch.setitem(baselines.BASELINES, name, AttentionKernel(name, call, ("cpu",)))
    code, result = run(tmp_path, "--only", f"{name},sdpa-math")
    row, other = result["rows"]
    assert row["status"] == status and note in row["note"] and "forward_tflops" not in row
    assert other["status"] == "ok"
    assert code == 0  # only a wrong kernel of ours fails the command


def test_a_wrong_kernel_of_ours_fails_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "attention", lambda q, k, v, **options: q * k.mean() * v.mean())
    code, result = run(tmp_path, "--only", "chunked")
    assert code == 1 and result["rows"][0]["status"] == "wrong"


@pytest.mark.parametrize(
    "argv, remedy",
    [
        (["--only", "flux"], "the kernels are"),
        (["--rounds", "0"], "at least 1"),
        (["--cycles"], "leave it out here"),
        (["--energy"], "leave it out here"),
        (["--counters"], "leave it out here"),
        (["--json", "no/such/folder/x.json"], "no/such/folder is no folder: make it first, or pass another path with --json"),
        (["--shapes", "huge"], "invalid choice"),
    ],
)
def test_bad_options_name_a_remedy(argv: list[str], remedy: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *argv])
    assert remedy in capsys.readouterr().err


def test_dense_kernels_are_skipped_at_large_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="length=2048: the scores take 2 GiB; this device runs dense kernels up to 1 GiB"):
        shapes.SHAPES["d128-causal-2k"].check_dense(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    shapes.SHAPES["d128-causal-8k"].check_dense(torch.device("cuda"))
    with pytest.raises(ValueError, match="the scores take 16 GiB; this device runs dense kernels up to 10 GiB"):
        shapes.SHAPES["d128-causal-16k"].check_dense(torch.device("cuda"))


def test_device_names_become_file_names() -> None:
    assert measure.slug("NVIDIA H200") == "h200"
    assert measure.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert measure.slug("CPU, x86_64") == "cpu"


def test_save_writes_docs_results_of_a_checkout() -> None:
    assert measure.RESULTS == ROOT / "docs/results"
    assert measure.result_path(None, "", "attention-cpu") == ROOT / "docs/results/attention-cpu.json"
    assert measure.result_path(None, None, "attention-cpu") is None


def test_save_without_a_checkout_creates_a_results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package has no docs/results: results are written below the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "RESULTS", measure.results_folder(tmp_path / "site-packages"))
    argv = ["--device", "cpu", "--shapes", "tiny", "--rep", "1", "--rounds", "1", "--only", "sdpa-math"]
    assert bench.main([*argv, "--save", "mine"]) == 0
    assert json.loads((tmp_path / "results/mine.json").read_text())["rows"][0]["status"] == "ok"
    assert not (tmp_path / "site-packages").exists()


def test_save_into_a_folder_that_cannot_be_made_names_json(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--shapes", "tiny", "--save"])
    assert "--json" in capsys.readouterr().err


def test_commit_is_that_of_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """site-packages in the repository of another project must not record that project's commit."""
    if (ROOT / ".git").exists():
        assert measure.machine(torch.device("cpu"))["commit"]
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "_output", lambda *command: "another project's commit")
    assert measure.machine(torch.device("cpu"))["commit"] is None


def test_counters_are_added_to_the_rows(capsys: pytest.CaptureFixture) -> None:
    """Each direction's call is counted; if a counter fails, the times stay valid."""
    shape, cpu = shapes.SHAPES["tiny"], torch.device("cpu")

    def count(call, ms: float, rep: float, device: torch.device) -> dict[str, float]:
        call()
        return {"mcycles": ms * 2, "joules": rep, "watts": 700.0, "watts_limit": 700.0, "held_down": 0.5}

    def fails(*_: object) -> dict[str, float]:
        raise RuntimeError("boom")

    rows = measure.measure(shape, ["sdpa-math"], cpu, torch.float32, 1, 1.0, [count])
    progress = capsys.readouterr().err.splitlines()
    assert progress[0].startswith("tiny: the reference, then 1 kernels") and "tiny: round 1 of 1" in progress
    for direction in baselines.DIRECTIONS:
        assert rows[0][f"{direction}_mcycles"] == 2 * rows[0][f"{direction}_ms"] and rows[0][f"{direction}_joules"] == 1.0
    assert "million cycles  1 / 1 J at 700 / 700 W" in bench.report(shape, rows)
    (row,) = measure.measure(shape, ["sdpa-math"], cpu, torch.float32, 1, 1.0, [fails])
    assert row["status"] == "ok" and row["forward_ms"] > 0 and row["note"] == "RuntimeError: boom"


@pytest.mark.parametrize("name", ["d192-128-causal-8k", "d96-causal-16k", "d128-causal-1k"])
def test_a_head_dim_is_checked_and_timed(name: str, capsys: pytest.CaptureFixture) -> None:
    """The shapes of a GPU, shortened for a CPU."""
    shape = replace(shapes.SHAPES[name], batch=1, length=64)
    (row,) = measure.measure(shape, ["chunked"], torch.device("cpu"), torch.float32, 1, 1.0, [])
    assert row["status"] == "ok" and row["error_grad"] < 1e-5
    assert ("of 192 and 128 in v" in bench.report(shape, [row])) == bool(shape.v_head_dim)


@pytest.fixture
def fake_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """Milliseconds (forward, backward) of a kernel, instead of measured ones; the tests change them."""
    times = {"chunked": (2.0, 4.0), "sdpa-math": (1.0, 1.0), "sdpa-flash": (4.0, 8.0)}
    table = measure.kernels()
    names = {id(kernel.run): name for name, kernel in table.items()}
    monkeypatch.setattr(measure, "kernels", lambda: table)
    monkeypatch.setattr(measure, "time_round", lambda run, *_: times[names[id(run)]])
    return times


def run_gate(*argv: str) -> int:
    return bench.main(["--device", "cpu", "--rounds", "7", "--rep", "1", *argv])


def test_gate_fails_when_a_ratio_falls_by_more_than_three_percent(tmp_path: Path, fake_times: dict, capsys) -> None:
    path = tmp_path / "before.json"
    only = ["--only", "chunked,sdpa-math,sdpa-flash"]
    assert run_gate("--shapes", "tiny", *only, "--json", str(path)) == 0
    before = gate.ratios(json.loads(path.read_text())["rows"])
    assert before["tiny", "chunked", "sdpa-math", "forward"] == pytest.approx(0.5)
    assert before["tiny", "chunked", "sdpa-flash", "backward"] == pytest.approx(2) and len(before) == 4
    for factor in (2.0, 1 / 0.98):  # all kernels at half the clock, or ours 2 % slower
        for name, (forward, backward) in dict(fake_times).items():
            slower = factor if factor == 2 or name == "chunked" else 1
            fake_times[name] = (forward * slower, backward * slower)
        assert run_gate("--gate", str(path)) == 0, factor
    capsys.readouterr()
    fake_times["chunked"] = (fake_times["chunked"][0], fake_times["chunked"][1] * 1.02)  # 4 % in all, in the backward only
    assert run_gate("--gate", str(path)) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "too low" in line]
    assert len(failed) == 2 and all("backward" in line for line in failed)


def test_gate_fails_when_a_kernel_is_missing(tmp_path: Path, fake_times: dict, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "before.json"
    assert run_gate("--shapes", "tiny", "--only", "chunked,sdpa-math", "--json", str(path)) == 0
    assert run_gate("--gate", str(path), "--only", "chunked") == 1
    assert capsys.readouterr().out.count("missing  too low") == 2


def test_gate_rejects_results_that_cannot_be_compared(tmp_path: Path, fake_times: dict, capsys) -> None:
    path = tmp_path / "before.json"
    assert run_gate("--shapes", "tiny", "--only", "chunked,sdpa-math", "--json", str(path)) == 0
    good = json.loads(path.read_text())
    unnamed = [row | {"shape": "d7"} for row in good["rows"]]
    for change, message in (
        (dict(device="NVIDIA H200"), "was measured on NVIDIA H200 in fp32"),
        (dict(dtype="bf16"), "in bf16"),
        (dict(rounds=6), "has 6 rounds"),
        (dict(kind="ring"), "holds no kernel of ours next to a baseline"),
        (dict(rows=good["rows"][:1]), "holds no kernel of ours next to a baseline"),
        (dict(rows=unnamed), "unknown shapes, d7"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(SystemExit):
            run_gate("--gate", str(path))
        error = capsys.readouterr().err
        assert message in error and "measure one here with --rounds 7 --json" in error
    path.write_text(json.dumps(good))
    with pytest.raises(SystemExit):
        run_gate("--gate", str(path), "--rounds", "6")
    assert "use --rounds 7 or more, not 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_gate("--gate", str(tmp_path / "no.json"))
    assert "measure one here" in capsys.readouterr().err


class Driver:
    """Simulated NVML and GPU: the counter updates every 0.1 s, a query takes 4 ms, the GPU draws 500 W busy and 100 W idle."""

    def __init__(self) -> None:
        self.code, self.watts = 0, (500.0, 100.0)
        self.seconds = self.ends = 0.0  # the host's time, and the time when the GPU completes its work
        self.busy_seconds = 0.0  # of the GPU, until the host's time
        self.queries = 0  # of the throttle reasons

    def launch(self, ms: float) -> None:
        """A call: the launch takes no host time, and runs after the previous ones."""
        self.ends = max(self.ends, self.seconds) + ms / 1000

    def advance(self, time: float) -> None:
        self.busy_seconds += max(0.0, min(time, self.ends) - self.seconds)
        self.seconds = max(self.seconds, time)

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
        return 0 if name == b"GPU-1234" else 6

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object, value) -> int:
        value._obj.value = 700_000
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, value) -> int:
        self.queries += 1
        value._obj.value = 0x4 if self.queries % 4 else 0x1  # power cap, or idle
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object, value) -> int:
        tick = self.seconds // 0.1 * 0.1
        busy = max(0.0, self.busy_seconds - (self.seconds - tick))
        value._obj.value = int(1000 * (self.watts[0] * busy + self.watts[1] * (tick - busy)))
        self.advance(self.seconds + 0.004)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    class Event:
        def record(self, stream: object) -> None:
            self.ends = driver.ends

        def synchronize(self) -> None:
            driver.advance(self.ends)

    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: driver.seconds)
    return driver


def test_joules_are_those_of_one_call(driver: Driver) -> None:
    """For any number of calls between two reads of the counter; the GPU stays busy during the driver's query."""
    for ms in (0.01, 3.0, 70.0, 2000.0):
        counted = energy.count_energy(lambda ms=ms: driver.launch(ms), ms, 200.0, torch.device("cuda"))
        assert counted["joules"] == pytest.approx(0.5 * ms, rel=0.05) and counted["watts"] == pytest.approx(500, rel=0.05)
        assert counted["watts_limit"] == 700 and counted["held_down"] == pytest.approx(0.75, abs=0.25)


def test_failing_energy_counters_are_reported(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> None:
        energy.count_energy(lambda: driver.launch(100.0), 100.0, 200.0, torch.device("cuda"))

    faults = ((dict(watts=(0.0, 0.0)), "does not change"), (dict(code=9), "nvmlInit_v2 fails with NVML's error 9"))
    for change, message in faults:
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(driver, name, value)
            with pytest.raises(ValueError, match=f"{message}.*leave it out"):
                count()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="leave it out"):
        energy.EnergyCounter(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.hopper
def test_cycles_are_those_of_one_call() -> None:
    from ringspan.kernels.bench.clock_cycles import cycles_of

    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    one, two = cycles_of(lambda: x @ x, 20, device), cycles_of(lambda: x @ x @ x, 20, device)
    assert 1.8 * one < two < 2.2 * one
    assert one > 4096**3 / (132 * 2048)  # the peak of an SM, in multiply-adds per cycle


@pytest.mark.gpu
def test_watts_of_a_gpu_are_plausible() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    counted = energy.count_energy(lambda: x @ x, 0.2, 200.0, x.device)
    assert 100 < counted["watts"] < 1500 and 0.01 < counted["joules"] < 1
