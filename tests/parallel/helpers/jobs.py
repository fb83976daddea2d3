"""Bodies of tests that run on every rank of a pool: compile and checkpointing, transfers, errors, benchmarks."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspan import Layout, Mask, Mesh, attention, context_attention, ring_attention
from ringspan.parallel import plan, ring, ring_overlapped
from ringspan.parallel import ring_attention as ring_attention_module
from ringspan.parallel.bench import __main__ as bench
from ringspan.parallel.bench.baselines import BenchContext, Setting, candidates
from ringspan.parallel.bench.timeline import trace
from ringspan.parallel.coordination import argument_check, process_groups, progress
from ringspan.parallel.transport import copy_engine
from ringspan.parallel.transport.base import received
from tests.kernels.backends.hopper.emulator import emulate
from tests.parallel.helpers.work import (
    RingCase,
    compare,
    differences,
    make_inputs,
    make_mask,
    make_mesh,
    run_shards,
    run_single,
    shard_results,
)
from tests.parallel.transport.shared_memory import SharedMemorySignals, patched_copy_engine

CAUSAL = dict(causal=True)


def count_transfers(case: RingCase) -> dict[str, tuple[int, int]]:
    """Received ("kv", "dkv") of this rank in the forward, the backward, and the same two with activation checkpointing."""
    inputs = make_inputs(case)
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    q, k, v, dout = (layout.shard(inputs[name], 1, rank) for name in ("q", "k", "v", "dout"))
    counts: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def counting(name: str):
        start = received["kv"], received["dkv"]
        yield
        counts[name] = received["kv"] - start[0], received["dkv"] - start[1]

    def layer(x: Tensor) -> Tensor:
        options = dict(mask=make_mask(case.mask), layout=layout, mesh=mesh, transport=case.transport, backend=case.backend)
        return context_attention(x * 1.5, k, v.sin(), **options).cos()

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_saved = op in (torch.ops.ringspan.ring_forward.default, torch.ops.ringspan.exchange_heads.default)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    x = q.requires_grad_()
    with counting("forward"):
        plain = layer(x)
    with counting("backward"):
        (expected,) = torch.autograd.grad(plain, x, dout)
    with counting("forward, checkpointed"):
        out = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    with counting("backward, checkpointed"):
        (grad,) = torch.autograd.grad(out, x, dout)
    assert torch.equal(out, plain) and torch.equal(grad, expected)
    return counts


def compare_compiled(case: RingCase) -> dict[str, float]:
    """Differences between torch.compile(fullgraph=True) and eager, for attention between other operations."""
    inputs = make_inputs(case)
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    mask = make_mask(case.mask)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(mask=mask, layout=layout, mesh=mesh, backend=case.backend, return_lse=True, **case.options)
        out, lse = context_attention(q * 1.5, k, v.sin(), **options)
        return out.cos(), lse

    results = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):  # the compiled one sees a new layout
        q, k, v = (layout.shard(inputs[name], 1, rank).requires_grad_() for name in "qkv")
        out, lse = function(q, k, v)
        loss = (out * layout.shard(inputs["dout"], 1, rank)).sum() + lse.nan_to_num(0, 0, 0).sum()
        grads = torch.autograd.grad(loss, (q, k, v))
        results.append({"out": out.detach(), "lse": lse.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]})
    return differences(*results)


def compare_interleaved_backwards(case: RingCase) -> dict[str, float]:
    """Two forwards with different inputs, then their backwards in reverse order, compared with a single device."""
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    calls = []
    for seed in (1, 2):
        inputs = make_inputs(case, seed)
        leaves = [layout.shard(inputs[name], 1, rank).requires_grad_() for name in "qkv"]
        options = dict(layout=layout, mesh=mesh, backend=case.backend, transport=case.transport)
        with case.patched_constants():
            out = context_attention(*leaves, make_mask(case.mask), **options)
        calls.append((inputs, leaves, out))
    errors: dict[str, float] = {}
    for inputs, leaves, out in reversed(calls):
        with case.patched_constants():
            grads = torch.autograd.grad(out, leaves, layout.shard(inputs["dout"], 1, rank))
        results = {"out": out.detach()} | {f"d{name}": g for name, g in zip("qkv", grads, strict=True)}
        expected = shard_results(case, run_single(case, inputs | {"dlse": torch.zeros_like(inputs["dlse"])}))
        for name, error in differences(results, {name: expected[name] for name in results}).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def five_runs_are_bit_equal(case: RingCase) -> bool:
    inputs = make_inputs(case)
    first = run_shards(case, inputs)
    repeats = [run_shards(case, inputs) for _ in range(4)]
    return all(torch.equal(first[name], repeat[name]) for repeat in repeats for name in first)


def rms_errors(case: RingCase) -> dict[str, tuple[float, float]]:
    """RMS error against fp64 of the ring's results, and of a single call in the same dtype."""
    inputs = make_inputs(case)
    inputs["dlse"].zero_()
    exact = replace(case, dtype=torch.float64, backend="chunked")
    exact_inputs = {name: x.double() for name, x in inputs.items()}
    truth = shard_results(case, run_single(exact, exact_inputs))
    single, ring_results = shard_results(case, run_single(case, inputs)), run_shards(case, inputs)
    errors = {}
    for name in ("out", "dq", "dk", "dv"):
        sums = torch.stack([(x[name].double() - truth[name]).square().sum() for x in (ring_results, single)])
        dist.all_reduce(sums)
        errors[name] = float(sums[0]) ** 0.5, float(sums[1]) ** 0.5
    return errors


