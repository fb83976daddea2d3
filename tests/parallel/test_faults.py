"""What goes wrong says so: arguments that differ between ranks, ranks that die, ranks that stall."""

import functools
import subprocess
import sys
import time

import pytest
import torch

from ringspan import Mask
from tests.parallel import jobs
from tests.parallel.pool import Failed, Pool


@pytest.fixture(scope="module")
def checking():
    """Ranks that compare what they were given in every call."""
    pool = Pool(3, environment={"RINGSPAN_CHECK": "1"})
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def exchanging():
    pool = Pool(4, timeout=20, environment={"RINGSPAN_CHECK": "1"})
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(heads=2, kv_heads=1), ["k's shape", "ranks 0, 2: (1, 6, 2, 16)", "rank 1: (1, 6, 1, 16)"]),
        (dict(dtype=torch.float64), ["dtype must be the same", "rank 1: torch.float64"]),
        (dict(softcap=2.0), ["factors must be the same", "rank 1: {'scale': 0.25, 'softcap': 2.0"]),
        (dict(mask=Mask()), ["mask must be the same", "rank 1: {'left': -1, 'right': -1"]),
        (dict(mask=Mask(causal=True, documents=[0] * 16)), ["documents"]),
        (dict(transport="all_gather"), ["transport must be the same", "rank 1: all_gather"]),
        (dict(more_rows=1), ["rank 1 refused its arguments: q has 7 tokens"]),
        (dict(mask=Mask(documents=[0] * 15)), ["rank 1 refused its arguments", "natural order"]),
    ],
)
def test_ranks_that_differ_are_told_who_has_what(changes: dict, words: list[str], checking: Pool) -> None:
    with pytest.raises(Failed) as failed:
        checking(functools.partial(jobs.attend, odd=1, **changes), patience=30)
    for rank, error in enumerate(failed.value.errors):
        assert error and error.startswith("ValueError")
        for word in words if rank != 1 or "refused" not in words[0] else []:
            assert word in error, error
    checking(jobs.attend)  # and the next call is as good as ever


def test_seeds_that_differ_are_found(checking: Pool) -> None:
    checking(functools.partial(jobs.attend, dropout=0.5, seed=4))
    with pytest.raises(Failed, match="seed must be the same on every rank, but ranks 0, 2: 1, rank 1: 2"):
        checking(_Seeds())


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(rows=3), "rank 1 refused its arguments: q has 3 tokens"),
        (dict(heads=8), "what is exchanged must be the same on every rank, but ranks 0, 2, 3: ((1, 4, 4, 16)"),
        (dict(heads=3), "rank 1 refused its arguments: ulysses="),
        (dict(kv_heads=2), "must be the same on every rank, but ranks 0, 2, 3:"),
        (dict(transport="pigeon"), "rank 1 refused its arguments: transport='pigeon'"),
        (dict(layout="zigzag"), "rank 1 refused its arguments: layout must be"),
        (dict(softcap=1.0), "factors must be the same on every rank, but ranks 0, 2, 3: {'scale': 0.25, 'softcap': 0.0"),
    ],
)
@pytest.mark.parametrize("ring, ulysses", [(2, 2), (1, 4)])
def test_ulysses_ranks_that_differ(ring: int, ulysses: int, changes: dict, words: str, exchanging: Pool) -> None:
    """All ranks of the sequence are told, those of other Ulysses groups too."""
    with pytest.raises(Failed) as failed:
        exchanging(functools.partial(jobs.attend_together, ring, ulysses, 1, **changes), patience=60)
    for rank in (0, 2, 3):
        assert words in failed.value.errors[rank], failed.value
    exchanging(functools.partial(jobs.attend_together, ring, ulysses, None))


@pytest.mark.parametrize("ring, ulysses", [(4, 1), (2, 2)])
@pytest.mark.parametrize(
    "changes", [dict(transport="pigeon"), dict(layout="zigzag"), dict(layout=None), dict(deterministic=1)], ids=str
)
def test_what_one_rank_refuses_the_others_hear_of(ring: int, ulysses: int, changes: dict, exchanging: Pool) -> None:
    begun = time.monotonic()
    with pytest.raises(Failed) as failed:
        exchanging(functools.partial(jobs.attend_together, ring, ulysses, 1, **changes), patience=60)
    assert time.monotonic() - begun < 10, "nobody waits for the time limit"
    assert failed.value.errors[1] and next(iter(changes)) in failed.value.errors[1]
    for rank in (0, 2, 3):
        assert "rank 1 refused its arguments" in (failed.value.errors[rank] or ""), failed.value


