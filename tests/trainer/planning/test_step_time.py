"""Step time: it follows the work, and attention's speed is a measurement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringspan import ROOT
from ringspan.trainer.memory.plan import NONE, MemoryPlan
from ringspan.trainer.planning import step_time
from ringspan.trainer.planning.flops import attention_flops, parameters
from ringspan.trainer.planning.machines import MACHINES
from tests.trainer.planning.configs import planned

H200 = MACHINES["h200"]
A = MemoryPlan(1, outs=32)  # inputs and (out, lse) of all layers
DOWN = 14336 * 4096  # weights of a layer's last matmul, which a compiled backward does not compute again


def test_step_time_follows_the_work() -> None:
    config = planned()
    target = replace(H200, name="another GPU", matmuls=700e12)  # no speeds of its own in the package
    times = step_time.step_time(config, 4, target, A)
    counts = parameters(config.model)
    again = counts.matmuls - 128256 * 4096 - 32 * DOWN
    assert times["matmuls"] == pytest.approx((6 * counts.matmuls + 2 * again) * 262144 / 4 / 700e12)
    assert times["other kernels"] == pytest.approx(step_time.OTHER * times["matmuls"])
    target = replace(target, attention=(600e12, 500e12))
    times = step_time.step_time(config, 4, target, A)
    longer = step_time.step_time(planned("data.length=524288"), 4, target, A)
    assert longer["attention"] == pytest.approx(4 * times["attention"], rel=1e-3)
    windowed = step_time.step_time(planned("model.windows=[4096,0]"), 4, target, A)["attention"]
    assert 0.45 < windowed / times["attention"] < 0.75


def test_what_a_plan_computes_again() -> None:
    """In weights that all tokens are multiplied with twice, and in forwards of attention."""
    config, target = planned(), replace(H200, name="another GPU", matmuls=700e12, attention=(600e12, 500e12))
    counts = parameters(config.model)
    layer = (counts.matmuls - 128256 * 4096) // 32
    project = 4096 * (4096 + 2 * 1024)
    second = 2 * 262144 / 4 / 700e12  # of one weight
    forward = attention_flops(config.model, [262144], 1.0) / 4 / 600e12
    base = step_time.step_time(config, 4, target, NONE)

    def again(plan: MemoryPlan) -> tuple[float, float]:
        times = step_time.step_time(config, 4, target, plan)
        return (times["matmuls"] - base["matmuls"]) / second, (times["attention"] - base["attention"]) / forward

    both = 32 * (layer - DOWN)
    assert again(A) == pytest.approx((both, 0))
    assert again(replace(A, rows=8192)) == pytest.approx((both + 32 * project, 0))  # again for each group of heads
    assert again(MemoryPlan(4, outs=32)) == pytest.approx((both + 24 * (layer - project), 0))
    assert again(MemoryPlan(1, outs=8)) == pytest.approx((both + 24 * project, 24 / 32))
    assert again(MemoryPlan(4)) == pytest.approx((both + 32 * project + 24 * (layer - project), 1))


def test_groups_chunks_and_slow_copies_cost_time() -> None:
    config, target = planned("parallel.ring=1", "parallel.data=4", "data.batch=4"), H200
    plain = step_time.step_time(config, 4, target, A)
    assert plain["further chunks and groups"] == 0
    grouped = step_time.step_time(config, 4, target, replace(A, heads=2, rows=65536))
    assert grouped["further chunks and groups"] == pytest.approx(
        32 * 3 * 3 * (step_time.CHUNK_SECONDS + step_time.GROUP_SECONDS)
    )
    assert step_time.step_time(config, 4, target, replace(A, outs_on_host=32))["exposed copies to the host"] == 0
    short = planned("data.length=1024", "data.batch=4", "parallel.ring=1", "parallel.data=4", "model.mlp_dim=64")
    slow = step_time.step_time(short, 4, target, replace(A, outs_on_host=32, inputs_on_host=32))["exposed copies to the host"]
    both = 32 * (1024 * 4096 * 4 + 1024 * 32 * 4) / step_time.HOST_COPIES
    assert 0.1 * both < slow < 2 * both


def test_planned_time_of_the_measured_runs() -> None:
    """Plans against docs/results/train-h200.json; their layers kept attention's (out, lse), or everything."""
    rows = {row["run"]: row for row in json.loads((ROOT / "docs/results/train-h200.json").read_text())["rows"]}
    for run, plan, options in (
        ("llama-8b-256k", A, []),
        ("llama-1b-128k", NONE, ["model=llama-1b", "data.length=131072", "engine=zero1"]),
    ):
        seconds = sum(step_time.step_time(planned(*options), 4, H200, plan).values())
        assert seconds == pytest.approx(rows[run]["seconds"], rel=0.05), run


def test_attention_speed_is_a_named_measurement() -> None:
    forward, backward, source = step_time.attention_speed(planned(), H200)
    assert source.startswith("d128-gqa4-causal-32k in attention-again-h200.json")
    assert 100e12 < backward < forward < 989e12
    scaled = step_time.attention_speed(planned("data.length=32768"), MACHINES["a100"])
    own = step_time.attention_speed(planned("data.length=32768"), MACHINES["h100"])
    assert own[2] == "d128-gqa4-causal-32k in attention-h100.json"
    assert (
        scaled[0] == pytest.approx(own[0] * 312 / 989)
        and scaled[2] == f"{own[2]}, scaled from NVIDIA H100 80GB HBM3 by the peaks"
    )
    million = step_time.attention_speed(planned("data.length=1048576"), MACHINES["h100"])
    assert million[2] == "d128-group4-causal-1024k in memory-m0-h100.json"
    narrow = step_time.attention_speed(planned("data.length=1048576", "model.head_dim=64"), MACHINES["h100"])
    assert narrow[2] == "d64-gqa4-causal-32k in attention-h100.json"


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
