"""The planner: terms that are counted by hand, orders that must hold, and the command with its exit codes."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ringspan import ROOT, Layout, Mask
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import make_plan
from ringspan.parallel.ring import ring_backward
from ringspan.parallel.transport import copy_engine, select
from ringspan.parallel.transport.p2p import P2PTransport
from ringspan.trainer import check, loop
from ringspan.trainer.activation_checkpointing import install
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.model import GPT
from ringspan.trainer.planning import memory as footprint_module
from ringspan.trainer.planning import step_time
from ringspan.trainer.planning.flops import parameters
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import GIB, RESERVE, footprint, longest, too_much
from ringspan.trainer.run import Run
from tests.trainer import jobs

H200 = MACHINES["h200"]
BIG = ["model=llama-8b", "data.length=262144", "data.batch=1", "engine=zero3", "hardware=h200", "hardware.gpus=4"]


def planned(*overrides: str, gpus: int = 4) -> Config:
    return tokenizer.resolve_config(compose.load([*BIG, *overrides], world_size=gpus, planning=True).config)


def test_terms_that_a_hand_can_count() -> None:
    P = 8_030_261_248
    found = footprint(planned(), 4).terms
    assert found["optimizer"] == 12 * P / 4 and found["gradients"] == 4 * P / 4
    assert found["checkpoints"] == 32 * (65536 * 4096 * 2 * 2 + 65536 * 32 * 4)  # inputs, out and lse of 32 layers
    assert footprint(planned("engine.activations=full"), 4).terms["checkpoints"] == 32 * 65536 * 4096 * 2
    zero1 = footprint(planned("engine.zero=1"), 4).terms
    assert zero1["weights"] == 2 * P and zero1["gradients"] == 4 * P and zero1["optimizer"] == 3 * P
    zero0 = footprint(planned("engine.zero=0"), 4).terms
    assert zero0["weights"] == 6 * P and zero0["optimizer"] == 8 * P
    assert footprint(planned("engine.offload_optimizer=true"), 4).terms["optimizer"] == 0


def test_gradients_come_as_checkpoints_go_unless_they_were_there_before() -> None:
    def there(*overrides: str) -> dict[str, list[str]]:
        return footprint(planned("engine.zero=0", *overrides), 4).moments

    first, last = "the first layer that goes backward", "the last layer that goes backward"
    assert "gradients" not in there()[first] and "checkpoints" not in there()[last]
    assert "gradients" in there("data.batch=2")[first] and "gradients" in there("engine.zero=3")[first]
    assert "gradients" in there("engine.zero=1")[first]  # in bf16 the sums stay for ever
    assert "gradients" not in there("engine.zero=1", "engine.precision=fp32")[first]
    found = footprint(planned("engine.zero=1"), 4)
    assert found.peak == max(sum(found.terms[name] for name in names) for names in found.moments.values())


def test_a_tied_heads_gradient_waits_for_the_embeddings() -> None:
    tied = footprint(planned("engine.zero=1", "model.tied=true"), 4)
    assert all("head's gradient" in names for moment, names in tied.moments.items() if "backward" in moment)
    assert tied.terms["head's gradient"] == 2 * 128256 * 4096
    untied = footprint(planned("engine.zero=1"), 4)
    assert not any("head's gradient" in names for names in untied.moments.values())


def bf16_gradients(folder: str) -> None:
    """A bf16 run on the CPU, which the rules refuse to people because it is slow."""
    composed = compose.load([*jobs.TOY, f"runs={folder}", "name=run", "steps=2", "engine.zero=1", "model.tied=true"])
    composed.config.engine.precision = "bf16"
    run = Run(composed)
    backward, seen = run.engine.backward, []

    def then_look(loss: torch.Tensor, labels: float) -> None:
        backward(loss, labels)
        sums = run.engine.optimizer.fp32_groups_gradients_flat
        seen.append([weight.grad is None for _, weight in run.engine.named])
        assert all(x.dtype == torch.float32 and x.any() for x in sums)
        numel = sum(weight.numel() for _, weight in run.engine.named)
        assert numel <= sum(x.numel() for x in sums) < numel + 1000

    run.engine.backward = then_look  # type: ignore[method-assign]
    loop.train(run)
    run.close()
    assert len(seen) == 4 and all(map(all, seen))


def test_zero_1_in_bf16_keeps_fp32_sums_and_no_other_gradients(tmp_path: Path) -> None:
    """What footprint.py says of DeepSpeed's BF16_Optimizer."""
    assert jobs.run_ranks(2, bf16_gradients, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (["engine.zero=3"], ["engine.zero=2"]),
        (["engine.zero=2", "data.batch=2"], ["engine.zero=1", "data.batch=2"]),
        (["engine.zero=1"], ["engine.zero=0"]),
        (["engine.activations=full"], ["engine.activations=attention"]),
        (["engine.activations=attention"], ["engine.activations=none"]),
        (["engine.offload_activations=true"], []),
        ([], ["data.length=524288"]),
        ([], ["data.batch=4", "data.micro_batch=4"]),
        (["optim=muon", "engine.zero=2"], ["engine.zero=2"]),
        ([], ["data.batch=2", "parallel.ring=2", "parallel.data=2"]),
    ],
)
def test_what_saves_memory_is_seen_to_save_it(less: list[str], more: list[str]) -> None:
    assert footprint(planned(*less), 4).peak < footprint(planned(*more), 4).peak


