"""Memory footprint: terms counted by hand, orders between configs, and buffers measured with torch's profiler."""

import itertools
import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.kernels import loss
from ringspan.parallel import gradient_return, ring_overlapped
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import make_plan
from ringspan.parallel.ring import ring_backward
from ringspan.parallel.transport import copy_engine, select
from ringspan.parallel.transport.p2p import P2PTransport
from ringspan.trainer import loop
from ringspan.trainer.config import compose
from ringspan.trainer.data import tokenizer
from ringspan.trainer.memory.plan import MemoryPlan, parse
from ringspan.trainer.memory.streamed import LayerInputs
from ringspan.trainer.model import GPT
from ringspan.trainer.planning import host_memory, memory, ring_memory
from ringspan.trainer.planning.memory import BACKWARD_END, BACKWARD_START, footprint
from ringspan.trainer.run import Run
from tests.trainer import jobs
from tests.trainer.memory.models import build
from tests.trainer.planning.configs import planned

A = MemoryPlan(1, outs=32)  # inputs and (out, lse) of all layers


def test_copied_constants_equal_their_sources() -> None:
    """planning/memory.py copies them, because the sources import torch."""
    assert (memory.CUDA_CHUNK, memory.CPU_CHUNK) == (loss.CUDA_CHUNK, loss.CPU_CHUNK)
    assert (ring_memory.PART_BYTES, ring_memory.SHORT_SHARD) == (select.PART_BYTES, select.SHORT_SHARD)
    for name in ("SMALL_BYTES", "LARGE_BYTES", "KEPT_BYTES"):
        assert getattr(ring_memory, name) == getattr(gradient_return, name)


def test_terms_counted_by_hand() -> None:
    P = 8_030_261_248
    terms = footprint(planned(), 4, plan=A).terms
    assert terms["optimizer"] == 12 * P / 4 and terms["gradients"] == 4 * P / 4
    x, out = 65536 * 4096 * 2, 65536 * 4096 * 2 + 65536 * 32 * 4
    assert terms["kept by layers"] == 32 * (x + out)
    assert footprint(planned(), 4, plan=MemoryPlan(4)).terms["kept by layers"] == 8 * x
    mixed = footprint(planned(), 4, plan=MemoryPlan(4, outs=20, inputs_on_host=3, outs_on_host=8))
    assert mixed.terms["kept by layers"] == 5 * x + 12 * out and mixed.offloaded == {"kept by layers": 3 * x + 8 * out}
    zero1 = footprint(planned("engine.zero=1"), 4).terms
    assert zero1["weights"] == 2 * P and zero1["gradients"] == 4 * P and zero1["optimizer"] == 3 * P
    zero0 = footprint(planned("engine.zero=0"), 4).terms
    assert zero0["weights"] == 6 * P and zero0["optimizer"] == 8 * P
    assert footprint(planned("engine.offload_optimizer=true"), 4).terms["optimizer"] == 0


def test_gradients_replace_kept_tensors_unless_they_persist() -> None:
    def moments(*overrides: str) -> dict[str, list[str]]:
        return footprint(planned("engine.zero=0", *overrides), 4, plan=A).moments

    assert "gradients" not in moments()[BACKWARD_START] and "kept by layers" not in moments()[BACKWARD_END]
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
        (["engine.memory=x/1"], []),
        (["engine.memory=x/4"], ["engine.memory=x/1"]),
        ([], ["engine.memory=none"]),
        (["engine.memory=x/1@32 outs=32"], []),
        (["engine.memory=x/1 outs=32@32"], []),
        (["engine.memory=x/1 outs=32 rows=8192"], []),
        (["engine.memory=x/1 outs=32 rows=8192 heads=1"], ["engine.memory=x/1 outs=32 rows=8192"]),
        ([], ["data.length=524288"]),
        ([], ["data.batch=4", "data.micro_batch=4"]),
        (["optim=muon", "engine.zero=2"], ["engine.zero=2"]),
        ([], ["data.batch=2", "parallel.ring=2", "parallel.data=2"]),
    ],
)
def test_options_that_save_memory_lower_the_peak(smaller: list[str], larger: list[str]) -> None:
    peaks = []
    for overrides in (smaller, larger):
        config = planned("engine.memory=x/1 outs=32", *overrides)
        peaks.append(footprint(config, 4, plan=parse(config.engine.memory, config.model)).peak)
    assert peaks[0] < peaks[1]


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


