"""`paged_attention` equals `attention`: by the Triton kernel (interpreted on a CPU) and by gathering pages."""

import math

import pytest
import torch
from torch import Tensor

from ringspan import Mask, attention, paged_attention
from ringspan.kernels import paged_attention as module
from ringspan.kernels.runtime import triton_compat

PAGE = 16


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def random_pages(
    heads: int, kv_heads: int, width: int, v_width: int, lengths: list[int], device: str, page: int = PAGE
) -> list[Tensor]:
    """Return q, keys, values, table and lengths. Pages are in random order; memory outside the sequences is NaN."""
    counts = [-(-length // page) for length in lengths]
    numbers = torch.randperm(sum(counts) + 3)
    keys, values = (torch.full((len(numbers), page, kv_heads, n), torch.nan) for n in (width, v_width))
    table, start = torch.zeros(len(lengths), max(counts), dtype=torch.int32), 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = numbers[start : start + count]
        table[index, :count], start = pages, start + count
        for memory in (keys, values):
            rows = memory[pages].flatten(0, 1)
            rows[:length] = torch.randn_like(rows[:length])
            memory[pages] = rows.view(count, *memory.shape[1:])
    q = torch.randn(len(lengths), heads, width)
    return [x.to(device) for x in (q, keys, values, table, torch.tensor(lengths, dtype=torch.int32))]


def reference(inputs: list[Tensor], window: int | None, **options: object) -> Tensor:
    """Gather the pages of each sequence and call the reference backend in fp64."""
    q, keys, values, table, lengths = (x.double() if x.is_floating_point() else x for x in inputs)
    outs = []
    for index, length in enumerate(lengths.tolist()):
        k, v = (x[table[index].long()].flatten(0, 1)[None, :length] for x in (keys, values))
        outs.append(
            attention(q[index, None, None], k, v, Mask(causal=True, window=window), backend="reference", **options)[0, 0]
        )
    return torch.stack(outs)


@pytest.mark.parametrize("backend", ["triton", "gather"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "v_width", "window", "splits", "options"),
    [
        (4, 4, 16, 16, None, 1, {}),
        (6, 2, 24, 40, None, 3, dict(scale=-0.4)),
        (8, 1, 64, 64, 21, 2, dict(softcap=3.0)),
        (40, 2, 16, 16, 1, 3, dict(scale=0.3)),
        (4, 2, 16, 16, None, 50, {}),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_attention(
    heads: int,
    kv_heads: int,
    width: int,
    v_width: int,
    window: int | None,
    splits: int,
    options: dict,
    sinks: bool,
    backend: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "num_splits", lambda *_: splits)
    inputs = random_pages(heads, kv_heads, width, v_width, [1, 53, 16, 17, 48], device)
    options = options | (dict(sinks=torch.randn(heads, device=device)) if sinks else {})
    out = paged_attention(*inputs, window=window, backend=backend, **options)
    in_fp64 = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    torch.testing.assert_close(out.double(), reference(inputs, window, **in_fp64), atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", ["gather", "triton"])
def test_strided_tables_and_lengths(backend: str, device: str) -> None:
    q, keys, values, table, lengths = random_pages(4, 2, 16, 16, [40, 33, 5], device)
    expected = paged_attention(q, keys, values, table, lengths, backend="gather")
    strided = table.t().contiguous().t(), torch.stack([lengths, lengths * 0 + 1], 1)[:, 0]
    assert not any(x.is_contiguous() for x in strided)
    torch.testing.assert_close(paged_attention(q, keys, values, *strided, backend=backend), expected)


def test_splits_fill_a_gpu_and_hold_at_least_one_page() -> None:
    assert module.num_splits(num_blocks=8, pages=100, multiprocessors=132) == 66
    assert module.num_splits(num_blocks=8, pages=5, multiprocessors=132) == 5
    assert module.num_splits(num_blocks=1000, pages=100, multiprocessors=132) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=torch.zeros(2, 4)), "give q .B, Hq, D"),
        (dict(values=torch.zeros(3, 8, 2, 16)), "give q .B, Hq, D"),
        (dict(q=torch.zeros(2, 5, 16)), "q has 5 heads, keys have 2"),
        (dict(table=torch.zeros(2, 3)), "give int32"),
        (dict(lengths=torch.zeros(3, dtype=torch.int32)), "give int32"),
        (dict(q=torch.zeros(2, 4, 16, dtype=torch.float64)), "must have one dtype"),
        (dict(window=0), "window=0 must be an int of at least 1"),
        (dict(window=(3, 0)), r"window=\(3, 0\) must be an int"),
        (dict(sinks=torch.zeros(3)), "shape .4,."),
        (dict(sinks=[0.0] * 4), "sinks must be a tensor of shape .4,., not list"),
        (dict(q=[[0.0]]), "q must be a tensor, not list"),
        (dict(table=[[0, 1, 2]] * 2), "table must be a tensor, not list"),
        (dict(table=int32(1, 2).view(2, 1)[:, :0]), r"table \(2, 0\): only the first dimension may be 0"),
        (dict(keys=torch.zeros(3, 0, 2, 16), values=torch.zeros(3, 0, 2, 16)), r"keys \(3, 0, 2, 16\): only the first"),
        (dict(keys=torch.zeros(3, 16, 0, 16), values=torch.zeros(3, 16, 0, 16)), r"keys \(3, 16, 0, 16\): only the first"),
        (dict(values=torch.zeros(3, 16, 2, 0)), r"values \(3, 16, 2, 0\): only the first"),
        (dict(values=torch.zeros(3, 16, 2, 8)), "values have head dim 8: 16 to 256 in steps of 8 work"),
        (dict(lengths=int32(1, 49)), r"lengths\[1\]=49 must be 1 to 48"),
        (dict(lengths=int32(0, 1)), r"lengths\[0\]=0 must be 1 to 48"),
        (dict(lengths=int32(1, -3)), r"lengths\[1\]=-3 must be 1 to 48"),
        (dict(table=int32(0, 0, 0, -1, 0, 0).view(2, 3)), r"table\[1\] has page -1: pages must be >= 0 and < 3"),
        (dict(table=int32(0, 3, 0, 0, 0, 0).view(2, 3), lengths=int32(17, 1)), r"table\[0\] has page 3: pages must be"),
        (dict(softcap=-1.0), "softcap=-1"),
        (dict(scale=math.inf), "scale=inf"),
        (dict(backend="hopper"), "choose auto, gather or triton"),
        (dict(keys=torch.zeros(3, 24, 2, 16), values=torch.zeros(3, 24, 2, 16)), "powers of two from 16 on"),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict, message: str) -> None:
    arguments = dict(
        q=torch.zeros(2, 4, 16), keys=torch.zeros(3, 16, 2, 16), values=torch.zeros(3, 16, 2, 16), backend="triton"
    )
    arguments |= dict(table=torch.zeros(2, 3, dtype=torch.int32), lengths=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | changes))


def test_the_kernel_on_a_cpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compat, "INTERPRETED", False)
    inputs = random_pages(4, 2, 16, 16, [20], "cpu")
    with pytest.raises(ValueError, match=r"^backend='triton' does not run on cpu .*: use backend='gather'"):
        paged_attention(*inputs, backend="triton")


