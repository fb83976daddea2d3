"""Copying and adding up beside the kernels is right in whatever order streams do their work."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kernels import Mask, attention
from parallel import Layout, beside, transport
from parallel.engines import Engines
from parallel.groups import Pair
from parallel.plan import Plan, make_plan
from parallel.ring import ring_backward, ring_forward

from .streams import Machine, installed

OPTIONS = dict(scale=0.25, softcap=0.0, dropout=0.0, seed=None, deterministic=False, backend="reference")


class Sequence(NamedTuple):
    kind: str  # of its layout
    rows: int  # for each rank
    missing: int  # that are padding
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype = torch.float64
    window: int | None = None

    def inputs(self, ranks: int, seed: int) -> list[list[torch.Tensor]]:
        """q, k, v and dout of three calls."""
        (heads, kv_heads), (width, v_width) = self.heads, self.widths
        sizes = (heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width)
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.batch, self.rows * ranks - self.missing, *size) for size in sizes]
        numbers = ([torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes] for _ in range(3))
        return [[x.to(self.dtype) for x in given] for given in numbers]


EVEN = Sequence("zigzag", 4, 0, 1, (2, 2), (16, 16))
FOUR = Sequence("zigzag", 4, 0, 1, (4, 4), (16, 16))  # where a part may have 2048 bytes, two blocks in four parts
ODD = Sequence("contiguous", 3, 1, 2, (2, 1), (16, 24))  # halves are of keys
HALF = Sequence("zigzag", 4, 1, 1, (4, 2), (16, 16), torch.bfloat16)  # sums are in another dtype than results
WINDOW = Sequence("contiguous", 80, 5, 1, (4, 2), (16, 16), torch.bfloat16, 4)  # most of the own block goes apart
WINDOWS = Sequence("zigzag", 160, 5, 1, (2, 2), (16, 24), torch.float64, 4)
UNEVEN = Sequence("contiguous", 3, 1, 2, (6, 3), (16, 24))  # halves of one KV head, and of two


def wrong_by(sequence: Sequence, ranks: int, seed: int, steps_of: str, in_memory: bool) -> float:
    """Of three forwards in a row with different inputs, and of three more with their backwards."""
    inputs = sequence.inputs(ranks, seed)
    machine, layout = Machine(ranks, seed), Layout(sequence.kind, inputs[0][0].shape[1], ranks)
    mask = Mask(causal=True, window=sequence.window)
    expected: list[torch.Tensor] = []
    for q, k, v, dout in inputs:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask, scale=0.25, backend="reference")
        expected += [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    _, k, v, _ = (layout.shard(x, 1, 0) for x in inputs[0])
    nbytes = transport.bytes_of_gradients(k.shape[1], k, v)
    ways = [transport.blocks_per_step(steps_of, layout, True, nbytes, k.shape[2], backward) for backward in (False, True)]
    plans = [[make_plan(layout, mask, rank, blocks) for blocks in ways] for rank in range(ranks)]
    shards = [[[layout.shard(x, 1, rank).contiguous() for x in given] for given in inputs] for rank in range(ranks)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    with installed(machine, in_memory):
        for rank, (there, back) in enumerate(plans):
            machine.current = rank, "kernels"
            group = SimpleNamespace(group_name=f"{seed} {rank}", rank=lambda rank=rank: rank)
            pair = Pair(group, group, True, list(range(ranks)), 1.0)

            def mover(plan: Plan, pair: Pair = pair) -> Engines:
                return Engines(pair, plan, torch.device("cpu"))

            for q, k, v, _ in shards[rank]:
                results[rank] += ring_forward(q, k, v, mask, mover(there), None, 0, **OPTIONS)[:1]
            for q, k, v, dout in shards[rank]:
                out, lse = ring_forward(q, k, v, mask, mover(there), None, 0, **OPTIONS)
                grads = ring_backward(dout, None, q, k, v, out, lse, mask, mover(back), 0, **OPTIONS)
                assert all(x.born_on == machine.current for x in (out, *grads[1:3]))
                results[rank] += [x.clone() for x in (out, *grads[:3])]  # what is given next sees all of them
    machine.run()
    wanted = [[layout.shard(x, 1, rank) for x in expected[::4] + expected] for rank in range(ranks)]  # padding is 0
    gaps = [x - y for its, right in zip(results, wanted, strict=True) for x, y in zip(its, right, strict=True)]
    return max(float(gap.abs().nan_to_num(torch.inf).max()) for gap in gaps)


@pytest.mark.parametrize("steps_of", ["p2p", "copy", "copy_all"])
@pytest.mark.parametrize("ranks, part_bytes", [(2, 2**28), (3, 0), (4, 2**28), (4, 2048), (6, 2**28)])
@pytest.mark.parametrize("sequence", [EVEN, FOUR, ODD, UNEVEN, HALF, WINDOW, WINDOWS])
def test_any_order_is_right(
    sequence: Sequence, ranks: int, part_bytes: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PART_BYTES", part_bytes)
    monkeypatch.setattr(transport, "SHORT", 0)
    for seed, in_memory in itertools.product(range(8 if sequence is EVEN else 3), (False, True)):
        wrong = wrong_by(sequence, ranks, seed, steps_of, in_memory)
        assert wrong <= (1e-12 if sequence.dtype == torch.float64 else 0.1)


def test_after_an_error_all_that_stands_beside_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing of another caller's."""
    waited: list[str] = []
    mine, another = SimpleNamespace(wait_stream=waited.append), SimpleNamespace()
    streams = [((mine, "copies"), "my copies"), ((another, "sums"), "another's sums"), ((mine, "sums"), "my sums")]
    monkeypatch.setattr(beside, "_streams", SimpleNamespace(items=lambda: streams))
    monkeypatch.setattr(beside, "current_stream", lambda _: mine)
    beside.wait_for_all(torch.device("cuda", 0))
    assert waited == ["my copies", "my sums"]
    beside.wait_for_all(torch.device("cpu"))
    assert len(waited) == 2
