"""The planner's use of measured matmuls: by shape, elementwise kernels and optimizer as terms of their own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringspan.kernels.bench import matmul
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.memory.plan import NONE
from ringspan.trainer.planning import matmul_speeds, step_time
from ringspan.trainer.planning.flops import parameters
from ringspan.trainer.planning.machines import MACHINES

H200 = MACHINES["h200"]


def gpt2() -> Config:
    composed = compose.load(["experiment=gpt2_124m", "hardware=h200", "hardware.gpus=1"], world_size=1, planning=True)
    return tokenizer.resolve_config(composed.config)


def result(device: str, speed: float, date: str = "2026-11-26") -> dict[str, Any]:
    """Speeds that depend on the shape: half for small layers, a quarter for an odd number of outputs."""
    rows = []
    for inputs, outputs in matmul.LAYERS:
        factor = (0.5 if inputs < 1024 else 1.0) * (0.25 if outputs % 2 else 1.0)
        speeds = dict(forward=speed * factor, input_gradient=speed * factor, weight_gradient=speed * factor / 2)
        rows += [dict(rows=count, inputs=inputs, outputs=outputs) | speeds for count in matmul.ROWS]
    others = dict(elementwise_bytes_per_s=4e12, optimizer_s_per_weight=1e-11)
    return dict(device=device, date=date, kind="matmul", rows=rows) | others


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, device, speed in (("a", "NVIDIA H200", 600.0), ("b", "NVIDIA H100 80GB HBM3", 500.0)):
        (tmp_path / f"matmul-{name}.json").write_text(json.dumps(result(device, speed)))
    (tmp_path / "matmul-old.json").write_text(json.dumps(result("NVIDIA H200", 1.0, "2025-01-01")))
    monkeypatch.setattr(matmul_speeds, "SPEEDS", tmp_path / "speeds.json")
    matmul_speeds.write(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("measured")
def test_a_step_is_the_sum_of_its_layers_at_their_own_speeds() -> None:
    config = gpt2()
    times = step_time.step_time(config, 1, H200, NONE)
    model, tokens = config.model, config.data.batch * config.data.length
    counts, head = parameters(model), model.vocabulary * model.dim
    assert model.vocabulary == 50257
    per_flop = 1 / 1e12 * 2 * tokens * (1 + 1 + 2)  # forward and input gradient at full speed, weight gradient at half
    expected = per_flop * ((counts.matmuls - head) / 300 + head / 75)
    wide = per_flop * (12 * 768 * 3072) * (1 / 600 - 1 / 300)  # 3072 inputs are no small layer
    assert times["matmuls"] == pytest.approx(expected + wide)
    assert times["optimizer"] == pytest.approx(1e-11 * counts.total)
    layers = model.layers * 2 * (36 * model.dim + 9 * model.mlp_dim)
    assert times["other kernels"] == pytest.approx(tokens * (layers + 12 * model.vocabulary) / 4e12)


@pytest.mark.usefixtures("measured")
def test_each_device_has_its_own_rows_and_a_measured_machine_its_own_speed() -> None:
    config = gpt2()
    h200, h100 = (step_time.step_time(config, 1, MACHINES[name], NONE)["matmuls"] for name in ("h200", "h100"))
    assert h100 / h200 == pytest.approx(600 / 500)
    own = step_time.step_time(config, 1, replace(H200, matmuls=700e12), NONE)
    assert own["matmuls"] == pytest.approx(6 * parameters(config.model).matmuls * 262144 / 700e12)
    assert matmul_speeds.speeds_of(MACHINES["a100"]) is None


def test_without_measurements_all_matmuls_have_one_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_speeds, "SPEEDS", tmp_path / "absent.json")
    assert matmul_speeds.speeds_of(H200) is None


def test_the_packages_data_are_those_of_the_results() -> None:
    results = Path(__file__).parents[3] / "docs" / "results"
    assert json.loads(matmul_speeds.SPEEDS.read_text()) == matmul_speeds.measured_speeds(results), "run `make tables`"


def test_the_benchmark_measures_every_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "matmul-cpu.json"
    assert matmul.main(["--device=cpu", "--repeats=1", f"--json={path}"]) == 0
    (result,) = matmul_speeds.measured_speeds(tmp_path)
    assert {(row["inputs"], row["outputs"]) for row in result["rows"]} == {(64, 128), (64, 257)}
    assert all(row[name] > 0 for row in result["rows"] for name in matmul.DIRECTIONS) and "TB/s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matmul.main(["--repeats=0"])


@pytest.mark.gpu
def test_planned_matmuls_of_this_gpu_are_measured_ones(tmp_path: Path) -> None:
    import torch

    device = torch.device("cuda")
    row = matmul.measure_layer(16384, 768, 50257, device, torch.bfloat16, 5)
    aligned = matmul.measure_layer(16384, 768, 50304, device, torch.bfloat16, 5)
    assert all(10 < row[name] < 1000 and aligned[name] > 0.9 * row[name] for name in matmul.DIRECTIONS), (row, aligned)