def mesh_groups(data: int, ring: int, ulysses: int) -> dict[str, Any]:
    """Ranks of each of this rank's groups in a mesh."""
    mesh = Mesh(data, ring, ulysses, timeout=30)
    assert process_groups.timeout_of(mesh.ring_group).total_seconds() == 30
    assert make_mesh(dist.get_world_size()).timeout == process_groups.timeout_of(dist.group.WORLD)  # the default
    groups = {name: getattr(mesh, f"{name}_group") for name in ("data", "context", "ring", "ulysses")}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    group_ranks = {name: group.rank() for name, group in groups.items()}
    mesh_ranks = dict(data=mesh.data_rank, context=mesh.context_rank, ring=mesh.ring_rank, ulysses=mesh.ulysses_rank)
    assert group_ranks == mesh_ranks, (group_ranks, mesh_ranks)
    return ranks | {"rank": dist.get_rank()}


def make_unfit_mesh(**sizes: int) -> None:
    Mesh(**sizes)


def compare_replicas() -> float:
    """Two data replicas with different sequences, each over its own ring: largest difference to a single device."""
    mesh = make_mesh(2, 1, 2)
    case = RingCase("replicas", ring=2, length=21, mask=CAUSAL)
    inputs = make_inputs(case, seed=mesh.data_rank)
    layout, rank = mesh.layout("zigzag", 21), mesh.context_rank
    q, k, v = (layout.shard(inputs[name], 1, rank) for name in "qkv")
    out = context_attention(q, k, v, Mask(**CAUSAL), layout=layout, mesh=mesh, backend="reference")
    expected = attention(*(inputs[name] for name in "qkv"), Mask(**CAUSAL), backend="reference")
    return float((out - layout.shard(expected, 1, rank)).abs().max())


