"""Fixture `pools`: one pool of gloo ranks per world size, started on first use."""

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.helpers.pool import Pool


@pytest.fixture(scope="package")  # gloo ranks poll while idle: thirty of them use most of a core
def pools() -> Iterator[Callable[[int], Pool]]:
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size not in started:
            started[size] = Pool(size)
        return started[size]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture(scope="module")
def four_checking_ranks() -> Iterator[Pool]:
    """Ranks that compare their arguments in every call."""
    pool = Pool(4, timeout=20, environment={"RINGSPAN_CHECK": "1"})
    yield pool
    pool.close()
