"""Ring, gradient return and copy engine transport give right results in any order that streams and signals allow."""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ringspan import Layout, Mask, attention
from ringspan.parallel import ring, streams
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.ring import ring_backward, ring_forward
from ringspan.parallel.transport import select
from ringspan.parallel.transport.copy_engine import CopyEngineTransport
from tests.parallel.transport.stream_simulator import SimulatedMachine, simulated_streams

SPLIT_HEADS_ABOVE = ring.SPLIT_HEADS_ABOVE
OPTIONS = dict(scale=0.25, softcap=0.0, dropout=0.0, seed=None, deterministic=False, backend="reference")


class SequenceShape(NamedTuple):
    kind: str  # of its layout
    rows: int  # per rank
    padding: int  # rows of padding
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype = torch.float64
    window: int | None = None

    def make_inputs(self, ranks: int, seed: int) -> list[list[torch.Tensor]]:
        """q, k, v and dout of three calls."""
        (heads, kv_heads), (width, v_width) = self.heads, self.widths
        sizes = (heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width)
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.batch, self.rows * ranks - self.padding, *size) for size in sizes]
        calls = ([torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes] for _ in range(3))
        return [[x.to(self.dtype) for x in inputs] for inputs in calls]


EVEN = SequenceShape("zigzag", 4, 0, 1, (2, 2), (16, 16))
FOUR_HEADS = SequenceShape("zigzag", 4, 0, 1, (4, 4), (16, 16))  # with parts of 2048 bytes: two blocks in four parts
ONE_KV_HEAD = SequenceShape("contiguous", 3, 1, 2, (2, 1), (16, 24))  # halves of the local block are of keys
BF16 = SequenceShape("zigzag", 4, 1, 1, (4, 2), (16, 16), torch.bfloat16)  # sums have another dtype than results
WINDOW_BF16 = SequenceShape("contiguous", 80, 5, 1, (4, 2), (16, 16), torch.bfloat16, 4)  # most local rows are unshared
WINDOW = SequenceShape("zigzag", 160, 5, 1, (2, 2), (16, 24), torch.float64, 4)
THREE_KV_HEADS = SequenceShape("contiguous", 3, 1, 2, (6, 3), (16, 24))  # halves of one KV head, and of two


class ExpectedCall(NamedTuple):
    """Inputs of one call, and its right results."""

    mask: Mask
    plans: list[list[Plan]]  # per rank: of forward and backward
    shards: list[list[torch.Tensor]]  # per rank: q, k, v, dout
    expected: list[list[torch.Tensor]]  # per rank: out, dq, dk, dv


def make_call(shape: SequenceShape, inputs: list[torch.Tensor], ranks: int, steps_of: str) -> ExpectedCall:
    q, k, v, dout = inputs
    layout, mask = Layout(shape.kind, q.shape[1], ranks), Mask(causal=True, window=shape.window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask, scale=0.25, backend="reference")
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    shards, expected = (
        [[layout.shard(x, 1, rank).contiguous() for x in tensors] for rank in range(ranks)] for tensors in (inputs, results)
    )
    _, k, v, _ = shards[0]
    nbytes = select.gradient_bytes(k.shape[1], k, v)
    blocks = [select.blocks_per_step(steps_of, layout, True, nbytes, k.shape[2], backward) for backward in (False, True)]
    plans = [[make_plan(layout, mask, rank, each) for each in blocks] for rank in range(ranks)]
    return ExpectedCall(mask, plans, shards, expected)


def make_groups(seed: int, rank: int) -> RingGroups:
    group = SimpleNamespace(group_name=f"{seed} {rank}", rank=lambda: rank)
    return RingGroups(group, group, True, list(range(8)), 1.0)


