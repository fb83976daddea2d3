"""Copying and adding up beside the kernels is right in whatever order streams do their work."""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ringspan import Layout, Mask, attention
from ringspan.parallel import ring
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.ring import ring_backward, ring_forward
from ringspan.parallel.transport import select
from ringspan.parallel.transport.copy_engine import CopyEngineTransport
from tests.parallel.transport.stream_simulator import SimulatedMachine, installed

LONG = ring.LONG
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


class RecordedCall(NamedTuple):
    """What ranks are to do, and what is to come out."""

    mask: Mask
    plans: list[list[Plan]]  # of each rank's forward and backward
    shards: list[list[torch.Tensor]]  # of each rank: q, k, v, dout
    wanted: list[list[torch.Tensor]]  # out, dq, dk, dv


def call_of(sequence: Sequence, inputs: list[torch.Tensor], ranks: int, steps_of: str) -> RecordedCall:
    q, k, v, dout = inputs
    layout, mask = Layout(sequence.kind, q.shape[1], ranks), Mask(causal=True, window=sequence.window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask, scale=0.25, backend="reference")
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    shards, wanted = (
        [[layout.shard(x, 1, rank).contiguous() for x in given] for rank in range(ranks)] for given in (inputs, results)
    )
    _, k, v, _ = shards[0]
    nbytes = select.bytes_of_gradients(k.shape[1], k, v)
    ways = [select.blocks_per_step(steps_of, layout, True, nbytes, k.shape[2], backward) for backward in (False, True)]
    return RecordedCall(
        mask, [[make_plan(layout, mask, rank, blocks) for blocks in ways] for rank in range(ranks)], shards, wanted
    )


def ring_groups(seed: int, rank: int) -> RingGroups:
    group = SimpleNamespace(group_name=f"{seed} {rank}", rank=lambda: rank)
    return RingGroups(group, group, True, list(range(8)), 1.0)


