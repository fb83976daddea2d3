"""Jobs of the pool that need a GPU per rank: CUDA graphs, a stalled rank, times."""

import itertools
import statistics
import time

import torch
import torch.distributed as dist

from ringspan import Layout, Mask, context_attention, ring_attention
from tests.parallel.helpers.work import (
    RingCase,
    differences,
    make_inputs,
    make_mask,
    make_mesh,
    run_single,
    shard_results,
)


def compare_cuda_graph(case: RingCase) -> dict[str, float]:
    """Replays of a captured forward and backward with other inputs, and calls between them, compared with a single device."""
    mesh = make_mesh(case.ring, case.ulysses)
    layout, rank = mesh.layout(case.kind, case.length), mesh.context_rank
    shards = {name: layout.shard(make_inputs(case)[name], 1, rank).contiguous() for name in ("q", "k", "v", "dout")}
    leaves = [shards[name].requires_grad_() for name in "qkv"]

    def call() -> list[torch.Tensor]:
        options = dict(layout=layout, mesh=mesh, backend=case.backend, transport=case.transport)
        out = context_attention(*leaves, make_mask(case.mask), **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, shards["dout"])]

    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call()
    errors: dict[str, float] = {}
    for seed in (1, 2, 3):
        inputs = make_inputs(case, seed)
        for name, shard in shards.items():
            shard.detach().copy_(layout.shard(inputs[name], 1, rank))
        graph.replay()
        expected = shard_results(case, run_single(case, inputs | {"dlse": torch.zeros_like(inputs["dlse"])}))
        for results in ([x.clone() for x in captured], call()):
            named = dict(zip(("out", "dq", "dk", "dv"), results, strict=True))
            for name, error in differences(named, {name: expected[name] for name in named}).items():
                errors[name] = max(error, errors.get(name, 0.0))
    return errors


def stall_on_gpu(transport: str, reads: bool) -> None:
    """Rank 1 stalls for 30 s before a call of the other ranks, which wait for the GPU or read a value from it."""
    layout = Layout("zigzag", 512, dist.get_world_size())
    q, k, v = (torch.randn(1, layout.local_length, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(4):
        ring_attention(q, k, v, Mask(causal=True), layout=layout, transport=transport)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(30)
        return
    out = ring_attention(q, k, v, Mask(causal=True), layout=layout, transport=transport)
    if reads:
        out.sum().item()
    torch.cuda.synchronize()


def queued_forward_ms(transport: str) -> float:
    """Median time of forwards that the host launches before the GPU gets to them, so that the host's time does not count."""
    layout = Layout("zigzag", 8192 * dist.get_world_size(), dist.get_world_size())
    q, k, v = (torch.randn(1, layout.local_length, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call_times(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(150_000_000)  # about 80 ms
        events[0].record()
        for event in events[1:]:
            ring_attention(q, k, v, Mask(causal=True), layout=layout, transport=transport)
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    # As many calls as are timed: they allocate the buffers of all calls in flight, for which the host would wait.
    call_times(10)
    return statistics.median(call_times(10)[1:])
