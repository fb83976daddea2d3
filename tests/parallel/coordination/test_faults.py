"""Faults: arguments that differ between ranks, ranks that die or stall. Every rank raises an error that names the cause."""

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringspan import Layout, Mask
from ringspan.parallel.coordination import progress
from tests.parallel.helpers import jobs, work
from tests.parallel.helpers.pool import Failed, Pool


@pytest.fixture(scope="module")
def checking_ranks() -> Iterator[Pool]:
    """Three ranks that compare their arguments in every call."""
    pool = Pool(3, environment={"RINGSPAN_CHECK": "1"})
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(heads=2, kv_heads=1), ["k's shape", "ranks 0, 2: (1, 6, 2, 16)", "rank 1: (1, 6, 1, 16)"]),
        (dict(dtype=torch.float64), ["dtype must be the same", "rank 1: torch.float64"]),
        (dict(softcap=2.0), ["factors must be the same", "rank 1: {'scale': 0.25, 'softcap': 2.0"]),
        (dict(mask=Mask()), ["mask must be the same", "rank 1: {'left': -1, 'right': -1"]),
        (dict(mask=Mask(causal=True, documents=[0] * 16)), ["documents must be the same"]),
        (dict(transport="all_gather"), ["transport must be the same", "rank 1: all_gather"]),
        (dict(deterministic=True), ["deterministic must be the same", "ranks 0, 2: False", "rank 1: True"]),
        (dict(backend="reference"), ["backend must be the same", "ranks 0, 2: auto", "rank 1: reference"]),
        (dict(requires_grad=True), ["requires_grad of q, k or v must be the same", "ranks 0, 2: False", "rank 1: True"]),
        (dict(layout=Layout("contiguous", 16, 3)), ["layout must be the same", "rank 1: Layout(kind='contiguous'"]),
        (dict(more_rows=1), ["rank 1 rejected its arguments: q has 7 tokens"]),
        (dict(mask=Mask(documents=[0] * 15)), ["rank 1 rejected its arguments", "natural order"]),
    ],
)
def test_different_arguments_are_reported_by_rank(changes: dict, words: list[str], checking_ranks: Pool) -> None:
    with pytest.raises(Failed) as failed:
        checking_ranks(functools.partial(jobs.call_ring, changed_rank=1, **changes), patience=30)
    for rank, error in enumerate(failed.value.errors):
        assert error and error.startswith("ValueError")
        for word in words if rank != 1 or "rejected" not in words[0] else []:
            assert word in error, error
    checking_ranks(jobs.call_ring)  # the next call works


def test_different_seeds_are_reported(checking_ranks: Pool) -> None:
    checking_ranks(functools.partial(jobs.call_ring, dropout=0.5, seed=4))
    with pytest.raises(Failed, match="seed must be the same on every rank, but ranks 0, 2: 1, rank 1: 2"):
        checking_ranks(_CallWithDifferentSeeds())


class _CallWithDifferentSeeds:
    def __call__(self) -> None:
        jobs.call_ring(dropout=0.5, seed=2 if dist.get_rank() == 1 else 1)