class _Seeds:
    def __call__(self) -> None:
        import torch.distributed as dist

        jobs.attend(dropout=0.5, seed=2 if dist.get_rank() == 1 else 1)


def test_only_the_first_calls_are_compared() -> None:
    pool = Pool(2)
    try:
        assert pool(jobs.comparisons, 5, None) == [3, 3]
        assert pool(jobs.comparisons, 2, 3) == [2, 2]  # in the trainer's first three steps, as often as there are layers
        assert pool(jobs.comparisons, 2, 4) == [0, 0]
        assert pool(jobs.comparisons, 2, 502, 501) == [2, 2]  # and in the first three after a resume
        assert pool(jobs.comparisons, 2, 504, 501) == [0, 0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    "does, calls, late",
    [("dies", 1, None), ("stalls", 1, None), ("dies", 4, None), ("dies", 4, 0), ("dies", 4, 2), ("stalls", 4, None)],
    ids=str,
)
def test_a_rank_that_is_gone_is_named(does: str, calls: int, late: int | None) -> None:
    """The others end within the time limit, and say which rank, op and step, whether it dies or sleeps; also where one of them
    comes late, when the dead rank's connections are known to be gone."""
    limit = 2
    pool = Pool(3, timeout=limit)
    begun = time.monotonic()
    try:
        with pytest.raises((Failed, TimeoutError)) as failed:
            pool(_Gone(1, does, calls, late), patience=60)
    finally:
        pool.close()
    assert time.monotonic() - begun < 45
    if does == "dies":
        assert failed.value.errors[1] == "it died"
    for rank in (0, 2):
        error = failed.value.errors[rank]
        assert error and f"rank {rank} waited for" in error, error
        assert "training step 7, layer 3, ring forward" in error
        assert int(error.partition("after ")[2].partition(" s")[0]) <= limit + 3
        if calls == 1:
            assert "waited for rank 1, to compare shapes" in error, error
        else:  # a rank that dies in a hop takes the connections of others with it
            assert "hop 1 of 2" in error and ("K/V from rank 1" in error or "K/V to reach rank 1" in error), error


@pytest.mark.parametrize("ring, ulysses", [(1, 3), (1, 4), (2, 2)])
def test_a_rank_that_stalls_before_an_exchange_is_named(ring: int, ulysses: int) -> None:
    pool = Pool(ring * ulysses, timeout=2)
    try:
        with pytest.raises(Failed) as failed:
            pool(jobs.stall_before_exchange, ring, ulysses, 1, patience=60)
    finally:
        pool.close()
    told = [error for error in failed.value.errors if error and "waited for rank 1 in ulysses exchange" in error]
    assert len(told) == (ulysses - 1), failed.value


def test_a_rank_that_stalls_between_forward_and_backward() -> None:
    pool = Pool(3, timeout=2)
    try:
        with pytest.raises(Failed) as failed:
            pool(jobs.stall_before_backward, 1, patience=60)
    finally:
        pool.close()
    for rank in (0, 2):
        error = failed.value.errors[rank]
        assert error and f"rank {rank} waited for" in error and "ring backward (call" in error and "rank 1" in error, error


def test_a_device_that_stands_still() -> None:
    words = "rank 0 waited for ranks 1, 2 in training step 7, ring backward (call 1); the time limit is 1 s"
    cases = [
        (["stands", "end"], 1, [words]),
        (["stands"], 0, [words]),  # NCCL's watchdog ends the process
        (["moves", "end"], 0, []),
        (["is slow", "end"], 0, []),  # each passes in time
        (["fails", "end"], 0, []),  # which the main thread hears of
    ]
    command, pipe = [sys.executable, "-m", "tests.parallel.watched"], subprocess.PIPE
    started = [subprocess.Popen([*command, *given], stdout=pipe, stderr=pipe, text=True) for given, _, _ in cases]
    for process, (given, code, expected) in zip(started, cases, strict=True):
        out, said = process.communicate(timeout=60)
        assert process.returncode == code and out == "in a buffer", (given, said)
        assert [line for line in said.splitlines() if "ringspan: " in line] == [f"ringspan: {text}" for text in expected]


class _Gone:
    def __init__(self, *args) -> None:
        self.args = args

    def __call__(self) -> None:
        jobs.attend_and(*self.args)
