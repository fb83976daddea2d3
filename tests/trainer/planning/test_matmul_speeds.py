"""The planner's use of measured matmuls: by shape, elementwise kernels and optimizer as terms of their own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringspan.kernels.bench import matmul
from ringspan.trainer import check
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.memory.plan import NONE, MemoryPlan
from ringspan.trainer.planning import matmul_speeds, step_time
from ringspan.trainer.planning.flops import parameters
from ringspan.trainer.planning.machines import MACHINES

H200 = MACHINES["h200"]


def gpt2() -> Config:
    composed = compose.load(["experiment=gpt2_124m", "hardware=h200", "hardware.gpus=1"], world_size=1, planning=True)
    return tokenizer.resolve_config(composed.config)


def result(device: str, speed: float, date: str = "2026-11-26") -> dict[str, Any]:
    """Speeds that depend on the shape: half for small layers; a head takes 1 ns per token and 1M weights, four times if odd."""
    rows = []
    for inputs, outputs in matmul.LAYERS:
        factor = speed * (0.5 if inputs < 1024 else 1.0)
        speeds = dict(forward=factor, input_gradient=factor, weight_gradient=factor / 2)
        rows += [dict(rows=count, inputs=inputs, outputs=outputs) | speeds for count in matmul.ROWS]
    heads = [
        dict(inputs=inputs, outputs=outputs, s_per_token=1e-15 * inputs * outputs * (4 if outputs % 2 else 1))
        for inputs, outputs in matmul.HEADS
    ]
    others = dict(elementwise_bytes_per_s=4e12, optimizer_s_per_weight=1e-11)
    return dict(device=device, date=date, kind="matmul", heads=heads, rows=rows) | others


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, device, speed in (("a", "NVIDIA H200", 600.0), ("b", "NVIDIA H100 80GB HBM3", 500.0)):
        (tmp_path / f"matmul-{name}.json").write_text(json.dumps(result(device, speed)))
    (tmp_path / "matmul-old.json").write_text(json.dumps(result("NVIDIA H200", 1.0, "2025-01-01")))
    monkeypatch.setattr(matmul_speeds, "SPEEDS", tmp_path / "speeds.json")
    matmul_speeds.SPEEDS.write_text(json.dumps(matmul_speeds.measured_speeds(tmp_path)))
    return tmp_path


@pytest.mark.usefixtures("measured")
def test_a_step_is_the_sum_of_its_layers_at_their_own_speeds() -> None:
    config = gpt2()
    times = step_time.step_time(config, 1, H200, NONE)
    model, tokens = config.model, config.data.batch * config.data.length
    head = model.vocabulary * model.dim
    assert model.vocabulary == 50257
    per_flop = 1 / 1e12 * 2 * tokens * (1 + 1 + 2)  # forward and input gradient at full speed, weight gradient at half
    down = 12 * 768 * 3072  # 3072 inputs are no small layer
    layers = parameters(model).matmuls - head
    assert times["matmuls of layers"] == pytest.approx(per_flop * ((layers - down) / 300 + down / 600))
    assert times["head and loss"] == pytest.approx(4e-15 * tokens * head)
    assert times["optimizer"] == pytest.approx(1e-11 * parameters(model).total)
    passes = model.layers * 2 * (36 * model.dim + 9 * model.mlp_dim)
    assert times["other kernels"] == pytest.approx(tokens * passes / 4e12)
    aligned = step_time.step_time(replace(config, model=replace(model, vocabulary=50304)), 1, H200, NONE)
    assert aligned["head and loss"] / times["head and loss"] == pytest.approx(50304 / 50257 / 4)


@pytest.mark.usefixtures("measured")
def test_layers_that_are_computed_again_take_time() -> None:
    config = gpt2()
    plain, again = (step_time.step_time(config, 1, H200, plan) for plan in (NONE, MemoryPlan(1, outs=12)))
    assert again["other kernels"] / plain["other kernels"] == pytest.approx(4 / 3)
    down = 2 * 262144 * 12 * 3072 * 768 / 600e12  # the last matmul of each layer is not computed again
    assert again["matmuls of layers"] == pytest.approx(
        plain["matmuls of layers"] * 5 / 4 - down
    )  # weight gradients count twice
    assert again["head and loss"] == plain["head and loss"]


@pytest.mark.usefixtures("measured")
def test_each_device_has_its_own_rows() -> None:
    h200, h100 = (step_time.step_time(gpt2(), 1, MACHINES[name], NONE) for name in ("h200", "h100"))
    assert h100["matmuls of layers"] / h200["matmuls of layers"] == pytest.approx(600 / 500)
    assert matmul_speeds.speeds_of(MACHINES["a100"]) is None
    assert matmul_speeds.speeds_of(replace(H200, name="NVIDIA H100 PCIe")) is None  # the measured one is an SXM


@pytest.mark.parametrize("content", [None, "[]"])
def test_without_measurements_every_device_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """All matmuls have one speed then, and no plan is refused."""
    monkeypatch.setattr(matmul_speeds, "SPEEDS", tmp_path / "speeds.json")
    if content is not None:
        matmul_speeds.SPEEDS.write_text(content)
    for name, machine in MACHINES.items():
        assert matmul_speeds.speeds_of(machine) is None
        assert check.main(["experiment=gpt2_124m", f"hardware={name}", "hardware.gpus=1"]) == 0
        assert f"matmuls at {machine.matmuls / 1e12:.4g}" in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_check_names_the_measured_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["experiment=gpt2_124m", "hardware=h100", "hardware.gpus=1"]) == 0
    out = capsys.readouterr().out
    assert "matmuls by shape, as measured on NVIDIA H100 80GB HBM3" in out and "head and loss" in out


def test_the_packages_data_are_those_of_the_results() -> None:
    results = Path(__file__).parents[3] / "docs" / "results"
    assert json.loads(matmul_speeds.SPEEDS.read_text()) == matmul_speeds.measured_speeds(results), "run `make tables`"