def call_ring(length: int = 16, heads: int = 2, changed_rank: int | None = None, **changes: Any) -> None:
    """A call of ring_attention on all ranks, with changed arguments on `changed_rank`, or on every rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout("zigzag", length, ranks)
    options = dict(changes) if changed_rank is None or rank == changed_rank else {}
    rows = layout.local_length + options.pop("more_rows", 0)
    dtype, kv_heads = options.pop("dtype", torch.float32), options.pop("kv_heads", heads)
    grad = options.pop("requires_grad", False)
    q, k, v = (torch.randn(1, rows, n, 16, dtype=dtype, requires_grad=grad) for n in (heads, kv_heads, kv_heads))
    ring_attention(q, k, v, **{"mask": Mask(**CAUSAL), "layout": layout} | options)


def call_ring_with_fault(faulty_rank: int, fault: str, calls: int, late_rank: int | None = None) -> None:
    """`calls` good calls; before the next one a rank dies or stalls, and another one may be late for it.

    The error of the other ranks starts with the seconds that they waited.
    """
    progress.update(step=1)
    progress.update(step=7, layer=3)
    for _ in range(calls):
        call_ring()
    if dist.get_rank() == faulty_rank:
        if fault == "dies":
            os._exit(1)
        time.sleep(6)  # longer than the timeout
        return
    if dist.get_rank() == late_rank:
        time.sleep(1)
    start = time.monotonic()
    try:
        call_ring()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - start:.0f} s: {error}") from error


def peak_memory(tokens: int, transport: str) -> tuple[dict[str, int], dict[str, int]]:
    """Peak bytes of a forward and of a backward, measured and promised."""
    ranks, width, heads = dist.get_world_size(), 128, 16
    mesh = make_mesh(ranks)
    layout = mesh.layout("zigzag", tokens * ranks)
    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def measure() -> dict[str, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated() - 4 * q.nbytes
        out = context_attention(*leaves, Mask(causal=True), layout=layout, mesh=mesh, transport=transport)
        torch.cuda.synchronize()
        peaks = {"forward": torch.cuda.max_memory_allocated() - baseline}
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
        return peaks | {"backward": torch.cuda.max_memory_allocated() - baseline}

    measure()
    peaks = measure()
    x, stats = q.nbytes, 4 * tokens * heads  # one tensor in bf16; lse or delta
    symmetric = 0
    if transport == "copy":
        from ringspan.parallel.transport.copy_engine import symmetric_bytes

        symmetric = symmetric_bytes()
    peaks = {name: value + symmetric for name, value in peaks.items()}
    # Forward: q, k, v, dout, out; out in fp32. Backward also dq, dk, dv; dq in fp32; two dK/dV. Both: two K/V and a copy of the
    # local one. Copy engines need no such copy, but symmetric send buffers of dK/dV, here a quarter of two.
    forward = 5 * x + 2 * x + stats + 6 * x + (2 * x if transport == "copy" else 0)
    backward = 5 * x + 3 * x + 2 * x + 2 * 4 * x + 2 * stats + 6 * x
    return peaks, {"forward": forward, "backward": backward}


def compare_relative(case: RingCase) -> dict[str, float]:
    """Largest difference to a single device, relative to the largest value."""
    inputs = make_inputs(case)
    expected = shard_results(case, run_single(case, inputs))
    errors = differences(run_shards(case, inputs), expected)
    finite = {name: x[x.isfinite()] for name, x in expected.items()}  # empty on a rank that has only padding
    sizes = {name: float(x.abs().max()) if x.numel() else 1.0 for name, x in finite.items()}
    return {name: error / max(1.0, sizes[name]) for name, error in errors.items()}


def run_bench(argv: list[str]) -> int:
    return bench.main(argv)


def trace_ring(path: str, setting: Setting, name: str, device: str = "cpu") -> tuple[list[dict[str, int]], float]:
    """Number of spans of each kind per rank, and the share of transfer time that overlaps a kernel."""
    ranks = dist.get_world_size()
    torch_device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    context = BenchContext(torch_device, dtype, ranks, make_mesh(ranks), make_mesh(1, ranks), "auto")
    rank_spans = trace(candidates()[name].make, setting, context, Path(path), "a ring")
    assert all(0 <= start <= end for spans in rank_spans for _, start, end in spans)
    transfer_time = overlapped_time = 0.0
    for spans in rank_spans:
        compute: list[tuple[float, float]] = []
        for start, end in sorted((start, end) for kind, start, end in spans if kind == "compute"):
            if compute and start <= compute[-1][1]:  # overlaps the previous kernel
                compute[-1] = compute[-1][0], max(end, compute[-1][1])
            else:
                compute.append((start, end))
        for kind, start, end in spans:
            if kind == "transfer":
                transfer_time += end - start
                overlapped_time += sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    counts = [
        {kind: sum(span_kind == kind for span_kind, _, _ in spans) for kind in ("compute", "transfer")} for spans in rank_spans
    ]
    return counts, overlapped_time / transfer_time


def run_on_emulated_hopper(job: Callable[[RingCase], Any], case: RingCase) -> Any:
    """A job with the Hopper kernels' source in the emulator, and with shared memory for copy engines."""
    with pytest.MonkeyPatch.context() as patch, patched_copy_engine():
        emulate(patch, seed=1000 * dist.get_rank())
        return job(case)


