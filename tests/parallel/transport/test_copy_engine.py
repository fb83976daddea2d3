"""Copy engine transport over memory that processes share: source and target of each copy, and the signal before it."""

from dataclasses import replace

import pytest

from ringspan.parallel.transport.gpu_signals import GRADS_READ, GRADS_READY, KV_WRITTEN, SLOT_FREE
from tests.parallel.helpers import jobs
from tests.parallel.helpers.ring_cases import EXACT, ring_cases
from tests.parallel.helpers.work import RingCase


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
        assert counts["forward"] == {SLOT_FREE: [1, 2], KV_WRITTEN: [1, 2]}
        gradients = {ready_1: [2], ready_0: [1], read_1: [2], read_0: [1]}
        assert counts["backward"] == {SLOT_FREE: [2, 1], KV_WRITTEN: [2, 1]} | gradients
    window = RingCase("window", ring=4, kind="contiguous", transport="copy", mask=dict(causal=True, window=2))
    for rank, counts in enumerate(pools(4)(jobs.count_waits, window)):
        from_owner = {KV_WRITTEN: [1]} if rank > 0 else {}
        from_reader = {SLOT_FREE: [1]} if rank < 3 else {}
        assert counts["forward"] == from_reader | from_owner
        read, ready = {read_1: [1]} if rank > 0 else {}, {ready_1: [1]} if rank < 3 else {}
        assert counts["backward"] == from_reader | from_owner | read | ready
