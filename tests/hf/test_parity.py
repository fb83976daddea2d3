"""Logits and all gradients in fp64: six models, plain, padded and packed, on 1 to 4 ranks, against a dense oracle."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.hf import jobs
from tests.hf.models import (
    CONFIGS,
    KINDS,
    inputs_of,
    make_batch,
    make_model,
    relative_errors,
    run_oracle,
    valid_rows,
    worst,
)

LAYOUTS = {1: "zigzag", 2: "zigzag", 3: "contiguous", 4: "striped"}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_oracle_equals_eager_in_fp32(name: str) -> None:
    """Of packed sequences, eager runs each document alone: not every model separates them."""
    for kind in ("plain", "left", "packed"):
        batch, eager = make_batch(kind), make_model(name, "eager", torch.float32)
        if kind == "packed":
            starts = [[*(positions == 0).nonzero().flatten().tolist(), None] for positions in batch["position_ids"]]
            rows = [[ids[i:j] for i, j in pairwise(edges)] for ids, edges in zip(batch["input_ids"], starts, strict=True)]
            logits = torch.stack([torch.cat([eager(ids[None]).logits[0] for ids in row]) for row in rows])
        else:
            logits = eager(**inputs_of(batch)).logits
        expected = run_oracle(name, batch, torch.float32)
        errors = relative_errors({"logits": logits[valid_rows(batch)]}, {"logits": expected["logits"]})
        assert errors["logits"] < 1e-5, kind


@pytest.mark.parametrize("name", CONFIGS)
def test_one_device_equals_the_oracle(name: str) -> None:
    for kind in KINDS:
        actual = jobs.one_device(name, kind, "ringspan", torch.float64)
        exact, norms = worst(name, relative_errors(actual, run_oracle(name, make_batch(kind))))
        assert exact < 1e-10 and norms < 1e-6, kind


def check(ranks: Callable[..., list[Any]], size: int, name: str, kinds: list[str], layout: str, ulysses: int = 1) -> None:
    for errors in filter(None, ranks(jobs.parity, size, name, kinds, layout, ulysses)):
        assert all(exact < 1e-10 and norms < 1e-6 for exact, norms in errors.values()), errors


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_equals_the_oracle(ranks: Callable[..., list[Any]], size: int, name: str) -> None:
    check(ranks, size, name, ["left", "packed"], LAYOUTS[size])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_equals_the_oracle_in_all_cases(ranks: Callable[..., list[Any]], size: int, name: str) -> None:
    check(ranks, size, name, list(KINDS), LAYOUTS[size])
    check(ranks, size, name, ["packed"], "zigzag")


def test_ulysses_and_a_ring_equal_the_oracle(ranks: Callable[..., list[Any]]) -> None:
    check(ranks, 4, "gpt-oss", ["packed"], "zigzag", ulysses=2)
