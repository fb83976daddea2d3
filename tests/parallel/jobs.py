"""More that ranks are told to do: the operator under compile and checkpointing, what moves, and what goes wrong."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspan import Layout, Mask, Mesh, attention, context_attention, ring_attention
from ringspan.parallel import plan, ring
from ringspan.parallel.bench import __main__ as bench
from ringspan.parallel.bench.baselines import BenchContext, Setting, contestants
from ringspan.parallel.bench.timeline import trace
from ringspan.parallel.coordination import argument_check, progress
from ringspan.parallel.coordination import process_groups as groups_of
from ringspan.parallel.transport import copy_engine
from ringspan.parallel.transport.base import moved
from tests.kernels.backends.hopper.emulator import emulate
from tests.parallel.transport import shared_memory
from tests.parallel.transport.shared_memory import installed
from tests.parallel.work import RingCase, compare, differences, inputs, make_mask, mesh, shard_of, shared, single

CAUSAL = dict(causal=True)


def blocks_moved(case: RingCase) -> dict[str, tuple[int, int]]:
    """("kv", "dkv") that came to this rank in the forward, the backward, and what a checkpoint computes again."""
    given = inputs(case)
    here = mesh(case.ring, case.ulysses)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    q, k, v, dout = (layout.shard(given[name], 1, rank) for name in ("q", "k", "v", "dout"))
    counts: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def counting(name: str):
        before = moved["kv"], moved["dkv"]
        yield
        counts[name] = moved["kv"] - before[0], moved["dkv"] - before[1]

    def layer(x: Tensor) -> Tensor:
        options = dict(mask=make_mask(case.mask), layout=layout, mesh=here, transport=case.transport, backend=case.backend)
        return context_attention(x * 1.5, k, v.sin(), **options).cos()

    def keep(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.ringspan.ring_forward.default, torch.ops.ringspan.exchange_heads.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    x = q.requires_grad_()
    with counting("forward"):
        plain = layer(x)
    with counting("backward"):
        (expected,) = torch.autograd.grad(plain, x, dout)
    with counting("forward, checkpointed"):
        out = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep))
    with counting("backward, checkpointed"):
        (grad,) = torch.autograd.grad(out, x, dout)
    assert torch.equal(out, plain) and torch.equal(grad, expected)
    return counts


def compiled(case: RingCase) -> dict[str, float]:
    """torch.compile(fullgraph=True) of attention with something around it gives what eager gives."""
    given = inputs(case)
    here = mesh(case.ring, case.ulysses)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    mask = make_mask(case.mask)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(mask=mask, layout=layout, mesh=here, backend=case.backend, return_lse=True, **case.options)
        out, lse = context_attention(q * 1.5, k, v.sin(), **options)
        return out.cos(), lse

    results = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):  # the layout is new to the first
        q, k, v = (layout.shard(given[name], 1, rank).requires_grad_() for name in "qkv")
        out, lse = function(q, k, v)
        loss = (out * layout.shard(given["dout"], 1, rank)).sum() + lse.nan_to_num(0, 0, 0).sum()
        grads = torch.autograd.grad(loss, (q, k, v))
        results.append({"out": out.detach(), "lse": lse.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]})
    return differences(*results)


def two_backwards(case: RingCase) -> dict[str, float]:
    """Two forwards, then their backwards in the other order, with different inputs: no buffer is stale."""
    here = mesh(case.ring, case.ulysses)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    runs = []
    for seed in (1, 2):
        given = inputs(case, seed)
        leaves = [layout.shard(given[name], 1, rank).requires_grad_() for name in "qkv"]
        options = dict(layout=layout, mesh=here, backend=case.backend, transport=case.transport)
        with case.installed():
            out = context_attention(*leaves, make_mask(case.mask), **options)
        runs.append((given, leaves, out))
    errors: dict[str, float] = {}
    for given, leaves, out in reversed(runs):
        with case.installed():
            grads = torch.autograd.grad(out, leaves, layout.shard(given["dout"], 1, rank))
        got = {"out": out.detach()} | {f"d{name}": g for name, g in zip("qkv", grads, strict=True)}
        expected = shard_of(case, single(case, given | {"dlse": torch.zeros_like(given["dlse"])}))
        for name, error in differences(got, {name: expected[name] for name in got}).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def bit_equal(case: RingCase) -> bool:
    given = inputs(case)
    first = shared(case, given)
    again = [shared(case, given) for _ in range(4)]
    return all(torch.equal(first[name], other[name]) for other in again for name in first)


def rms_against_one(case: RingCase) -> dict[str, tuple[float, float]]:
    """RMS error against fp64 of the ring's results, and of a single call in the same dtype."""
    given = inputs(case)
    given["dlse"].zero_()
    exact = replace(case, dtype=torch.float64, backend="chunked")
    whole = {name: x.double() for name, x in given.items()}
    truth, one, many = shard_of(case, single(exact, whole)), shard_of(case, single(case, given)), shared(case, given)
    found = {}
    for name in ("out", "dq", "dk", "dv"):
        sums = torch.stack([(x[name].double() - truth[name]).square().sum() for x in (many, one)])
        dist.all_reduce(sums)
        found[name] = float(sums[0]) ** 0.5, float(sums[1]) ** 0.5
    return found