@pytest.mark.parametrize("ring, ulysses", [(4, 1), (2, 2)])
@pytest.mark.parametrize(
    "changes", [dict(transport="pigeon"), dict(layout="zigzag"), dict(layout=None), dict(deterministic=1)], ids=str
)
def test_a_rejection_is_reported_to_peers_at_once(ring: int, ulysses: int, changes: dict, four_checking_ranks: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(Failed) as failed:
        four_checking_ranks(functools.partial(jobs.call_context, ring, ulysses, 1, **changes), patience=60)
    assert time.monotonic() - start < 10, "peers must not wait for the timeout of 20 s"
    assert failed.value.errors[1] and next(iter(changes)) in failed.value.errors[1]
    for rank in (0, 2, 3):
        assert "rank 1 rejected its arguments" in (failed.value.errors[rank] or ""), failed.value


def test_a_group_that_is_destroyed_and_made_anew_works(tmp_path: Path) -> None:
    """The new groups have the names of the old ones. A mesh of the old ones is rejected on every rank."""
    pool = Pool(2, timeout=20)
    try:
        for largest_error, rejection in pool(work.remake_groups, str(tmp_path / "store"), patience=60):
            assert largest_error <= 1e-12
            assert "mesh's context group has been destroyed" in rejection and "make it again" in rejection
    finally:
        pool.close()


def test_only_the_first_calls_are_compared() -> None:
    pool = Pool(2)
    try:
        assert pool(jobs.count_comparisons, 5, None) == [3, 3]
        assert pool(jobs.count_comparisons, 2, 3) == [2, 2]  # in the trainer's first three steps, once per layer
        assert pool(jobs.count_comparisons, 2, 4) == [0, 0]
        assert pool(jobs.count_comparisons, 2, 502, 501) == [2, 2]  # and in the first three steps after a resume
        assert pool(jobs.count_comparisons, 2, 504, 501) == [0, 0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "fault, calls, late_rank",
    [
        ("dies", 1, None),
        ("dies", 1, 0),
        ("stalls", 1, None),
        ("dies", 4, None),
        ("dies", 4, 0),
        ("dies", 4, 2),
        ("stalls", 4, None),
    ],
    ids=str,
)
def test_a_missing_rank_is_named(fault: str, calls: int, late_rank: int | None) -> None:
    """The other ranks end within the timeout and name rank, op and step, whether the rank dies or stalls.

    Also if one of them is late, when the connections of the dead rank have already been closed.
    """
    timeout = 2
    pool = Pool(3, timeout=timeout)
    start = time.monotonic()
    try:
        with pytest.raises((Failed, TimeoutError)) as failed:
            pool(_CallWithFault(1, fault, calls, late_rank), patience=60)
    finally:
        pool.close()
    assert time.monotonic() - start < 45
    if fault == "dies":
        assert failed.value.errors[1] == "it died"
    for rank in (0, 2):
        error = failed.value.errors[rank]
        assert error and f"rank {rank} waited for" in error, error
        assert "training step 7, layer 3, ring forward" in error
        assert int(error.partition("after ")[2].partition(" s")[0]) <= timeout + 3
        if calls == 1:
            assert "waited for rank 1, to compare shapes" in error, error
        else:  # Both hops are posted at the start: a connection that has just been closed fails in one or the other.
            assert "of 2" in error and any(f"waited for K/V {way} rank 1" in error for way in ("from", "to reach")), error


class _CallWithFault:
    def __init__(self, *args) -> None:
        self.args = args

    def __call__(self) -> None:
        jobs.call_ring_with_fault(*self.args)


def test_a_rank_that_stalls_before_the_backward_is_named() -> None:
    pool = Pool(3, timeout=2)
    try:
        with pytest.raises(Failed) as failed:
            pool(jobs.stall_before_backward, 1, patience=60)
    finally:
        pool.close()
    for rank in (0, 2):
        error = failed.value.errors[rank]
        assert error and f"rank {rank} waited for" in error and "ring backward (call" in error and "rank 1" in error, error


def test_a_stuck_gpu_is_reported_and_ends_the_process() -> None:
    message = "rank 0 waited for ranks 1, 2 in training step 7, ring backward (call 1); the time limit is 1 s"
    cases = [
        (["is stuck", "end"], 1, [message]),
        (["is stuck"], 0, [message]),  # NCCL's watchdog would end the process
        (["progresses", "end"], 0, []),
        (["is slow", "end"], 0, []),  # each event completes in time
        (["fails", "end"], 0, []),  # the main thread gets the error
    ]
    command, pipe = [sys.executable, "-m", "tests.parallel.helpers.watched"], subprocess.PIPE
    processes = [subprocess.Popen([*command, *args], stdout=pipe, stderr=pipe, text=True) for args, _, _ in cases]
    for process, (args, code, expected) in zip(processes, cases, strict=True):
        out, err = process.communicate(timeout=600)
        assert process.returncode == code and out == "in a buffer", (args, err)
        assert [line for line in err.splitlines() if "ringspan: " in line] == [f"ringspan: {text}" for text in expected]


def test_a_process_that_ends_releases_its_waits_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all groups that still exist."""
    calls: list[str] = []

    class Signals:
        def __init__(self, name: str) -> None:
            self.name = name

        def release(self) -> None:
            calls.append(self.name)

    exists = Signals("exists")
    monkeypatch.setattr(progress, "_before_end", [])
    progress.before_end(exists.release)
    progress.before_end(Signals("was destroyed").release)
    monkeypatch.setattr(progress, "RELEASE_S", 0.05)
    progress._release_waits()
    assert len(calls) >= 2 and set(calls) == {"exists"}


def test_the_main_thread_of_a_process_that_ends_does_not_go_on() -> None:
    with pytest.raises(progress.Stalled):
        threading.Thread(target=progress._raise_in_main_thread, args=(progress.Stalled,)).start()
        time.sleep(0.5)
        pytest.fail("the main thread went on")