def test_kept_bytes_equal_the_tensors_that_autograd_saves() -> None:
    """Measured on the CPU in fp32, for one additional layer under the plan `none`."""
    measured, counted = {}, {}
    for layers in (1, 2):
        overrides = ["model=tiny", f"model.layers={layers}", "data.length=256", "parallel.device=cpu"]
        config = tokenizer.resolve_config(compose.load(overrides, world_size=1).config)
        measured[layers] = saved_bytes(GPT(config.model), 256)
        counted[layers] = footprint(config, 1, gpu=False).terms["kept by layers"]
    assert measured[2] - measured[1] == pytest.approx(counted[2] - counted[1], rel=0.15)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_kept_bytes_of_a_compiled_layer() -> None:
    measured, counted = {}, {}
    for layers in (1, 2):
        overrides = ["model=tiny", f"model.layers={layers}", "data.length=256"]
        overrides += ["engine.memory=none", "engine.compile=on", "parallel.device=cpu"]
        config = tokenizer.resolve_config(compose.load(overrides, world_size=1).config)
        model = GPT(config.model)
        model.compile_layers()
        measured[layers] = saved_bytes(model, 256)
        counted[layers] = footprint(config, 1, gpu=False).terms["kept by layers"]
    assert measured[2] - measured[1] == pytest.approx(counted[2] - counted[1], rel=0.05)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layers_backward_allocates_the_planned_bytes(activation: str, tmp_path: Path) -> None:
    """The peak that the profiler measures during the backward of one layer whose rows are one chunk."""
    size = ["model.dim=128", "model.heads=4", "model.kv_heads=2", "model.mlp_dim=1024", f"model.activation={activation}"]
    overrides = ["model=tiny", *size, "data.length=1024", "data.micro_batch=4", "data.batch=4", "parallel.device=cpu"]
    config = tokenizer.resolve_config(compose.load(["model.layers=1", *overrides], world_size=1).config)
    model = build("x/1 outs=1", config.model, 1024, 4, torch.float32)
    rotation = model.rotation(torch.arange(1024).expand(4, -1))
    hidden = torch.randn(4, 1024, 128, requires_grad=True)
    inputs = [LayerInputs(rotation, model.masks(None, hidden.device)[0], None, 0)]
    out = model.segments[0](hidden * 1, inputs, model.attention)
    dout = torch.randn_like(out)
    measured = peak_bytes(lambda: out.backward(dout), tmp_path) + dout.nbytes
    counted = footprint(config, 1, gpu=False, plan=MemoryPlan(1, 1)).terms
    assert counted["a layer's backward"] == pytest.approx(measured, rel=0.1)


def peak_bytes(function: Callable[[], object], folder: Path) -> int:
    """Return the peak of the bytes that are allocated during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(accumulate(change for _, change in changes))


def limit_bytes(part_bytes: int, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send parts of up to `part_bytes`; keep `kept_bytes` of those that arrive."""
    for module in (ring_memory, select):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    for module in (ring_memory, gradient_return):
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
        monkeypatch.setattr(module, "LARGE_BYTES", 2**40)
        monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)


