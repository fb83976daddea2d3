"""Memory footprint: terms counted by hand, orders between configs, and buffers measured with torch's profiler."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.kernels import loss
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import make_plan
from ringspan.parallel.ring import ring_backward
from ringspan.parallel.transport import copy_engine, select
from ringspan.parallel.transport.p2p import P2PTransport
from ringspan.trainer import loop
from ringspan.trainer.activation_checkpointing import install
from ringspan.trainer.config import compose
from ringspan.trainer.data import tokenizer
from ringspan.trainer.model import GPT
from ringspan.trainer.planning import memory
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import (
    BACKWARD_END,
    BACKWARD_START,
    GIB,
    RESERVE,
    footprint,
    longest_sequence,
    memory_warning,
)
from ringspan.trainer.run import Run
from tests.trainer import jobs
from tests.trainer.planning.configs import planned

H200 = MACHINES["h200"]


def test_copied_constants_equal_their_sources() -> None:
    """planning/memory.py copies them, because the sources import torch."""
    assert (memory.CUDA_CHUNK, memory.CPU_CHUNK) == (loss.CUDA_CHUNK, loss.CPU_CHUNK)
    assert (memory.PART_BYTES, memory.SHORT_SHARD) == (select.PART_BYTES, select.SHORT_SHARD)


def test_terms_counted_by_hand() -> None:
    P = 8_030_261_248
    terms = footprint(planned(), 4).terms
    assert terms["optimizer"] == 12 * P / 4 and terms["gradients"] == 4 * P / 4
    assert terms["checkpoints"] == 32 * (65536 * 4096 * 2 * 2 + 65536 * 32 * 4)  # inputs, out and lse of 32 layers
    assert footprint(planned("engine.activations=full"), 4).terms["checkpoints"] == 32 * 65536 * 4096 * 2
    zero1 = footprint(planned("engine.zero=1"), 4).terms
    assert zero1["weights"] == 2 * P and zero1["gradients"] == 4 * P and zero1["optimizer"] == 3 * P
    zero0 = footprint(planned("engine.zero=0"), 4).terms
    assert zero0["weights"] == 6 * P and zero0["optimizer"] == 8 * P
    assert footprint(planned("engine.offload_optimizer=true"), 4).terms["optimizer"] == 0


def test_gradients_replace_checkpoints_unless_they_persist() -> None:
    def moments(*overrides: str) -> dict[str, list[str]]:
        return footprint(planned("engine.zero=0", *overrides), 4).moments

    assert "gradients" not in moments()[BACKWARD_START] and "checkpoints" not in moments()[BACKWARD_END]
    assert "gradients" in moments("data.batch=2")[BACKWARD_START] and "gradients" in moments("engine.zero=3")[BACKWARD_START]
    assert "gradients" in moments("engine.zero=1")[BACKWARD_START]  # in bf16 the sums are never freed
    assert "gradients" not in moments("engine.zero=1", "engine.precision=fp32")[BACKWARD_START]
    need = footprint(planned("engine.zero=1"), 4)
    assert need.peak == max(sum(need.terms[name] for name in names) for names in need.moments.values())


def test_tied_heads_gradient_lasts_until_the_embeddings() -> None:
    tied = footprint(planned("engine.zero=1", "model.tied=true"), 4)
    assert all("head's gradient" in names for moment, names in tied.moments.items() if "backward" in moment)
    assert tied.terms["head's gradient"] == 2 * 128256 * 4096
    untied = footprint(planned("engine.zero=1"), 4)
    assert not any("head's gradient" in names for names in untied.moments.values())


def train_in_bf16(folder: str) -> None:
    """Train in bf16 on the CPU, which validation rejects because it is slow, and inspect the gradients."""
    composed = compose.load([*jobs.TOY, f"runs={folder}", "name=run", "steps=2", "engine.zero=1", "model.tied=true"])
    composed.config.engine.precision = "bf16"
    run = Run(composed)
    backward, is_none = run.engine.backward, []

    def backward_and_inspect(loss: torch.Tensor, labels: float) -> None:
        backward(loss, labels)
        sums = run.engine.optimizer.fp32_groups_gradients_flat
        is_none.append([weight.grad is None for _, weight in run.engine.named])
        assert all(x.dtype == torch.float32 and x.any() for x in sums)
        numel = sum(weight.numel() for _, weight in run.engine.named)
        assert numel <= sum(x.numel() for x in sums) < numel + 1000

    run.engine.backward = backward_and_inspect  # type: ignore[method-assign]
    loop.train(run)
    run.close()
    assert len(is_none) == 4 and all(map(all, is_none))


def test_zero_1_in_bf16_keeps_fp32_sums_and_no_other_gradients(tmp_path: Path) -> None:
    """The assumption of planning/memory.py about DeepSpeed's BF16_Optimizer."""
    assert jobs.run_ranks(2, train_in_bf16, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(
    ("smaller", "larger"),
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
def test_options_that_save_memory_lower_the_peak(smaller: list[str], larger: list[str]) -> None:
    assert footprint(planned(*smaller), 4).peak < footprint(planned(*larger), 4).peak


def test_memory_warning_appears_above_the_reserve() -> None:
    config = planned()
    enough = footprint(config, 4).peak / (1 - RESERVE)
    assert memory_warning(config, 4, enough * 1.001) == ""
    available = enough * 0.999
    warning = memory_warning(config, 4, available)
    assert f"{footprint(config, 4).peak / GIB:.1f} GiB" in warning and f"has {available / GIB:.1f}" in warning
    assert "`ringspan check`" in warning


def test_longest_sequence_is_the_last_that_fits() -> None:
    config = planned()
    longest = longest_sequence(config, 4, H200.memory)
    peaks = [
        footprint(replace(config, data=replace(config.data, length=length)), 4).peak for length in (longest, longest * 17 // 16)
    ]
    assert peaks[0] <= (1 - RESERVE) * H200.memory < peaks[1]
    assert longest_sequence(config, 4, GIB) == 0
    assert longest_sequence(planned("engine.activations=full"), 4, H200.memory) > longest


def saved_bytes(model: GPT, length: int) -> int:
    """Bytes that autograd saves in a forward, without the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.hidden(torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None])
    del out
    return sum(saved.values())


def test_checkpoints_equal_the_tensors_that_autograd_saves() -> None:
    """Measured on the CPU in fp32, for one additional layer."""
    measured, counted = {}, {}
    for activations in ("full", "attention", "none"):
        for layers in (1, 2):
            overrides = ["model=tiny", f"model.layers={layers}", "data.length=256", f"engine.activations={activations}"]
            config = tokenizer.resolve_config(compose.load([*overrides, "parallel.device=cpu"], world_size=1).config)
            model = GPT(config.model)
            install(model, activations, offload=False, compiled=False)
            measured[activations, layers] = saved_bytes(model, 256)
            counted[activations, layers] = footprint(config, 1, gpu=False).terms["checkpoints"]
    layer_counted = {a: counted[a, 2] - counted[a, 1] for a in ("full", "none")}
    layer_measured = {a: measured[a, 2] - measured[a, 1] for a in ("full", "none")}
    assert layer_measured["full"] == layer_counted["full"] == 256 * 96 * 4
    assert layer_measured["none"] == pytest.approx(layer_counted["none"], rel=0.15)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_checkpoints_of_a_compiled_layer() -> None:
    measured, counted = {}, {}
    for layers in (1, 2):
        overrides = ["model=tiny", f"model.layers={layers}", "data.length=256"]
        overrides += ["engine.activations=none", "engine.compile=on", "parallel.device=cpu"]
        config = tokenizer.resolve_config(compose.load(overrides, world_size=1).config)
        model = GPT(config.model)
        install(model, "none", offload=False, compiled=True)
        measured[layers] = saved_bytes(model, 256)
        counted[layers] = footprint(config, 1, gpu=False).terms["checkpoints"]
    assert measured[2] - measured[1] == pytest.approx(counted[2] - counted[1], rel=0.05)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layers_backward_allocates_the_planned_bytes(activation: str, tmp_path: Path) -> None:
    """The peak that the profiler measures during the backward of one checkpointed layer."""
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
    measured = peak_bytes(lambda: out.backward(dout), tmp_path)
    assert footprint(config, 1, gpu=False).terms["a layer's backward"] == pytest.approx(measured, rel=0.1)


def peak_bytes(function: Callable[[], object], folder: Path) -> int:
    """Return the peak of the bytes that are allocated during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize("part_bytes", [2**10, memory.PART_BYTES], ids=["parts", "whole"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ring", [2, 3, 4])
def test_ring_backward_over_p2p_allocates_the_planned_bytes(
    ring: int, batch: int, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak in addition to the gradients, without kernels and messages."""
    monkeypatch.setattr(memory, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr(P2PTransport, "_exchange", lambda *_: lambda: None)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    rows, heads, width = 256, 4, 32
    plan = make_plan(Layout("contiguous", rows * ring, ring), Mask(), rank=1)
    transport = P2PTransport(RingGroups(None, None, True, [], 1.0), plan, torch.device("cpu"))  # type: ignore[arg-type]
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options: dict[str, Any] = dict(mask=Mask(), transport=transport, head_start=0, backend="chunked")
    measured = peak_bytes(
        lambda: ring_backward(out, None, q, k, v, out, out.new_zeros(batch, heads, rows), **options), tmp_path
    )
    counted = 3 * q.nbytes + memory.ring_backward_buffers(batch, batch * rows, heads, 2 * width, ring, 4)  # dq, dk, dv
    # A ring of two has its peak at the end, when dk and dv are made and half of the local block's are still separate.
    end = 3 * k.nbytes if ring == 2 else 0
    assert counted <= measured <= 1.01 * (counted + end)


@pytest.mark.parametrize("ring", range(2, 18))
def test_blocks_per_step_are_those_of_the_transport(ring: int) -> None:
    part, short = select.PART_BYTES // 4, select.SHORT_SHARD
    for elements, heads in itertools.product((1, part // 2, part, part * 2, part * 2 + 1, part * 9), (1, 2, 6, 8)):
        for kind, rows in itertools.product(("zigzag", "contiguous", "striped"), (2, short, short + 2)):
            layout = Layout(kind, rows * ring, ring)
            blocks = select.blocks_per_step("copy", layout, True, 4 * elements, heads, False)
            assert tuple(memory._blocks_per_step(ring, elements, heads, rows, kind != "striped")) == blocks


@pytest.mark.parametrize("kind", ["contiguous", "striped"])
@pytest.mark.parametrize("part_bytes", [2**28, 2**16, 1])  # a block's dK/dV have 2**18 bytes
@pytest.mark.parametrize("ring, batch, heads", [(2, 1, 4), (4, 1, 4), (4, 2, 4), (8, 1, 4), (4, 1, 1), (4, 1, 3)])
def test_ring_backward_over_copy_engines_allocates_the_planned_bytes(
    ring: int, batch: int, heads: int, part_bytes: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symmetric memory, and the peak of all other allocations."""
    monkeypatch.setattr("ringspan.parallel.ring.adds_dq_atomically", lambda *_, **__: True)  # as on Hopper, the larger case
    monkeypatch.setattr(memory, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    reserved: dict[str, int] = {}
    buffers = SimpleNamespace(
        num_fetches=0,
        num_returns=0,
        last_caller=None,
        last_returns=[(0, ()), (0, ())],
        signals=SimpleNamespace(signal_and_wait=lambda *_: None, signal=lambda *_: None, wait=lambda *_: None),
        allocate=lambda use, nbytes, _: reserved.update({use: max(nbytes, reserved.get(use, 0))}),
        view=lambda use, rank, first, shape, dtype, offset=0: torch.empty(shape, dtype=dtype, device="meta"),
    )
    monkeypatch.setattr(copy_engine, "symmetric_buffers", lambda *_: buffers)
    monkeypatch.setattr(copy_engine, "copy", lambda *_: None)
    rows, width = 256, 32
    layout = Layout(kind, rows * ring, ring)
    nbytes = 4 * batch * rows * heads * 2 * width
    plan = make_plan(layout, Mask(), 1, select.blocks_per_step("copy", layout, False, nbytes, heads, True))
    groups = RingGroups(SimpleNamespace(rank=lambda: 1), None, True, [], 1.0)  # type: ignore[arg-type]
    transport = copy_engine.CopyEngineTransport(groups, plan, torch.device("cpu"))
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options: dict[str, Any] = dict(mask=Mask(), transport=transport, head_start=0, backend="chunked")
    measured = peak_bytes(
        lambda: ring_backward(out, None, q, k, v, out, out.new_zeros(batch, heads, rows), **options), tmp_path
    )
    doubling, shape = kind == "contiguous", (batch, batch * rows, heads, 2 * width, ring, 4)
    assert sum(reserved.values()) == memory.symmetric_memory(*shape, doubling)
    counted = 3 * q.nbytes + memory.ring_backward_buffers(*shape, copied=True, doubling=doubling)
    # At the end dk and dv are made, while only one part of the last step's block is still incoming.
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    blocks = 1 + half + 1 / select.num_parts(plan, k, v)
    peak = max(counted, 3 * q.nbytes + blocks * (k.nbytes + v.nbytes))
    assert peak <= measured <= 1.01 * peak
