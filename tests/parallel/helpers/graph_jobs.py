"""Jobs of the pool that capture CUDA graphs."""

import torch

from ringspan import context_attention
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
