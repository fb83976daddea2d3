"""One pool of ranks for each world size, started when a test first asks for it."""

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="package")  # idle ranks of gloo are not idle: thirty of them take most of a core
def pools() -> Iterator[Callable[[int], Pool]]:
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size not in started:
            started[size] = Pool(size)
        return started[size]

    yield pool
    for each in started.values():
        each.close()
