"""Both rings over the copy engine transport keep their properties in any order that streams and signals allow.

The properties are listed in `simulated_ring`. A fault in transport or prefetch violates one of them.
"""

import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ringspan import Layout, attention
from ringspan.parallel import gradient_return, ring, ring_overlapped
from ringspan.parallel.gradient_return import GradientReturn
from ringspan.parallel.ring_overlapped import LaunchedKernel
from ringspan.parallel.transport import copy_engine, select, streams
from ringspan.parallel.transport.base import KVPrefetch
from ringspan.parallel.transport.copy_engine import CopyEngineTransport
from tests.parallel.transport.simulated_ring import (
    OPTIONS,
    ObservedTransport,
    SequenceShape,
    make_call,
    make_groups,
    violations,
)
from tests.parallel.transport.stream_simulator import SimulatedMachine, simulated_streams

RINGS = [ring, ring_overlapped]
SPLIT_HEADS_ABOVE = ring_overlapped.SPLIT_HEADS_ABOVE
EVEN = SequenceShape("zigzag", 4, 0, 1, (2, 2), (16, 16))
FOUR_HEADS = SequenceShape("zigzag", 4, 0, 1, (4, 4), (16, 16))  # with parts of 2048 bytes: two blocks in four parts
ONE_KV_HEAD = SequenceShape("contiguous", 3, 1, 2, (2, 1), (16, 24))  # halves of the local block are of keys
BF16 = SequenceShape("zigzag", 4, 1, 1, (4, 2), (16, 16), torch.bfloat16)  # sums have another dtype than results
WINDOW_BF16 = SequenceShape("contiguous", 80, 5, 1, (4, 2), (16, 16), torch.bfloat16, 4)  # most local rows are unshared
WINDOW = SequenceShape("zigzag", 160, 5, 1, (2, 2), (16, 24), torch.float64, 4)
THREE_KV_HEADS = SequenceShape("contiguous", 3, 1, 2, (6, 3), (16, 24))  # halves of one KV head, and of two