def test_a_cpu_is_told_nothing_of_gpus() -> None:
    config = tokenizer.resolve_config(
        compose.load(["model=gpt2-124m", "data.length=65536", "data.batch=2"], world_size=2).config
    )
    small = replace(H200, gpu=False, memory=footprint(config, 2, False).peak)
    assert all("offload" not in line and "GPU" not in line for line in check.remedies(config, 2, small))
    assert check.remedies(config, 2, small)
    assert not check.remedies(config, 2, replace(small, memory=2**20))


def test_a_run_that_may_not_fit_says_so() -> None:
    config = planned()
    enough = footprint(config, 4).peak / (1 - RESERVE)
    assert too_much(config, 4, enough * 1.001) == ""
    there = enough * 0.999
    warning = too_much(config, 4, there)
    assert f"{footprint(config, 4).peak / GIB:.1f} GiB" in warning and f"has {there / GIB:.1f}" in warning
    assert "trainer.check" in warning


def test_the_longest_context_is_the_last_that_fits() -> None:
    config = planned()
    most = longest(config, 4, H200.memory)
    at = [footprint(replace(config, data=replace(config.data, length=length)), 4).peak for length in (most, most * 17 // 16)]
    assert at[0] <= (1 - RESERVE) * H200.memory < at[1]
    assert longest(config, 4, GIB) == 0
    assert longest(planned("engine.activations=full"), 4, H200.memory) > most


def test_checkpoints_are_what_autograd_keeps() -> None:
    """Counted by torch, on the CPU in fp32, for one layer more or less."""
    kept = {}
    for activations in ("full", "attention", "none"):
        for layers in (1, 2):
            overrides = ["model=tiny", f"model.layers={layers}", "data.length=256", f"engine.activations={activations}"]
            config = tokenizer.resolve_config(compose.load([*overrides, "parallel.device=cpu"], world_size=1).config)
            model = GPT(config.model)
            install(model, activations, offload=False, compiled=False)
            weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
            held: dict[int, int] = {}

            def pack(x: torch.Tensor, held: dict[int, int] = held, weights: set[int] = weights) -> torch.Tensor:
                storage = x.untyped_storage()
                if storage.data_ptr() not in weights:
                    held[storage.data_ptr()] = storage.nbytes()
                return x

            tokens = torch.zeros(1, 256, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = model.hidden(tokens, torch.arange(256)[None])
            kept[activations, layers] = sum(held.values()), footprint(config, 1, gpu=False).terms["checkpoints"]
            del out
    ours = {a: kept[a, 2][1] - kept[a, 1][1] for a in ("full", "none")}
    torchs = {a: kept[a, 2][0] - kept[a, 1][0] for a in ("full", "none")}
    assert torchs["full"] == ours["full"] == 256 * 96 * 4
    assert torchs["none"] == pytest.approx(ours["none"], rel=0.15)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_layers_backward_is_what_torch_allocates(activation: str, tmp_path: Path) -> None:
    """The highest level that the profiler sees during the backward of one checkpointed layer."""
    size = ["model.dim=128", "model.heads=4", "model.kv_heads=2", "model.mlp_dim=1024", f"model.activation={activation}"]
    overrides = ["model=tiny", *size, "data.length=1024", "data.micro_batch=4", "data.batch=4", "parallel.device=cpu"]
    config = tokenizer.resolve_config(compose.load([*overrides, "engine.activations=attention"], world_size=1).config)
    model = GPT(config.model)
    install(model, "attention", offload=False, compiled=False)
    rotation = model.rotation(torch.arange(1024).expand(4, -1))
    hidden = torch.randn(4, 1024, 128, requires_grad=True)
    mask = model.masks(None, hidden.device)[0]
    out = model.run_layer(model.layers[0], hidden * 1, rotation, mask, model.attention, None)
    dout = torch.randn_like(out)
    found = highest(lambda: out.backward(dout), tmp_path)
    assert footprint(config, 1, gpu=False).terms["a layer's backward"] == pytest.approx(found, rel=0.1)


def highest(run: Callable[[], object], folder: Path) -> int:
    """The most bytes that were there at a time, of those that came while it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize("part_bytes", [2**10, footprint_module.PART_BYTES], ids=["parts", "whole"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ring", [2, 3, 4])
def test_what_is_on_its_way_is_what_a_ring_allocates(
    ring: int, batch: int, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest level that the profiler sees beside the gradients, where no kernel runs and no message has to come."""
    assert (footprint_module.PART_BYTES, footprint_module.SHORT) == (select.PART_BYTES, select.SHORT)
    monkeypatch.setattr(footprint_module, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr(P2PTransport, "_exchange", lambda *_: lambda: None)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    rows, heads, width = 256, 4, 32
    plan = make_plan(Layout("contiguous", rows * ring, ring), Mask(), rank=1)
    transport = P2PTransport(RingGroups(None, None, True, [], 1.0), plan, torch.device("cpu"))  # type: ignore[arg-type]
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options = dict(mask=Mask(), transport=transport, head_start=0, backend="chunked")
    found = highest(lambda: ring_backward(out, None, q, k, v, out, out.new_zeros(batch, heads, rows), **options), tmp_path)
    planned = 3 * q.nbytes + footprint_module.on_their_way(batch, batch * rows, heads, 2 * width, ring, 4)  # dq, dk, dv
    # a ring of two has the most at its end, when dk and dv are made, and half of the own block's come apart
    end = 3 * k.nbytes if ring == 2 else 0
    assert planned <= found <= 1.01 * (planned + end)


@pytest.mark.parametrize("ring", range(2, 18))
def test_steps_are_those_of_copy_engines(ring: int) -> None:
    part = select.PART_BYTES // 4
    for numbers, heads in itertools.product((1, part // 2, part, part * 2, part * 2 + 1, part * 9), (1, 2, 6, 8)):
        for kind, rows in itertools.product(("zigzag", "contiguous", "striped"), (2, select.SHORT, select.SHORT + 2)):
            layout = Layout(kind, rows * ring, ring)
            blocks = select.blocks_per_step("copy", layout, True, 4 * numbers, heads, False)
            assert tuple(footprint_module._steps(ring, numbers, heads, rows, kind != "striped")) == blocks


@pytest.mark.parametrize("kind", ["contiguous", "striped"])
@pytest.mark.parametrize("part_bytes", [2**28, 2**16, 1])  # a block's dK/dV have 2**18 bytes
@pytest.mark.parametrize("ring, batch, heads", [(2, 1, 4), (4, 1, 4), (4, 2, 4), (8, 1, 4), (4, 1, 1), (4, 1, 3)])
def test_copy_engines_take_what_is_planned(
    ring: int, batch: int, heads: int, part_bytes: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that is always there, and the highest level of what comes beside it."""
    monkeypatch.setattr("ringspan.parallel.ring.adds_in_memory", lambda *_, **__: True)  # as on Hopper, which takes more
    monkeypatch.setattr(footprint_module, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    room: dict[str, int] = {}
    shown = SimpleNamespace(
        brought=0,
        given=0,
        caller=None,
        given_out_of=[(0, ()), (0, ())],
        signals=SimpleNamespace(meet=lambda *_: None, tell=lambda *_: None, wait=lambda *_: None),
        make_room=lambda use, nbytes, _: room.update({use: max(nbytes, room.get(use, 0))}),
        rows=lambda use, rank, first, shape, dtype, begin=0: torch.empty(shape, dtype=dtype, device="meta"),
    )
    monkeypatch.setattr(copy_engine, "shown_by", lambda *_: shown)
    monkeypatch.setattr(copy_engine, "copy", lambda *_: None)
    rows, width = 256, 32
    layout = Layout(kind, rows * ring, ring)
    nbytes = 4 * batch * rows * heads * 2 * width
    plan = make_plan(layout, Mask(), 1, select.blocks_per_step("copy", layout, False, nbytes, heads, True))
    pair = RingGroups(SimpleNamespace(rank=lambda: 1), None, True, [], 1.0)  # type: ignore[arg-type]
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options = dict(
        mask=Mask(), transport=copy_engine.CopyEngineTransport(pair, plan, torch.device("cpu")), head_start=0, backend="chunked"
    )
    found = highest(lambda: ring_backward(out, None, q, k, v, out, out.new_zeros(batch, heads, rows), **options), tmp_path)
    doubling = kind == "contiguous"
    assert sum(room.values()) == footprint_module.shown(batch, batch * rows, heads, 2 * width, ring, 4, doubling)
    planned = 3 * q.nbytes
    planned += footprint_module.on_their_way(batch, batch * rows, heads, 2 * width, ring, 4, copied=True, doubling=doubling)
    # At the end dk and dv are made, when only one part of the last step, of one block, still comes in.
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    blocks = 1 + half + 1 / select.num_parts(plan, k, v)
    most = max(planned, 3 * q.nbytes + blocks * (k.nbytes + v.nbytes))
    assert most <= found <= 1.01 * most


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_layer_saves_what_the_plan_says() -> None:
    kept = {}
    for layers in (1, 2):
        overrides = ["model=tiny", f"model.layers={layers}", "data.length=256"]
        overrides += ["engine.activations=none", "engine.compile=on", "parallel.device=cpu"]
        config = tokenizer.resolve_config(compose.load(overrides, world_size=1).config)
        model = GPT(config.model)
        install(model, "none", offload=False, compiled=True)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        held: dict[int, int] = {}

        def pack(x: torch.Tensor, held: dict[int, int] = held, weights: set[int] = weights) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model.hidden(torch.zeros(1, 256, dtype=torch.int64), torch.arange(256)[None])
        kept[layers] = sum(held.values()), footprint(config, 1, gpu=False).terms["checkpoints"]
        del out
    assert kept[2][0] - kept[1][0] == pytest.approx(kept[2][1] - kept[1][1], rel=0.05)


def test_step_time_follows_the_work() -> None:
    config = planned()
    target = replace(H200, products=700e12)
    times = step_time.step_time(config, 4, target)
    counts = parameters(config.model)
    layers = counts.products - 128256 * 4096
    assert times["matrix products"] == pytest.approx((6 * counts.products + 2 * layers) * 262144 / 4 / 700e12)
    longer = step_time.step_time(planned("data.length=524288"), 4, target)
    assert longer["attention"] == pytest.approx(4 * times["attention"], rel=1e-3)
    assert step_time.step_time(planned("engine.activations=full"), 4, target)["attention"] > times["attention"]
    windowed = step_time.step_time(planned("model.windows=[4096,0]"), 4, target)["attention"]
    assert 0.45 < windowed / times["attention"] < 0.75
    assert step_time.step_time(planned("engine.activations=none"), 4, target)["matrix products"] < times["matrix products"]


def test_attention_speed_is_a_measurement_and_says_which() -> None:
    forward, backward, source = step_time.attention_speed(planned(), H200)
    assert source.startswith("d128-gqa4-causal-32k in attention-again-h200.json")
    assert 100e12 < backward < forward < 989e12
    scaled = step_time.attention_speed(planned(), MACHINES["a100"])
    assert scaled[0] == pytest.approx(forward * 312 / 989) and "scaled from NVIDIA H200" in scaled[2]


def test_attention_speed_is_that_of_the_kernel_that_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest shape, but a portable kernel's only where no other ran; and of two results with it the newer."""
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


def test_a_plan_needs_no_file_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop plans what a cluster will read."""
    assert check.main(["experiment=qwen3_continue", "hardware=h200", "init_from=/cluster/Qwen3", "data=text"]) == 0
    assert capsys.readouterr().out.startswith("qwen3-0.6b: 596,049,920 weights")
    with pytest.raises(SystemExit) as stop:
        check.main(["experiment=qwen3_continue", "hardware=h200", "model.vocabulary=0"])
    assert stop.value.code == 2 and "tokenizer.path=''" in capsys.readouterr().err


def test_the_command_answers_and_its_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(BIG) == 0
    out = capsys.readouterr().out
    assert "8,030,261,248 weights" in out and "it fits" in out and "the longest sequence that fits" in out
    assert "data 1 × ring 4 × ulysses 1" in out and "counting attention 3.5×" in out
    assert check.main([*BIG, "engine.zero=1", "hardware.memory_gib=60"]) == 1
    out = capsys.readouterr().out
    assert "IT DOES NOT FIT" in out and "what would fit" in out
    remedy = next(line for line in out.splitlines() if line.strip().startswith("engine.zero=3"))
    changes = remedy.strip().partition(":")[0].split()
    assert check.main([*BIG, "hardware.memory_gib=60", *changes]) == 0
    assert check.main([*BIG, "hardware.memory_gib=79"]) == 1
    remedies = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  engine.")]
    assert len(remedies) == len(set(remedies)) > 2


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["hardware=cpu", "data.length=512"]) == 0
    out = capsys.readouterr().out
    assert "2 × CPU rank" in out and "measured here" in out and "nan" not in out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["hardware.gpus=3"], "parallel"),
        (["model.heads=7"], "model.heads=7"),
        (["hardware=h2000"], "h2000"),
        (["model.vocabulary=100"], "model.vocabulary=100"),
    ],
)
def test_a_wrong_config_is_told_with_exit_code_2(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    ring = ["parallel.ring=2"] if wrong == ["hardware.gpus=3"] else []
    with pytest.raises(SystemExit) as stop:
        check.main([*BIG, *ring, *wrong])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_shipped_speeds_are_those_of_docs_results() -> None:
    rows = step_time.measured_speeds(ROOT / "docs/results")
    assert rows and json.loads(step_time.SPEEDS.read_text()) == rows, "run `make tables`"