def largest_error(shapes: list[SequenceShape], ranks: int, seed: int, steps_of: str, is_atomic: bool) -> float:
    """Largest error of three forwards with different inputs, of these shapes in turn, and of three more with backwards.

    K and V are overwritten after each call. With odd seeds two streams of a rank call alternately.
    """
    machine = SimulatedMachine(ranks, seed)
    call_shapes = [shapes[i % len(shapes)] for i in range(3)]
    calls = [make_call(shape, shape.make_inputs(ranks, seed)[i], ranks, steps_of) for i, shape in enumerate(call_shapes)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    with simulated_streams(machine, is_atomic):
        for rank in range(ranks):
            groups = make_groups(seed, rank)
            for i, backward in enumerate([False] * 3 + [True] * 3):
                machine.current = rank, f"caller {i % 2 if seed % 2 else 0}"
                call = calls[i % 3]
                forward_plan, backward_plan = call.plans[rank]
                q, k, v, dout = call.shards[rank]
                k, v = k.clone(), v.clone()
                transport = CopyEngineTransport(groups, forward_plan, torch.device("cpu"))
                out, lse = ring_forward(q, k, v, call.mask, transport, None, 0, **OPTIONS)
                outputs = [out]
                if backward:
                    transport = CopyEngineTransport(groups, backward_plan, torch.device("cpu"))
                    delta = machine.output_delta(dout, out)
                    outputs += ring_backward(dout, delta, q, k, v, lse, call.mask, transport, 0, **OPTIONS)
                assert all(x.allocated_on == machine.current for x in (outputs[0], *outputs[2:]))
                results[rank] += [x.clone() for x in outputs]  # on the caller's stream
                for x in (k, v):
                    x.fill_(torch.nan)
    machine.run()
    gaps = []
    for rank, outputs in enumerate(results):
        expected = [call.expected[rank][0] for call in calls] + [x for call in calls for x in call.expected[rank]]
        gaps += [x - y for x, y in zip(outputs, expected, strict=True)]
    return max(float(gap.abs().nan_to_num(torch.inf).max()) for gap in gaps)


@pytest.mark.parametrize("steps_of", ["p2p", "copy", "copy_all"])
@pytest.mark.parametrize("ranks, part_bytes", [(2, 2**28), (3, 0), (4, 2**28), (4, 2048), (6, 2**28)])
@pytest.mark.parametrize("shape", [EVEN, FOUR_HEADS, ONE_KV_HEAD, THREE_KV_HEADS, BF16, WINDOW_BF16, WINDOW])
def test_results_do_not_depend_on_the_order_of_streams(
    shape: SequenceShape, ranks: int, part_bytes: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "SHORT_SHARD", 0)
    for seed, is_atomic in itertools.product(range(6 if shape is EVEN else 2), (False, True)):
        # With 0 the kernels of a forward overlap too.
        monkeypatch.setattr(ring, "SPLIT_HEADS_ABOVE", 0 if is_atomic else SPLIT_HEADS_ABOVE)
        error = largest_error([shape], ranks, seed, steps_of, is_atomic)
        assert error <= (1e-12 if shape.dtype == torch.float64 else 0.1)


@pytest.mark.parametrize("steps_of", ["copy", "copy_all"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_consecutive_calls_of_different_shapes_are_right(ranks: int, steps_of: str) -> None:
    """Symmetric memory is reused for other shapes, and grows, between calls."""
    for seed, is_atomic in itertools.product(range(2), (False, True)):
        for shapes in ([EVEN, ONE_KV_HEAD, WINDOW], [WINDOW, EVEN], [ONE_KV_HEAD, FOUR_HEADS]):
            assert largest_error(shapes, ranks, seed, steps_of, is_atomic) <= 1e-12


@pytest.mark.parametrize("steps_of", ["p2p", "copy"])
@pytest.mark.parametrize("split_heads_above", [0, SPLIT_HEADS_ABOVE])
@pytest.mark.parametrize("ranks, late", [(4, 1), (6, 2), (8, 6)])
def test_a_late_reader_delays_no_other_rank(
    ranks: int, late: int, split_heads_above: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose first kernel never completes has no free slot for the third step. The other ranks' kernels complete."""
    monkeypatch.setattr(ring, "SPLIT_HEADS_ABOVE", split_heads_above)
    machine, outs = SimulatedMachine(ranks, late), []
    call = make_call(EVEN, EVEN.make_inputs(ranks, 0)[0], ranks, steps_of)
    with simulated_streams(machine, False):
        kernel = ring.block_forward

        def forward(*args: Any, **options: Any) -> None:
            is_late = machine.current[0] == late
            machine.enqueue(lambda: None, lambda: not is_late)
            kernel(*args, **options)

        monkeypatch.setattr(ring, "block_forward", forward)
        for rank in range(ranks):
            machine.current = rank, "caller"
            transport = CopyEngineTransport(make_groups(late, rank), call.plans[rank][0], torch.device("cpu"))
            outs.append(ring_forward(*call.shards[rank][:3], call.mask, transport, None, 0, **OPTIONS)[0])
        monkeypatch.undo()
    machine.run(may_stall=True)
    is_right = [float((out - call.expected[rank][0]).abs().max()) <= 1e-12 for rank, out in enumerate(outs)]
    assert is_right == [rank != late for rank in range(ranks)]


@pytest.mark.parametrize("is_atomic", [False, True])
@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_late_reader_delays_only_its_neighbours_gradients(late: int, is_atomic: bool) -> None:
    """A rank that never starts sends and reads nothing: its neighbours wait, but what they computed for theirs is sent."""
    machine, ranks, grads = SimulatedMachine(5, late), 5, []
    shape = SequenceShape("contiguous", 8, 0, 1, (2, 2), (16, 16), window=4)
    inputs = shape.make_inputs(ranks, 0)[0]
    call = make_call(shape, inputs, ranks, "copy")
    lse = attention(*inputs[:3], call.mask, scale=0.25, backend="reference", return_lse=True)[1]
    lse_shards = [Layout("contiguous", 40, ranks).shard(lse, 2, rank).contiguous() for rank in range(ranks)]
    with simulated_streams(machine, is_atomic):
        for rank in range(ranks):
            machine.current = rank, "caller"
            if rank == late:
                machine.enqueue(lambda: None, lambda: False)
            q, k, v, dout = call.shards[rank]
            transport = CopyEngineTransport(make_groups(late, rank), call.plans[rank][1], torch.device("cpu"))
            delta = machine.output_delta(dout, call.expected[rank][0])
            grads.append(ring_backward(dout, delta, q, k, v, lse_shards[rank], call.mask, transport, 0, **OPTIONS))
    machine.run(may_stall=True)
    for rank, rank_grads in enumerate(grads):
        expected = call.expected[rank][1:]
        is_right = [float((x - y).abs().max()) <= 1e-12 for x, y in zip(rank_grads, expected, strict=True)]
        assert all(is_right) == (abs(rank - late) > 1), (rank, is_right)


def test_wait_for_all_waits_for_the_side_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for those of another caller."""
    waited: list[str] = []
    caller, other_caller = SimpleNamespace(wait_stream=waited.append), SimpleNamespace()
    entries = [((caller, "copies"), "copies"), ((other_caller, "sums"), "other sums"), ((caller, "sums"), "sums")]
    monkeypatch.setattr(streams, "_side_streams", SimpleNamespace(items=lambda: entries))
    monkeypatch.setattr(streams, "current_stream", lambda _: caller)
    streams.wait_for_all(torch.device("cuda", 0))
    assert waited == ["copies", "sums"]
    streams.wait_for_all(torch.device("cpu"))
    assert len(waited) == 2