def backward_over_p2p(kind: str, ring: int, rank: int, mask: Mask, batch: int, folder: Path) -> tuple[int, float, int]:
    """Return the peak bytes of a backward, measured and planned, and those of k."""
    rows, heads, width = 256, 4, 32
    plan = make_plan(Layout(kind, rows * ring, ring), mask, rank)
    transport = P2PTransport(RingGroups(None, None, True, [], 1.0), plan, torch.device("cpu"))  # type: ignore[arg-type]
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options: dict[str, Any] = dict(mask=mask, transport=transport, head_start=0, backend="chunked")
    row = out.new_zeros(batch, heads, rows)  # delta and lse
    measured = peak_bytes(lambda: ring_backward(out, row, q, k, v, row, **options), folder)
    buffers = ring_memory.ring_backward_buffers(batch, batch * rows, heads, 2 * width, ring, 4)
    return measured, 3 * q.nbytes + buffers, k.nbytes  # dq, dk, dv


@pytest.mark.parametrize("kept_bytes", [0, 2**19, 2**30], ids=["one kept", "some kept", "all kept"])
@pytest.mark.parametrize("part_bytes", [2**10, ring_memory.PART_BYTES], ids=["parts", "whole"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ring", [2, 3, 4, 6])
def test_ring_backward_over_p2p_allocates_the_planned_bytes(
    ring: int, batch: int, part_bytes: int, kept_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak in addition to the gradients, without kernels and messages."""
    limit_bytes(part_bytes, kept_bytes, monkeypatch)
    monkeypatch.setattr(P2PTransport, "_exchange", lambda *_: lambda: None)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    measured, counted, nbytes = backward_over_p2p("contiguous", ring, 1, Mask(), batch, tmp_path)
    # With two ranks, or if much is kept, the peak is at the end, when dk and dv are made and half of the local block's
    # are still separate.
    end = 3 * nbytes if ring == 2 or kept_bytes else 0
    assert counted <= measured <= 1.01 * (counted + end)


@pytest.mark.parametrize("kept_bytes", [0, 2**19, 2**30], ids=["one kept", "some kept", "all kept"])
@pytest.mark.parametrize("kind, rank", [("zigzag", 0), ("zigzag", 7), ("contiguous", 0), ("contiguous", 7)])
def test_no_rank_of_a_causal_ring_needs_more_than_planned(
    kind: str, rank: int, kept_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank receives gradients in each step, the last one of `contiguous` only sends some."""
    limit_bytes(ring_memory.PART_BYTES, kept_bytes, monkeypatch)
    monkeypatch.setattr(P2PTransport, "_exchange", lambda *_: lambda: None)
    monkeypatch.setattr("ringspan.parallel.ring.block_backward", lambda *_, **__: None)
    measured, counted, _ = backward_over_p2p(kind, 8, rank, Mask(causal=True), 1, tmp_path)
    assert measured <= 1.01 * counted


@pytest.mark.parametrize("ring", range(2, 18))
def test_blocks_per_step_are_those_of_the_transport(ring: int) -> None:
    part, short = select.PART_BYTES // 4, select.SHORT_SHARD
    for elements, heads in itertools.product((1, part // 2, part, part * 2, part * 2 + 1, part * 9), (1, 2, 6, 8)):
        for kind, rows in itertools.product(("zigzag", "contiguous", "striped"), (2, short, short + 2)):
            layout = Layout(kind, rows * ring, ring)
            blocks = select.blocks_per_step("copy", layout, True, 4 * elements, heads)
            assert tuple(ring_memory._blocks_per_step(ring, elements, heads, rows, kind != "striped")) == blocks


@pytest.mark.parametrize("kept_bytes", [0, 2**19, 2**30], ids=["one kept", "some kept", "all kept"])
@pytest.mark.parametrize("kind", ["contiguous", "striped"])
@pytest.mark.parametrize("part_bytes", [2**28, 2**16, 1])  # a block's dK/dV have 2**18 bytes
@pytest.mark.parametrize("ring, batch, heads", [(2, 1, 4), (4, 1, 4), (4, 2, 4), (8, 1, 4), (4, 1, 1), (4, 1, 3)])
def test_ring_backward_over_copy_engines_allocates_the_planned_bytes(
    ring: int,
    batch: int,
    heads: int,
    part_bytes: int,
    kind: str,
    kept_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symmetric memory, and the peak of all other allocations."""
    limit_bytes(part_bytes, kept_bytes, monkeypatch)
    monkeypatch.setattr(ring_overlapped, "block_backward", lambda *_, **__: None)
    reserved: dict[str, int] = {}
    buffers = SimpleNamespace(
        last_caller=None,
        is_captured=False,
        signals=SimpleNamespace(signal=lambda *_: None, wait=lambda *_: None),
        allocate=lambda use, nbytes, _: reserved.update({use: max(nbytes, reserved.get(use, 0))}),
        view=lambda use, rank, first, shape, dtype, offset=0: torch.empty(shape, dtype=dtype, device="meta"),
    )
    monkeypatch.setattr(copy_engine, "symmetric_buffers", lambda *_: buffers)
    monkeypatch.setattr(copy_engine, "copy", lambda *_: None)
    rows, width = 256, 32
    layout = Layout(kind, rows * ring, ring)
    nbytes = 4 * batch * rows * heads * 2 * width
    blocks = select.blocks_per_step("copy", layout, False, nbytes, heads)
    plan = make_plan(layout, Mask(), 1, blocks)
    groups = RingGroups(SimpleNamespace(rank=lambda: 1), None, True, [], 1.0)  # type: ignore[arg-type]
    transport = copy_engine.CopyEngineTransport(groups, plan, torch.device("cpu"))
    q, k, v, out = (torch.zeros(batch, rows, heads, width) for _ in range(4))
    options: dict[str, Any] = dict(mask=Mask(), transport=transport, head_start=0, backend="chunked")
    row = out.new_zeros(batch, heads, rows)  # delta and lse
    measured = peak_bytes(lambda: ring_overlapped.ring_backward(out, row, q, k, v, row, **options), tmp_path)
    several_blocks, shape = kind == "contiguous", (batch, batch * rows, heads, 2 * width, ring, 4)
    assert sum(reserved.values()) == ring_memory.symmetric_memory(*shape, several_blocks)
    counted = 3 * q.nbytes + ring_memory.ring_backward_buffers(*shape, copied=True, several_blocks=several_blocks)
    # At the end dk and dv are made, while what is kept is not added: the last part, or all, or some number of parts.
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    block = k.nbytes + v.nbytes
    end = 3 * q.nbytes + (1 + half) * block
    last = {0: blocks[-1] / select.num_parts(plan, k, v), 2**30: ring - 1}.get(kept_bytes)
    # With some number, the peak may be before the local block's last half is computed.
    least, most = (counted - half * block, counted + block) if last is None else [max(counted, end + last * block)] * 2
    assert least <= measured <= 1.01 * most


def container(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Folders of proc and sys with these control groups."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": "MemAvailable:    9000000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:memory:/job/step\n3:cpu:/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "free"),
    [
        ("", {}, None, 9000000 * 1024),
        ("0::/job\n", {"sys/fs/cgroup/job/memory.max": "max\n"}, None, 9000000 * 1024),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "4000", "sys/fs/cgroup/memory.current": "1000"}, 4000, 3000),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": "5000",
                "sys/fs/cgroup/a/memory.current": "1500",
                "sys/fs/cgroup/a/memory.stat": "anon 1000\ninactive_file 500\n",
            },
            5000,
            4000,
        ),
        (
            V1,
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
                "sys/fs/cgroup/memory/memory.stat": "cache 7\ntotal_inactive_file 100\n",
            },
            3000,
            2100,
        ),
    ],
)
def test_host_memory_is_that_of_the_container(
    cgroup: str, files: dict[str, str], limit: int | None, free: int, tmp_path: Path
) -> None:
    root = container(tmp_path, cgroup, files)
    assert host_memory.host_memory(root) == (limit or host_memory.host_memory(tmp_path / "none"))
    assert host_memory.available_host_memory(root) == free
