"""Fixtures: pools of gloo ranks, started on first use; two ranks that compare their arguments in every call."""

from collections.abc import Iterator

import pytest

from tests.parallel.conftest import pools
from tests.parallel.helpers.pool import Pool

__all__ = ["pools"]


@pytest.fixture(scope="package")
def checking_ranks() -> Iterator[Pool]:
    pool = Pool(2, timeout=60, environment={"RINGSPAN_CHECK": "1"})
    yield pool
    pool.close()
