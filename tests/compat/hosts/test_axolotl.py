"""Axolotl's monkeypatch path, from the installed package, with one changed import."""

import pytest

pytest.importorskip("axolotl")

from tests.compat.hosts import axolotl_jobs
from tests.parallel.helpers.pool import Pool


def test_ten_steps_equal_dense_attention_on_one_rank() -> None:
    """Packed documents across the shards of two ranks, in fp64."""
    pool = Pool(2, timeout=60)
    try:
        for name in ("llama", "qwen3"):
            for loss_difference, weight_difference in pool(axolotl_jobs.compare, name):
                assert loss_difference < 1e-10 and weight_difference < 1e-10, name
    finally:
        pool.close()
