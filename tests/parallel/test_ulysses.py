"""The Ulysses exchange: recomputation, argument checks, stalled ranks. Its results are tested in test_ring.py."""

import functools

import pytest

from tests.parallel.helpers import jobs
from tests.parallel.helpers.pool import Failed, Pool
from tests.parallel.helpers.work import RingCase


def test_a_checkpointed_exchange_is_not_repeated(pools) -> None:
    case = RingCase("transfers", ring=2, ulysses=2, length=32, mask=dict(causal=True))
    for counts in pools(4)(jobs.count_transfers, case):
        assert counts["backward, checkpointed"] == counts["backward"] == (1, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rows=3), "rank 1 rejected its arguments: q has 3 tokens"),
        (dict(heads=8), "Ulysses input must be the same on every rank, but ranks 0, 2, 3: ((1, 4, 4, 16)"),
        (dict(heads=3), "rank 1 rejected its arguments: ulysses="),
        (dict(kv_heads=2), "must be the same on every rank, but ranks 0, 2, 3:"),
        (dict(return_lse=True), "return_lse must be the same on every rank, but ranks 0, 2, 3: False, rank 1: True"),
        (dict(transport="pigeon"), "rank 1 rejected its arguments: transport='pigeon'"),
        (dict(layout="zigzag"), "rank 1 rejected its arguments: layout must be"),
        (dict(softcap=1.0), "factors must be the same on every rank, but ranks 0, 2, 3: {'scale': 0.25, 'softcap': 0.0"),
    ],
)
@pytest.mark.parametrize("ring, ulysses", [(2, 2), (1, 4)])
def test_different_arguments_are_reported_on_all_ranks(
    ring: int, ulysses: int, changes: dict, message: str, four_checking_ranks: Pool
) -> None:
    """On all ranks of the sequence, those of other Ulysses groups included."""
    with pytest.raises(Failed) as failed:
        four_checking_ranks(functools.partial(jobs.call_context, ring, ulysses, 1, **changes), patience=60)
    for rank in (0, 2, 3):
        assert message in failed.value.errors[rank], failed.value
    four_checking_ranks(functools.partial(jobs.call_context, ring, ulysses, None))


@pytest.mark.parametrize("ring, ulysses", [(1, 3), (1, 4), (2, 2)])
def test_a_rank_that_stalls_before_an_exchange_is_named(ring: int, ulysses: int) -> None:
    pool = Pool(ring * ulysses, timeout=2)
    try:
        with pytest.raises(Failed) as failed:
            pool(jobs.stall_before_exchange, ring, ulysses, 1, patience=60)
    finally:
        pool.close()
    naming = [error for error in failed.value.errors if error and "waited for rank 1 in ulysses exchange" in error]
    assert len(naming) == (ulysses - 1), failed.value
