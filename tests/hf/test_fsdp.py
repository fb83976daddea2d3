"""FSDP2 around a model on a ring: exact gradients, mixed precision, checkpointing without a second ring, compilation."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.hf import jobs


@pytest.mark.parametrize(("name", "kind"), [("llama", "packed"), ("gpt-oss", "left")])
def test_gradients_of_a_sharded_model_are_exact(ranks: Callable[..., list[Any]], name: str, kind: str) -> None:
    for errors, (plain, checkpointed) in ranks(jobs.fsdp_exact, 2, name, kind)[:2]:
        assert len(errors) == 3 and max(errors.values()) < 1e-10, errors
        assert plain == checkpointed > 0  # the recomputation does not run the ring


def test_mixed_precision_is_as_exact_as_eager(ranks: Callable[..., list[Any]]) -> None:
    for ring, eager in ranks(jobs.fsdp_mixed, 2)[:2]:
        assert 1e-3 < ring < 1.25 * eager