def meshes(data: int, ring: int, ulysses: int) -> dict[str, Any]:
    here = Mesh(data, ring, ulysses, timeout=30)
    assert groups_of.timeout_of(here.ring_group).total_seconds() == 30
    assert mesh(dist.get_world_size()).timeout == groups_of.timeout_of(dist.group.WORLD)  # as the job's own
    groups = {name: getattr(here, f"{name}_group") for name in ("data", "context", "ring", "ulysses")}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    positions = {name: group.rank() for name, group in groups.items()}
    here_ranks = dict(data=here.data_rank, context=here.context_rank, ring=here.ring_rank, ulysses=here.ulysses_rank)
    assert positions == here_ranks, (positions, here_ranks)
    return ranks | {"rank": dist.get_rank()}


def wrong_mesh(**sizes: int) -> None:
    Mesh(**sizes)


def replicas() -> float:
    """Two data replicas with different sequences, each over its own ring."""
    here = mesh(2, 1, 2)
    case = RingCase("replicas", ring=2, length=21, mask=CAUSAL)
    given = inputs(case, seed=here.data_rank)
    layout, rank = here.layout("zigzag", 21), here.context_rank
    q, k, v = (layout.shard(given[name], 1, rank) for name in "qkv")
    out = context_attention(q, k, v, Mask(**CAUSAL), layout=layout, mesh=here, backend="reference")
    expected = attention(*(given[name] for name in "qkv"), Mask(**CAUSAL), backend="reference")
    return float((out - layout.shard(expected, 1, rank)).abs().max())


