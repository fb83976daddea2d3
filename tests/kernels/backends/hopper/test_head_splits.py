"""Thread blocks of Hopper's backward that share a tile of keys, each with some of the query heads."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan import Mask
from ringspan.kernels.backends.hopper import backward
from ringspan.kernels.backends.hopper.arguments import num_head_splits
from ringspan.kernels.backends.triton.arguments import mask_argument
from ringspan.kernels.backends.triton.sum_gradients import Summand
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime import call_cache
from tests.conftest import HAS_GPU
from tests.kernels.backends.hopper.emulator import emulate

CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=1024)
MASKS = {
    "causal": CAUSAL,
    "window": Mask(causal=True, window=40),
    "documents": Mask(causal=True, documents=torch.arange(150) // 60),
    "no mask": None,
}
VALUES = list(
    itertools.product(
        [2, 4],
        [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)],
        MASKS,
        [dict(accumulate=False), dict(accumulate="dq"), dict(accumulate=False, deterministic=True)],
    )
)


@pytest.mark.parametrize(
    "rows, heads, kv_heads, width, mask, count",
    [  # the fastest of docs/results/concurrent-heads-h200.json and head-splits-h200.json, or at most 7 % slower ones
        (8192, 8, 2, 128, CAUSAL, 2),
        (8192, 8, 1, 128, CAUSAL, 4),
        (4096, 16, 4, 128, CAUSAL, 2),
        (2048, 32, 8, 128, CAUSAL, 2),
        (4096, 32, 8, 128, CAUSAL, 1),
        (2048, 8, 2, 128, CAUSAL, 4),
        (1024, 32, 8, 128, CAUSAL, 1),
        (16384, 8, 1, 128, CAUSAL, 2),
        (8192, 4, 1, 128, CAUSAL, 4),
        (8192, 16, 2, 128, CAUSAL, 2),
        (8192, 8, 2, 64, CAUSAL, 2),
        (8192, 8, 2, 256, CAUSAL, 2),
        (8192, 8, 2, 128, Mask(), 1),
        (8192, 8, 1, 128, Mask(), 2),
        (16384, 8, 2, 128, WINDOW, 1),
        (8192, 8, 8, 128, CAUSAL, 1),
        (8192, 16, 4, 128, CAUSAL, 1),
        (65536, 8, 1, 128, CAUSAL, 1),
        (8192, 7, 1, 128, CAUSAL, 1),  # 7 summands are too many
        # enough thread blocks, which would stream too many queries
        (4096, 64, 8, 128, CAUSAL, 2),
        (8192, 64, 8, 128, CAUSAL, 2),
        (8192, 40, 8, 128, CAUSAL, 1),
        (16384, 32, 4, 128, CAUSAL, 2),
        (32768, 32, 8, 128, CAUSAL, 1),
        (8192, 64, 8, 64, CAUSAL, 1),
        (4096, 32, 8, 256, CAUSAL, 2),
        (8192, 16, 8, 256, CAUSAL, 1),
    ],
)
def test_heads_are_split_where_thread_blocks_are_few(
    rows: int, heads: int, kv_heads: int, width: int, mask: Mask, count: int
) -> None:
    q, k = (torch.empty(1, rows, n, width, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    block_n = 64 if width > 192 else 128
    assert num_head_splits(q, k, mask_argument(mask.bounds()), block_n) == count


def gradients(
    splits: int, widths: tuple[int, int], mask: Mask | None, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Tensor]:
    """Return dq, dk and dv of 8 query and 2 KV heads, computed with this number of splits."""
    monkeypatch.setattr(backward, "num_head_splits", lambda *_: splits)
    call_cache._calls.clear()
    torch.manual_seed(0)
    shapes = (8, widths[0]), (2, widths[0]), (2, widths[1]), (8, widths[1])
    q, k, v, dout = (torch.randn(1, 150, *shape).bfloat16().to(device) for shape in shapes)
    out, lse = block_forward(q, k, v, mask, backend="hopper")
    delta = output_delta(dout, out)
    if options.get("accumulate"):
        results = [torch.zeros(q.shape, device=device), *(torch.full(x.shape, torch.nan, device=device) for x in (k, v))]
    else:
        results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for repeat in range(2):  # the second call is a replay where there is one
        if repeat and options.get("accumulate"):
            results[0].zero_()
        block_backward(dout, q, k, v, lse, delta, mask, None, None, *results, backend="hopper", **options)
    return [x.float() for x in results]


@pytest.mark.hopper
@pytest.mark.parametrize("splits, widths, mask, options", VALUES if HAS_GPU else VALUES[::11], ids=str)
def test_gradients_are_those_without_splits(
    splits: int, widths: tuple[int, int], mask: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        emulate(monkeypatch, seed=splits, resident=3)
    results = gradients(splits, widths, MASKS[mask], device, monkeypatch, **options)
    expected = gradients(1, widths, MASKS[mask], device, monkeypatch, **options)
    for result, x in zip(results, expected, strict=True):
        assert (result - x).norm() <= 1e-3 * x.norm()


def sum_without_last_part(summands: list[Summand], *rest: Any, **options: Any) -> None:
    true_sum(summands[:-1], *rest, **options)


def sum_of_first_part_twice(summands: list[Summand], *rest: Any, **options: Any) -> None:
    true_sum([*summands[:-1], summands[0]], *rest, **options)


def keys_of_another_head(*args: Any, **named: Any) -> Any:
    num_blocks, arguments = true_arguments(*args, **named)
    return num_blocks, arguments | dict(head_splits=arguments["head_splits"] + 1)


true_sum, true_arguments = backward.sum_gradients, backward.backward_arguments


@pytest.mark.skipif(HAS_GPU, reason="the faults are in host code, which the emulator also runs")
@pytest.mark.parametrize(
    "name, fault, wrong",
    [
        ("sum_gradients", sum_without_last_part, [False, True, True]),
        ("sum_gradients", sum_of_first_part_twice, [False, True, True]),
        ("backward_arguments", keys_of_another_head, [True, True, True]),
    ],
)
def test_wrong_parts_are_found(
    name: str, fault: Callable[..., Any], wrong: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    expected = gradients(1, (64, 64), CAUSAL, "cpu", monkeypatch, accumulate=False)
    monkeypatch.setattr(backward, name, fault)
    results = gradients(2, (64, 64), CAUSAL, "cpu", monkeypatch, accumulate=False)
    assert [bool((x - y).norm() > 1e-3 * y.norm()) for x, y in zip(results, expected, strict=True)] == wrong
