"""Pulling and adding up beside the kernels is right in whatever order streams do their work."""

from types import SimpleNamespace

import pytest
import torch

from kernels import Mask, attention
from parallel import Layout, transport
from parallel.groups import Pair
from parallel.plan import make_plan
from parallel.pull import Pull
from parallel.ring import ring_backward, ring_forward

from .streams import Machine, installed

OPTIONS = dict(scale=0.25, softcap=0.0, dropout=0.0, seed=None, deterministic=False, backend="reference")


def wrong_by(ranks: int, seed: int, merged: bool, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of three forwards in a row with different inputs, and of three more with their backwards."""
    monkeypatch.setattr(transport, "PART_BYTES", part_bytes)
    machine, mask, layout = Machine(ranks, seed), Mask(causal=True), Layout("zigzag", 4 * ranks, ranks)
    generator = torch.Generator().manual_seed(seed)
    shape = 3, 4, 1, layout.length, 2, 16  # calls; q, k, v and dout
    inputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    expected: list[torch.Tensor] = []
    for q, k, v, dout in inputs:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask, scale=0.25, backend="reference")
        expected += [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    plans = [make_plan(layout, mask, rank, merged) for rank in range(ranks)]
    shards = [[[layout.shard(x, 1, rank).contiguous() for x in given] for given in inputs] for rank in range(ranks)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    with installed(machine):
        for rank, plan in enumerate(plans):
            machine.current = rank, "kernels"
            group = SimpleNamespace(group_name=f"{seed} {rank}", rank=lambda rank=rank: rank)
            pair = Pair(group, group, True, list(range(ranks)), 1.0)
            for q, k, v, _ in shards[rank]:
                results[rank] += ring_forward(q, k, v, mask, Pull(pair, plan, q.device), None, 0, **OPTIONS)[:1]
            for q, k, v, dout in shards[rank]:
                out, lse = ring_forward(q, k, v, mask, Pull(pair, plan, q.device), None, 0, **OPTIONS)
                grads = ring_backward(dout, None, q, k, v, out, lse, mask, Pull(pair, plan, q.device), 0, **OPTIONS)
                results[rank] += [out, *grads[:3]]
    machine.run()
    wholes = [layout.unshard(list(its), 1) for its in zip(*results, strict=True)]
    gaps = [whole - x for whole, x in zip(wholes, expected[::4] + expected, strict=True)]
    return max(float(gap.abs().nan_to_num(torch.inf).max()) for gap in gaps)


@pytest.mark.parametrize("merged", [False, True], ids=["pull", "pull_all"])
@pytest.mark.parametrize("ranks, part_bytes", [(2, 2**28), (3, 0), (4, 2**28)])
def test_any_order_is_right(ranks: int, part_bytes: int, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        assert wrong_by(ranks, seed, merged, part_bytes, monkeypatch) <= 1e-12