def attend(length: int = 16, heads: int = 2, odd: int | None = None, **changes: Any) -> None:
    """A ring over all ranks, where rank `odd` does something else."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout("zigzag", length, ranks)
    what = dict(changes) if odd is None or rank == odd else {}
    rows = layout.local_length + what.pop("more_rows", 0)
    dtype, kv_heads = what.pop("dtype", torch.float32), what.pop("kv_heads", heads)
    q, k, v = (torch.randn(1, rows, n, 16, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    ring_attention(q, k, v, **{"mask": Mask(**CAUSAL), "layout": layout} | what)


def attend_and(rank_that: int, does: str, calls: int, late: int | None = None) -> None:
    """Some good calls; then a rank dies or stalls at the start of the next, another may be late for it, and the others say
    what they saw."""
    progress.at(step=1)
    progress.at(step=7, layer=3)
    for _ in range(calls):
        attend()
    if dist.get_rank() == rank_that:
        if does == "dies":
            os._exit(1)
        time.sleep(6)  # longer than the others' limit
        return
    if dist.get_rank() == late:
        time.sleep(1)
    begun = time.monotonic()
    try:
        attend()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - begun:.0f} s: {error}") from error


def peak_memory(tokens: int, transport: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a forward, and a backward, need at most, and what the ring promises (issue: peak memory)."""
    ranks, width, heads = dist.get_world_size(), 128, 16
    here = mesh(ranks)
    layout = here.layout("zigzag", tokens * ranks)
    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def run() -> dict[str, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        given = torch.cuda.memory_allocated() - 4 * q.nbytes
        out = context_attention(*leaves, Mask(causal=True), layout=layout, mesh=here, transport=transport)
        torch.cuda.synchronize()
        found = {"forward": torch.cuda.max_memory_allocated() - given}
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
        return found | {"backward": torch.cuda.max_memory_allocated() - given}

    run()
    found = run()
    x, stats = q.nbytes, 4 * tokens * heads  # one tensor in bf16; lse or delta
    shown = 0
    if transport == "copy":
        from ringspan.parallel.transport.copy_engine import bytes_shown

        shown = bytes_shown()
    found = {name: value + shown for name, value in found.items()}
    # q, k, v, dout, out; out in fp32 | dq, dk, dv; dq in fp32, two dK/dV; and always two K/V and the own one once more,
    # which copy engines leave out, and by these the memory that dK/dV go out of, which is a quarter of two here
    forward = 5 * x + 2 * x + stats + 6 * x + (2 * x if transport == "copy" else 0)
    backward = 5 * x + 3 * x + 2 * x + 2 * 4 * x + 2 * stats + 6 * x
    return found, {"forward": forward, "backward": backward}


def gpu_compare(case: RingCase) -> dict[str, float]:
    """The largest difference to a single GPU, relative to the largest value."""
    given = inputs(case)
    expected = shard_of(case, single(case, given))
    found = differences(shared(case, given), expected)
    finite = {name: x[x.isfinite()] for name, x in expected.items()}  # nothing, of a rank that has only padding
    sizes = {name: float(x.abs().max()) if x.numel() else 1.0 for name, x in finite.items()}
    return {name: error / max(1.0, sizes[name]) for name, error in found.items()}


def stall_on_gpu(transport: str) -> None:
    layout = Layout("zigzag", 512, dist.get_world_size())
    q, k, v = (torch.randn(1, layout.local_length, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(4):
        ring_attention(q, k, v, Mask(**CAUSAL), layout=layout, transport=transport)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(30)
        return
    ring_attention(q, k, v, Mask(**CAUSAL), layout=layout, transport=transport)
    torch.cuda.synchronize()


def run_bench(argv: list[str]) -> int:
    return bench.main(argv)


def traced(path: str, setting: Setting, name: str, device: str = "cpu") -> tuple[list[dict[str, int]], float]:
    """How many spans of each kind each rank has, and how much of the time of transfers a kernel runs beside them."""
    ranks = dist.get_world_size()
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    place = BenchContext(where, dtype, ranks, mesh(ranks), mesh(1, ranks), "auto")
    spans = trace(contestants()[name].make, setting, place, Path(path), "a ring")
    assert all(0 <= start <= end for its in spans for _, start, end in its)
    moving = hidden = 0.0
    for its in spans:
        compute: list[tuple[float, float]] = []
        for start, end in sorted((start, end) for what, start, end in its if what == "compute"):
            if compute and start <= compute[-1][1]:  # a kernel beside it
                compute[-1] = compute[-1][0], max(end, compute[-1][1])
            else:
                compute.append((start, end))
        for what, start, end in its:
            if what == "transfer":
                moving += end - start
                hidden += sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    counts = [{what: sum(kind == what for kind, _, _ in its) for what in ("compute", "transfer")} for its in spans]
    return counts, hidden / moving


def over_hopper(job: Callable[[RingCase], Any], case: RingCase) -> Any:
    """A job over the Hopper kernels' source, and over what stands here for a GPU's copy engines."""
    with pytest.MonkeyPatch.context() as patch, installed():
        emulate(patch, seed=1000 * dist.get_rank())
        return job(case)


def compare_copying(case: RingCase) -> dict[str, float]:
    with installed():
        return compare(case)


def copy_in_haste(case: RingCase) -> float:
    """Calls in a row with different inputs, where one rank is slow to copy: what it brings, and what it takes home."""
    here = mesh(case.ring)
    layout, rank, worst = here.layout(case.kind, case.length), here.context_rank, 0.0
    options = dict(mask=make_mask(case.mask), backend=case.backend)
    with installed(slow=1):
        for seed in range(4):
            given = inputs(case, seed)
            worst = max(worst, *differences(shared(case, given), shard_of(case, single(case, given))).values())
        for seed in range(4):  # a forward alone, as in evaluation
            q, k, v = (inputs(case, seed)[name] for name in "qkv")
            mine = (layout.shard(x, 1, rank) for x in (q, k, v))
            out = context_attention(*mine, layout=layout, mesh=here, transport=case.transport, **options)
            worst = max(worst, float((out - layout.shard(attention(q, k, v, **options), 1, rank)).abs().max()))
    return worst


def copy_after_an_error(case: RingCase) -> float:
    """Calls that end with an error on every rank, a forward and a backward, and then others."""
    given, worst = inputs(case, 0), 0.0

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("all ranks alike")

    with installed(slow=1):
        for name in ("block_forward", "block_backward"):
            real = getattr(ring, name)
            setattr(ring, name, failing)
            with contextlib.suppress(MemoryError):
                shared(case, given)
                raise AssertionError("no error")
            setattr(ring, name, real)
            for seed in (1, 2):
                given = inputs(case, seed)
                worst = max(worst, *differences(shared(case, given), shard_of(case, single(case, given))).values())
    assert not copy_engine._set_aside  # what the calls with errors left has been given back
    return worst


def waits(case: RingCase) -> dict[str, dict[int, list[int]]]:
    """For how many others a forward and a backward wait, wait by wait, by what for."""
    here = mesh(case.ring)
    layout, rank = here.layout(case.kind, case.length), here.context_rank
    q, k, v = (layout.shard(inputs(case)[name], 1, rank).requires_grad_() for name in "qkv")
    counts: dict[str, dict[int, list[int]]] = {}
    wait = shared_memory.GpuSignals.wait

    def counting(signals: Any, what: int, count: int, ranks: tuple[int, ...]) -> None:
        counts.setdefault(now, {}).setdefault(what, []).append(len(ranks))
        wait(signals, what, count, ranks)

    with case.installed(), installed():
        shared_memory.GpuSignals.wait = counting
        try:
            for _ in range(2):  # the second has somebody to wait for
                counts.clear()
                now = "forward"
                options = dict(mask=make_mask(case.mask), transport=case.transport, backend=case.backend)
                out = context_attention(q, k, v, layout=layout, mesh=here, **options)
                now = "backward"
                out.sum().backward()
        finally:
            shared_memory.GpuSignals.wait = wait
    return counts


def comparisons(calls: int, step: int | None, first: int = 1) -> int:
    """How often ranks met to compare in that many calls, in a process that began with the training step `first`."""
    met = 0
    exchange = argument_check._exchange

    def counting(*args: Any) -> Any:
        nonlocal met
        met += 1
        return exchange(*args)

    argument_check._exchange = counting
    if step is not None:
        progress._first_step = None
        progress.at(step=first)
        progress.at(step=step)
    try:
        for _ in range(calls):
            attend()
    finally:
        argument_check._exchange = exchange
    return met


def stall_before_exchange(ring: int, ulysses: int, rank_that: int) -> None:
    for _ in range(4):
        attend_together(ring, ulysses, None, heads=12)
    if dist.get_rank() == rank_that:
        time.sleep(6)
    else:
        attend_together(ring, ulysses, None, heads=12)


def stall_before_backward(rank_that: int) -> None:
    layout = Layout("zigzag", 16, dist.get_world_size())
    q, k, v = (torch.randn(1, layout.local_length, 2, 16, requires_grad=True) for _ in range(3))
    for _ in range(4):
        out = ring_attention(q, k, v, Mask(**CAUSAL), layout=layout)
    if dist.get_rank() == rank_that:
        time.sleep(6)
        return
    out.sum().backward()


def looked_at(given: dict[str, Any]) -> tuple[int, int]:
    """How often three layers, there and back, work out who sees whom under one mask, and how many plans they make of it."""
    layout = Layout("zigzag", 16, dist.get_world_size())
    mask, made = make_mask(given), {"_visible_rows": 0, "_plan_of": 0}
    right = {name: getattr(plan, name) for name in made}

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            made[name] += 1
            return right[name](*args)

        return call

    for name in made:
        setattr(plan, name, counted(name))
    plan._plan.cache_clear()
    plan._seen.cache_clear()
    try:
        x = torch.randn(1, layout.local_length, 2, 16, requires_grad=True)
        with installed():
            for _ in range(3):
                x = ring_attention(x, x, x, mask, layout=layout, transport="copy")
            x.sum().backward()
    finally:
        for name, function in right.items():
            setattr(plan, name, function)
    return made["_visible_rows"], made["_plan_of"]


def refused(**changes: Any) -> None:
    attend_together(2, 2, None, **changes)


def forward_mode(ring: int, ulysses: int) -> None:
    here = mesh(ring, ulysses)
    layout = here.layout("zigzag", 16)
    q = torch.randn(1, layout.local_length, 4, 16)
    torch.func.jvp(lambda k: context_attention(q, k, q, layout=layout, mesh=here), (q,), (q,))


def attend_together(ring: int, ulysses: int, odd: int | None, **changes: Any) -> None:
    """Ring and Ulysses, where rank `odd`, or every rank, does something else."""
    here = mesh(ring, ulysses)
    what = dict(changes) if odd in (None, dist.get_rank()) else {}
    layout = here.layout("zigzag", 16)
    q = torch.randn(1, what.pop("rows", layout.local_length), what.pop("heads", 4), 16)
    k = q[:, :, : what.pop("kv_heads", 4)]
    context_attention(q, k, k, **dict(layout=layout, mesh=here) | what)


def backward_without_tokens() -> float:
    """Some ranks have none, and documents have padding: how far dq is from one rank's."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    layout, mask = Layout("contiguous", 5, ranks), Mask(causal=True, documents=[0, 0, 0, -1, -1])
    whole = [torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3)]
    attention(*whole, mask).sum().backward()
    mine = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in whole]
    ring_attention(*mine, mask, layout=layout).sum().backward()
    return (mine[0].grad - layout.shard(whole[0].grad, 1, rank)).abs().sum().item()
