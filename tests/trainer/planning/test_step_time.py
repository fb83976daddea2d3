"""Step time: it follows the work, and attention's speed is a measurement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringspan import ROOT
from ringspan.trainer.planning import step_time
from ringspan.trainer.planning.flops import parameters
from ringspan.trainer.planning.machines import MACHINES
from tests.trainer.planning.configs import planned

H200 = MACHINES["h200"]


def test_step_time_follows_the_work() -> None:
    config = planned()
    target = replace(H200, matmuls=700e12)
    times = step_time.step_time(config, 4, target)
    counts = parameters(config.model)
    layer_weights = counts.matmuls - 128256 * 4096
    assert times["matmuls"] == pytest.approx((6 * counts.matmuls + 2 * layer_weights) * 262144 / 4 / 700e12)
    longer = step_time.step_time(planned("data.length=524288"), 4, target)
    assert longer["attention"] == pytest.approx(4 * times["attention"], rel=1e-3)
    assert step_time.step_time(planned("engine.activations=full"), 4, target)["attention"] > times["attention"]
    windowed = step_time.step_time(planned("model.windows=[4096,0]"), 4, target)["attention"]
    assert 0.45 < windowed / times["attention"] < 0.75
    assert step_time.step_time(planned("engine.activations=none"), 4, target)["matmuls"] < times["matmuls"]


def test_attention_speed_is_a_named_measurement() -> None:
    forward, backward, source = step_time.attention_speed(planned(), H200)
    assert source.startswith("d128-gqa4-causal-32k in attention-again-h200.json")
    assert 100e12 < backward < forward < 989e12
    scaled = step_time.attention_speed(planned(), MACHINES["a100"])
    assert scaled[0] == pytest.approx(forward * 312 / 989) and "scaled from NVIDIA H200" in scaled[2]


def test_attention_speed_is_that_of_the_selected_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest shape; a portable kernel's only where no other was measured; of equal shapes the newest result."""
    speeds = tmp_path / "speeds.json"
    monkeypatch.setattr(step_time, "SPEEDS", speeds)

    def save(name: str, *rows: tuple[str, str, int | None], date: str = "2026-11-20") -> None:
        shapes = [dict(name=s, causal=True, head_dim=128, length=32768, window=w, documents=None) for s, _, w in rows]
        speed = dict(ours=True, status="ok", forward_tflops=500, backward_tflops=400)
        measured = [dict(shape=s, kernel=k, **speed) for s, k, _ in rows]
        (tmp_path / name).write_text(json.dumps(dict(device="NVIDIA H200", date=date, shapes=shapes, rows=measured)))
        speeds.write_text(json.dumps(step_time.measured_speeds(tmp_path)))

    windows = planned("model.windows=[4096]")
    save("attention-a.json", ("causal", "triton", None), ("window", "triton", 4096))
    assert step_time.attention_speed(planned(), H200)[2] == "causal in attention-a.json"
    assert step_time.attention_speed(windows, H200)[2] == "window in attention-a.json"
    save("attention-b.json", ("causal", "hopper", None))
    assert step_time.attention_speed(planned(), H200)[2] == "causal in attention-b.json"
    assert step_time.attention_speed(windows, H200)[2] == "causal in attention-b.json"
    save("attention-c.json", ("window", "hopper", 4096))
    assert step_time.attention_speed(windows, H200)[2] == "window in attention-c.json"
    save("attention-d.json", ("window", "hopper", 4096), date="2026-11-19")
    save("attention-e.json", ("window", "hopper", 4096), date="2026-11-21")
    assert step_time.attention_speed(windows, H200)[2] == "window in attention-e.json"


def test_shipped_speeds_are_those_of_docs_results() -> None:
    rows = step_time.measured_speeds(ROOT / "docs/results")
    assert rows and json.loads(step_time.SPEEDS.read_text()) == rows, "run `make tables`"