@pytest.mark.parametrize("loop", RINGS, ids=["ring", "overlapped"])
@pytest.mark.parametrize(
    "ranks, part_bytes, transports",  # those whose steps differ
    [
        (2, 2**28, ["p2p"]),
        (3, 0, ["p2p", "copy_all"]),
        (4, 2**28, ["p2p", "copy", "copy_all"]),
        (4, 2048, ["p2p", "copy", "copy_all"]),
        (6, 2**28, ["copy", "copy_all"]),
    ],
)
@pytest.mark.parametrize("shape", [EVEN, FOUR_HEADS, ONE_KV_HEAD, THREE_KV_HEADS, BF16, WINDOW_BF16, WINDOW])
def test_properties_hold_in_any_order(
    shape: SequenceShape,
    ranks: int,
    part_bytes: int,
    transports: list[str],
    loop: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    monkeypatch.setattr(select, "SHORT_SHARD", 0)
    for steps_of, seed in itertools.product(transports, [0, 2] if shape is EVEN else [ranks // 2]):
        monkeypatch.setattr(ring_overlapped, "SPLIT_HEADS_ABOVE", 0 if seed < 2 else SPLIT_HEADS_ABOVE)
        for small_bytes in (0, 2**26):  # returned gradients are kept, or added at once
            monkeypatch.setattr(gradient_return, "SMALL_BYTES", small_bytes)
            assert violations(loop, [shape], ranks, seed, steps_of) == []


@pytest.mark.parametrize("loop", RINGS, ids=["ring", "overlapped"])
@pytest.mark.parametrize("ranks, steps_of", [(2, "p2p"), (3, "copy_all"), (4, "copy")])
def test_properties_hold_with_a_whole_local_block(
    ranks: int, steps_of: str, loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs whose SMs half of it would not fill."""
    monkeypatch.setattr(gradient_return, "num_sms", lambda device: 132)
    monkeypatch.delattr(gradient_return, "half_blocks")
    for seed, shape in enumerate([EVEN, FOUR_HEADS, ONE_KV_HEAD, BF16]):
        assert violations(loop, [shape], ranks, seed, steps_of) == []


@pytest.mark.parametrize("loop", RINGS, ids=["ring", "overlapped"])
@pytest.mark.parametrize("steps_of", ["copy", "copy_all"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_properties_hold_over_calls_of_different_shapes(ranks: int, steps_of: str, loop: ModuleType) -> None:
    """Symmetric memory is reused for other shapes, and grows, between calls."""
    for seed in range(2):
        for shapes in ([EVEN, ONE_KV_HEAD, WINDOW], [WINDOW, EVEN], [ONE_KV_HEAD, FOUR_HEADS]):
            assert violations(loop, shapes, ranks, seed, steps_of) == []


@pytest.mark.parametrize("loop", RINGS, ids=["ring", "overlapped"])
@pytest.mark.parametrize("steps_of", ["p2p", "copy"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cuda_graph_may_run_one_branch_at_a_time(ranks: int, steps_of: str, loop: ModuleType) -> None:
    """Even one that waits for a signal: ranks still do not wait for each other."""
    for seed, shape in itertools.product([0, 2], [EVEN, ONE_KV_HEAD, WINDOW]):
        assert violations(loop, [shape], ranks, seed, steps_of, is_graph=True) == []


def test_without_its_events_a_cuda_graph_may_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a signal has to come after the rank's earlier signals, without which other ranks may not send theirs."""
    monkeypatch.setattr(CopyEngineTransport, "_wait_for", lambda self, *signal: self.buffers.signals.wait(*signal))
    found = [violations(ring, [EVEN], 4, seed, "p2p", is_graph=True) for seed in range(0, 8, 2)]
    assert ["all streams wait for each other"] in found


def missing_wait(patch: pytest.MonkeyPatch) -> None:
    """A kernel does not wait for its K/V."""
    fetch = CopyEngineTransport.fetch
    patch.setattr(CopyEngineTransport, "fetch", lambda *args: (fetch(*args), lambda: None)[1])


def swapped_buffer(patch: pytest.MonkeyPatch) -> None:
    """Owner ranks write into the other of the reader's two slots."""
    views = CopyEngineTransport._kv_views
    patch.setattr(
        CopyEngineTransport,
        "_kv_views",
        lambda self, slot, rank, *rows: views(self, slot if rank == self.rank else 1 - slot, rank, *rows),
    )


def lost_gradient(patch: pytest.MonkeyPatch) -> None:
    """An owner rank does not copy the gradients of one step."""
    return_gradients = CopyEngineTransport.return_gradients

    def without_first(self: CopyEngineTransport, index: int, *buffers: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if index == 1:
                inner.setattr(copy_engine, "copy", lambda *_: None)
            return return_gradients(self, index, *buffers)

    patch.setattr(CopyEngineTransport, "return_gradients", without_first)


def early_buffer(patch: pytest.MonkeyPatch) -> None:
    """A K/V buffer is given back before its kernel has been launched."""
    wait, start = KVPrefetch.wait, KVPrefetch.start

    def wait_and_start(self: KVPrefetch, index: int) -> Any:
        kv = wait(self, index)
        if index > 0:
            start(self, index + 2)
        return kv

    patch.setattr(KVPrefetch, "wait", wait_and_start)
    patch.setattr(KVPrefetch, "start", lambda self, index: start(self, index) if index <= 2 else None)


def unread_gradients(patch: pytest.MonkeyPatch) -> None:
    """A call ends before the owner ranks have copied its last gradients."""
    patch.setattr(CopyEngineTransport, "wait_returns", lambda self: None)


def wrong_owner(patch: pytest.MonkeyPatch) -> None:
    """An owner rank sends one step's rows to another rank."""
    views = CopyEngineTransport._kv_views
    patch.setattr(
        CopyEngineTransport,
        "_kv_views",
        lambda self, slot, rank, *rows: views(self, slot, (0, 2)[rank == 0] if rank != self.rank else rank, *rows),
    )


def unneeded_wait(patch: pytest.MonkeyPatch) -> None:
    """A kernel waits for all transfers that have been started."""
    wait = KVPrefetch.wait

    def wait_for_all(self: KVPrefetch, index: int) -> Any:
        for _, arrival in self.in_flight:
            arrival()
        return wait(self, index)

    patch.setattr(KVPrefetch, "wait", wait_for_all)


def unfinished_kernel(patch: pytest.MonkeyPatch) -> None:
    """Gradients are sent before the kernel that writes them has ended."""
    patch.setattr(ring_overlapped, "LaunchedKernel", lambda completion, *step: LaunchedKernel(lambda: None, *step))


def unfinished_half(patch: pytest.MonkeyPatch) -> None:
    """The local block's last half is added before its kernel has ended."""
    finish = GradientReturn.finish
    patch.setattr(GradientReturn, "finish", lambda self, last_sums, dk, dv, *_: finish(self, last_sums, dk, dv))


def unjoined_sums(patch: pytest.MonkeyPatch) -> None:
    """A call does not wait for the stream of sums."""
    start = GradientReturn.__init__

    def start_and_patch(self: GradientReturn, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        patch.setattr(self.sum_stream, "join", lambda: None)

    patch.setattr(GradientReturn, "__init__", start_and_patch)


@pytest.mark.parametrize("loop", RINGS, ids=["ring", "overlapped"])
@pytest.mark.parametrize(
    "fault, violated",
    [
        (missing_wait, "memory that"),
        (swapped_buffer, "memory that"),
        (lost_gradient, "which returns gradients of"),
        (early_buffer, "memory that"),
        (unread_gradients, "before rank"),
        (wrong_owner, "are visible"),
        (unneeded_wait, "waits for"),
        (unjoined_sums, "memory that"),
        (unfinished_kernel, "memory that"),
        (unfinished_half, "memory that"),
    ],
)
def test_a_fault_violates_a_property(
    fault: Callable[[pytest.MonkeyPatch], None], violated: str, loop: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop is ring and fault in (unfinished_kernel, unfinished_half):
        pytest.skip("all kernels of the plain ring are on the caller's stream")
    monkeypatch.setattr(ring_overlapped, "SPLIT_HEADS_ABOVE", 0)
    for seed in range(2):
        assert violations(loop, [EVEN], 4, seed, "p2p") == []
        with monkeypatch.context() as patch:
            fault(patch)
            found = violations(loop, [EVEN], 4, seed, "p2p")
        assert any(violated in text for text in found), found[:5]


@pytest.mark.parametrize("steps_of", ["p2p", "copy"])
@pytest.mark.parametrize("split_heads_above", [0, SPLIT_HEADS_ABOVE])
@pytest.mark.parametrize("ranks, late", [(3, 0), (4, 1), (4, 2)])
def test_a_late_reader_delays_no_other_rank(
    ranks: int, late: int, split_heads_above: int, steps_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose first kernel never completes has no free slot for the third step. With four ranks the others complete."""
    monkeypatch.setattr(ring_overlapped, "SPLIT_HEADS_ABOVE", split_heads_above)
    machine, outs = SimulatedMachine(ranks, late), []
    call = make_call(EVEN, EVEN.make_inputs(ranks, 0)[0], ranks, steps_of)
    with simulated_streams(machine, True):
        kernel = ring_overlapped.block_forward

        def forward(*args: Any, **options: Any) -> None:
            is_late = machine.current[0] == late
            machine.enqueue(lambda: None, lambda: not is_late)
            kernel(*args, **options)

        monkeypatch.setattr(ring_overlapped, "block_forward", forward)
        for rank in range(ranks):
            machine.current = rank, "caller"
            transport = ObservedTransport(machine, make_groups(late, rank), call.plans[rank], 0)
            outs.append(ring_overlapped.ring_forward(*call.shards[rank][:3], call.mask, transport, None, 0, **OPTIONS)[0])
        monkeypatch.undo()
    machine.run(may_stall=True)
    is_right = [float((out - call.expected[rank][0]).abs().max()) <= 1e-12 for rank, out in enumerate(outs)]
    assert is_right == [rank != late for rank in range(ranks)]


@pytest.mark.parametrize("loop", RINGS)
@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_late_reader_delays_only_its_neighbours_gradients(late: int, loop: ModuleType) -> None:
    """A rank that never starts sends and reads nothing: its neighbours wait, but what they computed for theirs is sent."""
    machine, ranks, grads = SimulatedMachine(5, late), 5, []
    shape = SequenceShape("contiguous", 8, 0, 1, (2, 2), (16, 16), window=4)
    inputs = shape.make_inputs(ranks, 0)[0]
    call = make_call(shape, inputs, ranks, "copy")
    lse = attention(*inputs[:3], call.mask, scale=0.25, backend="reference", return_lse=True)[1]
    lse_shards = [Layout("contiguous", 40, ranks).shard(lse, 2, rank).contiguous() for rank in range(ranks)]
    with simulated_streams(machine, loop is ring_overlapped):
        for rank in range(ranks):
            machine.current = rank, "caller"
            if rank == late:
                machine.enqueue(lambda: None, lambda: False)
            q, k, v, dout = call.shards[rank]
            transport = ObservedTransport(machine, make_groups(late, rank), call.plans[rank], 0)
            delta = machine.output_delta(dout, call.expected[rank][0])
            grads.append(loop.ring_backward(dout, delta, q, k, v, lse_shards[rank], call.mask, transport, 0, **OPTIONS))
    machine.run(may_stall=True)
    for rank, rank_grads in enumerate(grads):
        expected = call.expected[rank][1:]
        is_right = [float((x - y).abs().max()) <= 1e-12 for x, y in zip(rank_grads, expected, strict=True)]
        assert all(is_right) == (abs(rank - late) > 1), (rank, is_right)


def test_wait_for_all_waits_for_the_side_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for those of another caller."""
    waited: list[str] = []
    caller, other_caller = SimpleNamespace(wait_stream=waited.append), SimpleNamespace()
    names = (caller, "copies"), (other_caller, "other sums"), (caller, "sums")
    entries = [((owner, name), (name, None)) for owner, name in names]
    monkeypatch.setattr(streams, "_side_streams", SimpleNamespace(items=lambda: entries))
    monkeypatch.setattr(streams, "current_stream", lambda _: caller)
    streams.wait_for_all(torch.device("cuda", 0))
    assert waited == ["copies", "sums"]
    streams.wait_for_all(torch.device("cpu"))
    assert len(waited) == 2