def compare_with_shared_memory(case: RingCase) -> dict[str, float]:
    with patched_copy_engine():
        return compare(case)


def compare_rings(case: RingCase) -> dict[str, float]:
    """Largest difference between the results of the two rings, both over shared memory."""
    inputs, results = make_inputs(case), []
    for module in (ring, ring_overlapped):
        with patched_copy_engine(), patch.object(ring_attention_module, "choose_ring", lambda *_, module=module, **__: module):
            results.append(run_shards(case, inputs))
    return differences(*results)


def compare_with_slow_rank(case: RingCase) -> float:
    """Consecutive calls with different inputs while the copies of one rank are slow: largest difference to a single device."""
    mesh = make_mesh(case.ring)
    layout, rank, worst = mesh.layout(case.kind, case.length), mesh.context_rank, 0.0
    options = dict(mask=make_mask(case.mask), backend=case.backend)
    with patched_copy_engine(slow=1):
        for seed in range(4):
            inputs = make_inputs(case, seed)
            results, expected = run_shards(case, inputs), shard_results(case, run_single(case, inputs))
            worst = max(worst, *differences(results, expected).values())
        for seed in range(4):  # forward only, as in evaluation
            q, k, v = (make_inputs(case, seed)[name] for name in "qkv")
            shards = (layout.shard(x, 1, rank) for x in (q, k, v))
            out = context_attention(*shards, layout=layout, mesh=mesh, transport=case.transport, **options)
            worst = max(worst, float((out - layout.shard(attention(q, k, v, **options), 1, rank)).abs().max()))
    return worst


def compare_after_errors(case: RingCase) -> float:
    """A forward and a backward that fail on every rank, each followed by good calls: largest difference of these."""
    inputs, worst = make_inputs(case, 0), 0.0

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("on all ranks")

    with patched_copy_engine(slow=1):
        for name in ("block_forward", "block_backward"):
            with patch.object(ring, name, fail), contextlib.suppress(MemoryError):
                run_shards(case, inputs)
                raise AssertionError("no error")
            for seed in (1, 2):
                inputs = make_inputs(case, seed)
                results, expected = run_shards(case, inputs), shard_results(case, run_single(case, inputs))
                worst = max(worst, *differences(results, expected).values())
    assert not copy_engine._retired  # buffers of the failed calls have been freed
    return worst


def count_waits(case: RingCase) -> dict[str, dict[int, list[int]]]:
    """For a forward and a backward: the number of ranks of each wait, by kind of signal."""
    mesh = make_mesh(case.ring)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    q, k, v = (layout.shard(make_inputs(case)[name], 1, rank).requires_grad_() for name in "qkv")
    counts: dict[str, dict[int, list[int]]] = {}
    wait = SharedMemorySignals.wait

    def counting(signals: Any, kind: int, ranks: tuple[int, ...]) -> None:
        if ranks:
            counts.setdefault(direction, {}).setdefault(kind, []).append(len(ranks))
        wait(signals, kind, ranks)

    with case.patched_constants(), patched_copy_engine():
        SharedMemorySignals.wait = counting
        try:
            direction = "forward"
            options = dict(mask=make_mask(case.mask), transport=case.transport, backend=case.backend)
            out = context_attention(q, k, v, layout=layout, mesh=mesh, **options)
            direction = "backward"
            out.sum().backward()
        finally:
            SharedMemorySignals.wait = wait
    return counts