def wrong_by(sequences: list[Sequence], ranks: int, seed: int, steps_of: str, in_memory: bool) -> float:
    """Of three forwards in a row with different inputs, of these sequences in turn, and of three more with their backwards.

    K and V are there only while a call may use them. Two streams of a rank call in turn, or one alone.
    """
    machine = SimulatedMachine(ranks, seed)
    turns = [sequences[turn % len(sequences)] for turn in range(3)]
    calls = [call_of(its, its.inputs(ranks, seed)[turn], ranks, steps_of) for turn, its in enumerate(turns)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    with installed(machine, in_memory):
        for rank in range(ranks):
            pair = ring_groups(seed, rank)
            for turn, backward in enumerate([False] * 3 + [True] * 3):
                machine.current = rank, f"caller {turn % 2 if seed % 2 else 0}"
                mask, (there, back), (q, k, v, dout) = (x if isinstance(x, Mask) else x[rank] for x in calls[turn % 3][:3])
                k, v = k.clone(), v.clone()
                movers = (CopyEngineTransport(pair, plan, torch.device("cpu")) for plan in (there, back))
                out, lse = ring_forward(q, k, v, mask, next(movers), None, 0, **OPTIONS)
                grads = [out]
                if backward:
                    grads += ring_backward(dout, None, q, k, v, out, lse, mask, next(movers), 0, **OPTIONS)[:3]
                assert all(x.born_on == machine.current for x in (grads[0], *grads[2:]))
                results[rank] += [x.clone() for x in grads]  # what is given next sees all of them
                for gone in (k, v):
                    gone.fill_(torch.nan)
    machine.run()
    gaps = []
    for rank, its in enumerate(results):
        right = [call.wanted[rank][0] for call in calls] + [x for call in calls for x in call.wanted[rank]]  # padding is 0
        gaps += [x - y for x, y in zip(its, right, strict=True)]
    return max(float(gap.abs().nan_to_num(torch.inf).max()) for gap in gaps)


@pytest.mark.parametrize("steps_of", ["p2p", "copy", "copy_all"])
@pytest.mark.parametrize("ranks, part_bytes", [(2, 2**28), (3, 0), (4, 2**28), (4, 2048), (6, 2**28)])
@pytest.mark.parametrize("sequence", [EVEN, FOUR, ODD, UNEVEN, HALF, WINDOW, WINDOWS])
def test_any_order_is_right(
    sequence: Sequence, ranks: int, part_bytes: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "SHORT", 0)
    for seed, in_memory in itertools.product(range(6 if sequence is EVEN else 2), (False, True)):
        monkeypatch.setattr(ring, "LONG", 0 if in_memory else LONG)  # then two kernels are at work in a forward, too
        wrong = wrong_by([sequence], ranks, seed, steps_of, in_memory)
        assert wrong <= (1e-12 if sequence.dtype == torch.float64 else 0.1)


@pytest.mark.parametrize("steps_of", ["copy", "copy_all"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sequences_in_turn_are_right(ranks: int, steps_of: str) -> None:
    """The same memory holds other shapes, and grows, in calls that follow each other."""
    for seed, in_memory in itertools.product(range(2), (False, True)):
        for sequences in ([EVEN, ODD, WINDOWS], [WINDOWS, EVEN], [ODD, FOUR]):
            assert wrong_by(sequences, ranks, seed, steps_of, in_memory) <= 1e-12


@pytest.mark.parametrize("steps_of", ["p2p", "copy"])
@pytest.mark.parametrize("long", [0, LONG])
@pytest.mark.parametrize("ranks, late", [(4, 1), (6, 2), (8, 6)])
def test_a_late_reader_holds_up_nobody(
    ranks: int, late: int, long: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose first kernel never ends has no place free for what comes third. The others' kernels go on."""
    monkeypatch.setattr(ring, "LONG", long)
    machine, outs = SimulatedMachine(ranks, late), []
    call = call_of(EVEN, EVEN.inputs(ranks, 0)[0], ranks, steps_of)
    with installed(machine, False):
        kernel = ring.block_forward

        def forward(*args: Any, **options: Any) -> None:
            never = machine.current[0] == late
            machine.give(lambda: None, lambda: not never)
            kernel(*args, **options)

        monkeypatch.setattr(ring, "block_forward", forward)
        for rank in range(ranks):
            machine.current = rank, "caller"
            transport = CopyEngineTransport(ring_groups(late, rank), call.plans[rank][0], torch.device("cpu"))
            outs.append(ring_forward(*call.shards[rank][:3], call.mask, transport, None, 0, **OPTIONS)[0])
        monkeypatch.undo()
    machine.run(held=True)
    right = [float((out - call.wanted[rank][0]).abs().max()) <= 1e-12 for rank, out in enumerate(outs)]
    assert right == [rank != late for rank in range(ranks)]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_late_reader_holds_up_no_other_gradients(late: int, in_memory: bool) -> None:
    """A rank that never begins gives and takes nothing: its neighbours wait, but what they made for theirs is sent."""
    machine, ranks, grads = SimulatedMachine(5, late), 5, []
    sequence = Sequence("contiguous", 8, 0, 1, (2, 2), (16, 16), window=4)
    inputs = sequence.inputs(ranks, 0)[0]
    call = call_of(sequence, inputs, ranks, "copy")
    lse = attention(*inputs[:3], call.mask, scale=0.25, backend="reference", return_lse=True)[1]
    stats = [Layout("contiguous", 40, ranks).shard(lse, 2, rank).contiguous() for rank in range(ranks)]
    with installed(machine, in_memory):
        for rank in range(ranks):
            machine.current = rank, "caller"
            if rank == late:
                machine.give(lambda: None, lambda: False)
            q, k, v, dout = call.shards[rank]
            transport = CopyEngineTransport(ring_groups(late, rank), call.plans[rank][1], torch.device("cpu"))
            given = dout, None, q, k, v, call.wanted[rank][0], stats[rank], call.mask, transport, 0
            grads.append(ring_backward(*given, **OPTIONS)[:3])
    machine.run(held=True)
    for rank, its in enumerate(grads):
        right = [float((x - y).abs().max()) <= 1e-12 for x, y in zip(its, call.wanted[rank][1:], strict=True)]
        assert all(right) == (abs(rank - late) > 1), (rank, right)


def test_after_an_error_all_that_stands_beside_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing of another caller's."""
    waited: list[str] = []
    mine, another = SimpleNamespace(wait_stream=waited.append), SimpleNamespace()
    streams = [((mine, "copies"), "my copies"), ((another, "sums"), "another's sums"), ((mine, "sums"), "my sums")]
    monkeypatch.setattr(streams, "_streams", SimpleNamespace(items=lambda: streams))
    monkeypatch.setattr(streams, "current_stream", lambda _: mine)
    streams.wait_for_all(torch.device("cuda", 0))
    assert waited == ["my copies", "my sums"]
    streams.wait_for_all(torch.device("cpu"))
    assert len(waited) == 2