@pytest.mark.parametrize("backend", ["triton", "gather"])
def test_there_is_no_gradient(backend: str, device: str) -> None:
    q, *others = random_pages(4, 2, 16, 16, [20, 3], device)
    sinks = torch.randn(4, device=device, requires_grad=True)
    assert not paged_attention(q.requires_grad_(), *others, sinks=sinks, backend=backend).requires_grad


@pytest.mark.parametrize("backend", ["triton", "gather"])
def test_an_empty_batch_and_unused_entries(backend: str, device: str) -> None:
    q, keys, values, table, lengths = random_pages(4, 2, 16, 16, [20, 3], device)
    empty = paged_attention(q[:0], keys, values, table[:0], lengths[:0], backend=backend)
    assert empty.shape == (0, 4, 16)
    out = paged_attention(q, keys, values, table, lengths, backend=backend)
    table[1, 1:] = -1 if backend == "gather" else 0
    assert torch.equal(paged_attention(q, keys, values, table, lengths, backend=backend), out)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, width", [(32, 8, 128), (16, 16, 64)])
def test_long_sequences_in_16_bits(heads: int, kv_heads: int, width: int) -> None:
    inputs = random_pages(heads, kv_heads, width, width, [40000, 1, 70001], "cuda", page=64)
    inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    for window in (None, 5000):
        out, expected = paged_attention(*inputs, window=window).double(), reference(inputs, window)
        assert (out - expected).square().mean().sqrt() <= 0.01 * expected.square().mean().sqrt()
