"""Fixture `ranks`: four gloo ranks that import transformers once and run all jobs of this folder."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hf import jobs
from tests.parallel.helpers import pool as pools

pytest.importorskip("transformers")


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    pools.context.set_forkserver_preload(["torch", "tests.parallel.helpers.work", "tests.hf.jobs"])  # if it does not run yet
    pool = pools.Pool(4)
    pool(jobs.enter_folder, str(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.close()
