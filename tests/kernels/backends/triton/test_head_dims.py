"""Head dims in two chunks in the portable kernels: values with masks, GQA and carry, and faults that the tests find."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ringspan.kernels.backends.triton import backward, common, forward
from ringspan.kernels.backends.triton.tile_sizes import chunks
from tests.conftest import HAS_GPU
from tests.kernels.backends.test_backends import check_case
from tests.kernels.helpers.cases import CHUNKED, CHUNKED_CASES, two_blocks
from tests.kernels.helpers.dense import Case

load_tile, store_tile = common.load_tile, common.store_tile


def test_chunks_of_head_dims() -> None:
    expected = {8: (16, 0), 16: (16, 0), 24: (32, 0), 40: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32)}
    expected |= {112: (128, 0), 128: (128, 0), 136: (128, 16), 160: (128, 32), 192: (128, 64), 200: (256, 0), 256: (256, 0)}
    assert {width: chunks(width) for width in expected} == expected
    assert all(sum(chunks(width)) >= width for width in range(1, 257))


@pytest.mark.parametrize("case", CHUNKED_CASES[::5], ids=str)
def test_masks_with_head_dims_in_chunks(case: Case, device: str, poisoned_memory: None) -> None:
    check_case(case, "triton", torch.float32, device)


def wrong_results(head_dims: tuple[int, int], device: str) -> list[str]:
    """Names of the results of two blocks that differ from the reference."""
    results, expected = (two_blocks(head_dims, backend, device, rows=70) for backend in ("triton", "reference"))
    names = ("out", "lse", "dq", "dk", "dv")
    return [name for name, x, y in zip(names, results, expected, strict=True) if not (x - y).norm() <= 0.005 * y.norm()]


@pytest.mark.parametrize("head_dims", CHUNKED, ids=str)
def test_carry_with_head_dims_in_chunks(head_dims: tuple[int, int], device: str) -> None:
    assert wrong_results(head_dims, device) == []


@triton.jit
def scores_without_second_chunk(left, right, PRECISION: tl.constexpr):
    return tl.dot(left[0], tl.trans(right[0]), input_precision=PRECISION)


@triton.jit
def scores_of_second_chunk_twice(left, right, PRECISION: tl.constexpr):
    product = tl.dot(left[1], tl.trans(right[1]), input_precision=PRECISION)
    return tl.dot(left[1], tl.trans(right[1]), product, input_precision=PRECISION)


@triton.jit
def sums_without_second_chunk(weights, right, acc, PRECISION: tl.constexpr):
    return tl.dot(weights.to(right[0].dtype), right[0], acc[0], input_precision=PRECISION), acc[1]


@triton.jit
def loads_at_wrong_column(ptr, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    first = load_tile(ptr, rows, strides, row_ok, BLOCK, BLOCK)
    return first, load_tile(ptr + BLOCK - 8, rows, strides, row_ok, WIDTH - BLOCK, TAIL)


@triton.jit
def stores_at_wrong_column(ptr, values, rows, strides, row_ok, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    store_tile(ptr, values[0], rows, strides, row_ok, WIDTH, BLOCK, ADD)
    store_tile(ptr + BLOCK - 8, values[1], rows, strides, row_ok, WIDTH - BLOCK, values[1].shape[1], ADD)


@triton.jit
def first_chunk_not_scaled(chunks, factor):
    return chunks[0], chunks[1] * factor


FAULTS: dict[str, tuple[Any, str, Any, list[str]]] = {  # name: (module, function, replacement, wrong results)
    "scores: a chunk left out": (forward, "dot_transposed", scores_without_second_chunk, ["out", "lse"]),
    "scores: a chunk used twice": (forward, "dot_transposed", scores_of_second_chunk_twice, ["out", "lse"]),
    "out: a chunk left out": (forward, "accumulate_chunks", sums_without_second_chunk, ["out"]),
    "out: a wrong offset": (forward, "store_chunks", stores_at_wrong_column, ["out"]),
    "carry: a chunk not scaled": (forward, "scale_chunks", first_chunk_not_scaled, ["out"]),
    "loads: a wrong offset": (forward, "load_chunks", loads_at_wrong_column, ["out", "lse"]),
    "dS: a chunk left out": (backward, "dot_transposed", scores_without_second_chunk, ["dq", "dk", "dv"]),
    "gradients: a chunk left out": (backward, "accumulate_chunks", sums_without_second_chunk, ["dq", "dk", "dv"]),
    "gradients: a wrong offset": (backward, "store_chunks", stores_at_wrong_column, ["dq", "dk", "dv"]),
    "gradients: a chunk not scaled": (backward, "scale_chunks", first_chunk_not_scaled, ["dq", "dk"]),
    "gradients: loads at a wrong offset": (backward, "load_chunks", loads_at_wrong_column, ["dq", "dk", "dv"]),
}


@pytest.mark.skipif(HAS_GPU, reason="compiled kernels are cached by their own source")
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_chunks_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result that depends on the fault is wrong; a wrong out or lse makes gradients wrong too."""
    module, name, replacement, expected = FAULTS[fault]
    monkeypatch.setattr(module, name, replacement)
    wrong = wrong_results((96, 96), "cpu")
    assert set(expected) <= set(wrong) and wrong[0] == expected[0]
