"""Copy engine transport over memory that processes share: source and target of each copy, and the signal before it."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ringspan.parallel.transport import copy_engine
from ringspan.parallel.transport.gpu_signals import GRADS_READ, GRADS_READY, KV_WRITTEN, SLOT_FREE
from tests.parallel.helpers import jobs
from tests.parallel.helpers.ring_cases import EXACT, ring_cases
from tests.parallel.helpers.work import RingCase

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "ring, ulysses, transport",
    [(2, 1, "copy"), (4, 1, "copy"), (8, 1, "copy"), (2, 2, "copy"), (3, 1, "copy_all"), (4, 1, "copy_all")],
)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_equals_the_reference(kind: str, ring: int, ulysses: int, transport: str, pools) -> None:
    if kind == "striped" and ulysses > 1:
        pytest.skip("striped has no Ulysses")
    for case in ring_cases(kind, ring, ulysses):
        results = pools(ring * ulysses)(jobs.compare_with_shared_memory, replace(case, transport=transport))
        for rank, errors in enumerate(results):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"{case} on rank {rank}: {wrong}"


@pytest.mark.parametrize("transport", ["copy", "copy_all"])
def test_consecutive_calls_are_right_with_a_slow_rank(transport: str, pools) -> None:
    case = RingCase("slow-rank", ring=4, transport=transport, mask=dict(causal=True))
    assert max(pools(4)(jobs.compare_with_slow_rank, case)) <= EXACT


@pytest.mark.parametrize("transport", ["copy", "copy_all"])
def test_calls_after_an_error_are_right(transport: str, pools) -> None:
    case = RingCase("after-error", ring=4, transport=transport, mask=dict(causal=True))
    assert max(pools(4)(jobs.compare_after_errors, case)) <= EXACT


def test_a_step_waits_only_for_its_owner_and_reader_ranks(pools) -> None:
    """For all its owners at once, and for all its readers at once."""
    (ready_0, ready_1), (read_0, read_1) = GRADS_READY, GRADS_READ  # of the two slots, of which slot 1 comes first
    for counts in pools(4)(jobs.count_waits, RingCase("waits", ring=4, transport="copy", mask=dict(causal=True))):
        assert counts["forward"] == {SLOT_FREE: [2, 1], KV_WRITTEN: [2, 1]}
        gradients = {ready_1: [2], ready_0: [1], read_1: [2], read_0: [1]}
        assert counts["backward"] == {SLOT_FREE: [2, 1], KV_WRITTEN: [2, 1]} | gradients
    window = RingCase("window", ring=4, kind="contiguous", transport="copy", mask=dict(causal=True, window=2))
    for rank, counts in enumerate(pools(4)(jobs.count_waits, window)):
        from_owner = {KV_WRITTEN: [1]} if rank > 0 else {}
        from_reader = {SLOT_FREE: [1]} if rank < 3 else {}
        assert counts["forward"] == from_reader | from_owner
        read, ready = {read_1: [1]} if rank > 0 else {}, {ready_1: [1]} if rank < 3 else {}
        assert counts["backward"] == from_reader | from_owner | read | ready


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> copy_engine.SymmetricBuffers:
    empty = lambda nbytes, **options: torch.empty(nbytes, **options)  # noqa: E731
    memory = SimpleNamespace(empty=empty, rendezvous=lambda memory, group: None)
    monkeypatch.setattr(copy_engine, "symmetric_memory", memory)
    monkeypatch.setattr(copy_engine, "GpuSignals", lambda *_: SimpleNamespace(memory=(torch.empty(4), None)))
    for name in ("synchronize", "is_capturing"):
        monkeypatch.setattr(copy_engine, name, lambda _: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(copy_engine, "_buffers", {})
    monkeypatch.setattr(copy_engine, "_retired", [])
    return copy_engine.symmetric_buffers(SimpleNamespace(group_name="ranks"), CPU)


@pytest.mark.parametrize("is_captured", [False, True])
def test_buffers_of_a_cuda_graph_outlive_growth_and_errors(is_captured: bool, buffers: copy_engine.SymmetricBuffers) -> None:
    buffers.allocate("kv 0", 8, CPU)
    first = weakref.ref(buffers.memory["kv 0"][0])
    buffers.is_captured = is_captured
    buffers.allocate("kv 0", 16, CPU)
    assert (first() is not None) == is_captured
    assert copy_engine.symmetric_bytes() == 16 + 16 + 8 * is_captured
    copy_engine._retired.append(copy_engine._buffers.pop("ranks"))
    copy_engine.symmetric_buffers(SimpleNamespace(group_name="ranks"), CPU)
    assert copy_engine._retired == [buffers] * is_captured


def test_buffers_are_not_allocated_during_a_capture(
    buffers: copy_engine.SymmetricBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers.allocate("kv 0", 8, CPU)
    monkeypatch.setattr(copy_engine, "is_capturing", lambda _: True)
    buffers.allocate("kv 0", 8, CPU)
    for name, nbytes in (("kv 0", 9), ("kv 1", 8)):
        with pytest.raises(RuntimeError, match="run the same forward and backward once before the capture"):
            buffers.allocate(name, nbytes, CPU)
    with pytest.raises(RuntimeError, match="once before the capture"):
        copy_engine.symmetric_buffers(SimpleNamespace(group_name="others"), CPU)