def count_comparisons(calls: int, step: int | None, first: int = 1) -> int:
    """Number of argument comparisons in that many calls, in a process whose first training step was `first`."""
    comparisons = 0
    exchange = argument_check._exchange

    def counting(*args: Any) -> Any:
        nonlocal comparisons
        comparisons += 1
        return exchange(*args)

    argument_check._exchange = counting
    if step is not None:
        progress._first_step = None
        progress.update(step=first)
        progress.update(step=step)
    try:
        for _ in range(calls):
            call_ring()
    finally:
        argument_check._exchange = exchange
    return comparisons


def stall_before_exchange(ring: int, ulysses: int, stalled_rank: int) -> None:
    for _ in range(4):
        call_context(ring, ulysses, None, heads=12)
    if dist.get_rank() == stalled_rank:
        time.sleep(6)
    else:
        call_context(ring, ulysses, None, heads=12)


def stall_before_backward(stalled_rank: int) -> None:
    layout = Layout("zigzag", 16, dist.get_world_size())
    q, k, v = (torch.randn(1, layout.local_length, 2, 16, requires_grad=True) for _ in range(3))
    for _ in range(4):
        out = ring_attention(q, k, v, Mask(**CAUSAL), layout=layout)
    if dist.get_rank() == stalled_rank:
        time.sleep(6)
        return
    out.sum().backward()


def count_planning(mask_arguments: dict[str, Any]) -> tuple[int, int]:
    """How often forward and backward of three layers with one mask compute visible rows, and how many plans they build."""
    layout = Layout("zigzag", 16, dist.get_world_size())
    mask, counts = make_mask(mask_arguments), {"_find_visible_rows": 0, "_build_plan": 0}
    originals = {name: getattr(plan, name) for name in counts}

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return originals[name](*args)

        return call

    for name in counts:
        setattr(plan, name, counted(name))
    plan._cached_plan.cache_clear()
    plan._cached_visible_rows.cache_clear()
    try:
        x = torch.randn(1, layout.local_length, 2, 16, requires_grad=True)
        with patched_copy_engine():
            for _ in range(3):
                x = ring_attention(x, x, x, mask, layout=layout, transport="copy")
            x.sum().backward()
    finally:
        for name, function in originals.items():
            setattr(plan, name, function)
    return counts["_find_visible_rows"], counts["_build_plan"]


def call_context_changed(**changes: Any) -> None:
    call_context(2, 2, None, **changes)


def call_in_forward_mode(ring: int, ulysses: int) -> None:
    mesh = make_mesh(ring, ulysses)
    layout = mesh.layout("zigzag", 16)
    q = torch.randn(1, layout.local_length, 4, 16)
    torch.func.jvp(lambda k: context_attention(q, k, q, layout=layout, mesh=mesh), (q,), (q,))


def call_context(ring: int, ulysses: int, changed_rank: int | None, **changes: Any) -> None:
    """A call of context_attention on all ranks, with changed arguments on `changed_rank`, or on every rank."""
    mesh = make_mesh(ring, ulysses)
    options = dict(changes) if changed_rank in (None, dist.get_rank()) else {}
    layout = mesh.layout("zigzag", 16)
    q = torch.randn(1, options.pop("rows", layout.local_length), options.pop("heads", 4), 16)
    k = q[:, :, : options.pop("kv_heads", 4)]
    context_attention(q, k, k, **dict(layout=layout, mesh=mesh) | options)


def compare_backward_without_tokens() -> float:
    """dq's difference to a single device where some ranks have no tokens and documents have padding."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layout, mask = Layout("contiguous", 5, ranks), Mask(causal=True, documents=[0, 0, 0, -1, -1])
    leaves = [torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3)]
    attention(*leaves, mask).sum().backward()
    shards = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in leaves]
    ring_attention(*shards, mask, layout=layout).sum().backward()
    return (shards[0].grad - layout.shard(leaves[0].grad, 1, rank)).abs().sum().item()
