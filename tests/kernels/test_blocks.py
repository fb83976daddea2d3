"""The contract that rings stand on: blocks at any positions, a softmax that is carried, gradients that add up."""

import gc
import itertools
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringspan import Mask, attention
from ringspan.kernels import blocks
from ringspan.kernels.backends.block import Block
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime import call_cache
from ringspan.kernels.segments import ascending_runs, check_segments, num_rows, positions, whole
from ringspan.kernels.tensors import accumulation_dtype
from tests.conftest import HAS_GPU
from tests.kernels.cases import packed

LENGTH = 96
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=17),
    "window-pair": Mask(window=(30, 7)),
    "documents": Mask(causal=True, documents=torch.tensor(packed(30, 1, 40, -5, 20))),
    "prefix": Mask(causal=True, prefix=37),
}
ENGINES = [
    ("reference", torch.float64),
    ("chunked", torch.float64),
    ("triton", torch.float32),
    pytest.param("hopper", torch.bfloat16, marks=pytest.mark.hopper),
]


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype, fp32: float = 0.0) -> None:
    """For inputs of this dtype, whose rounding is all that may differ."""
    allowed = {torch.float64: 1e-12, torch.float32: fp32, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(got, wanted, rtol=0, atol=allowed)


def sums(*like: Tensor, begin: float = 0.0) -> list[Tensor]:
    """What gradients are added to."""
    return [torch.full_like(x, begin, dtype=accumulation_dtype(x.dtype)) for x in like]


def inputs(dtype: torch.dtype, device: str, length: int = LENGTH, heads: int = 4, width: int = 16) -> list[Tensor]:
    sizes = (heads, heads // 2, heads // 2, heads)
    return [torch.randn(2, length, h, width, dtype=dtype, device=device) for h in sizes]


def cut(length: int, blocks: int) -> list[tuple[int, int]]:
    """Uneven pieces of a sequence."""
    cuts = sorted(random.Random(blocks).sample(range(1, length), blocks - 1))
    return list(itertools.pairwise([0, *cuts, length]))


def carried(q: Tensor, k: Tensor, v: Tensor, mask: Mask, pieces: list, **options) -> tuple[Tensor, Tensor]:
    carry = None
    for index, (a, b) in enumerate(pieces):
        last = index == len(pieces) - 1
        at = [(0, 1, q.shape[1])], [(a, 1, b - a)]
        carry = block_forward(q, k[:, a:b], v[:, a:b], mask, *at, carry=carry, last=last, **options)
    return carry


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("blocks", [2, 5])
def test_carry_equals_one_call(name: str, blocks: int, backend: str, dtype: torch.dtype, device: str) -> None:
    mask, (q, k, v, dout) = MASKS[name], inputs(dtype, device)
    if blocks == 5 and backend == "triton" and not HAS_GPU:  # interpreted, every head costs as much as the first
        q, k, v, dout = (x[:1, :, : max(1, x.shape[2] // 2)].contiguous() for x in (q, k, v, dout))
    options = dict(backend=backend, softcap=4.0)
    if backend != "hopper" and (name == "documents" or HAS_GPU or backend != "triton"):  # interpreted, Philox takes ten seconds
        options |= dict(dropout=0.25, seed=99)
    out, lse = block_forward(q, k, v, mask, whole(LENGTH), whole(LENGTH), **options)
    pieces = cut(LENGTH, blocks)
    random.Random(3).shuffle(pieces)
    many_out, many_lse = carried(q, k, v, mask, pieces, **options)
    assert_close(many_out, out, dtype, 2e-6)
    assert_close(many_lse, lse, lse.dtype, 2e-6)

    delta = output_delta(dout, out, backend=backend)
    once = sums(q, k, v)
    block_backward(dout, q, k, v, lse, delta, mask, whole(LENGTH), whole(LENGTH), *once, **options)
    dq, dk, dv = sums(q, k, v)
    for a, b in pieces:
        at = whole(LENGTH), [(a, 1, b - a)]
        block_backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, mask, *at, dq, dk[:, a:b], dv[:, a:b], **options)
    for one, many in zip(once, (dq, dk, dv), strict=True):
        assert_close(many, one, dtype, 5e-6)


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("first", [-4, 20 - 4], ids=["before", "behind"])
def test_queries_outside_all_documents_see_nothing(first: int, backend: str, dtype: torch.dtype, device: str) -> None:
    mask, at = Mask(documents=torch.zeros(20, dtype=torch.int64)), ([(first, 1, 10)], whole(20))
    (q, *_), (_, k, v, _) = inputs(dtype, device, 10), inputs(dtype, device, 20)
    into = torch.full_like(q, 7), torch.full((2, 4, 10), 7, dtype=accumulation_dtype(dtype), device=device)
    block_forward(q, k, v, mask, *at, backend=backend, into=into)
    inside = slice(4, None) if first < 0 else slice(4)
    wanted, wanted_lse = torch.zeros_like(q), torch.full_like(into[1], float("-inf"))
    wanted[:, inside], wanted_lse[:, :, inside] = block_forward(
        q[:, inside].contiguous(), k, v, Mask(), [(0, 1, 6 if first < 0 else 4)], whole(20), backend="reference"
    )
    assert_close(into[0], wanted, dtype, 2e-6)
    assert_close(into[1], wanted_lse, dtype, 2e-6)


SHARDS = {  # the rows of a rank: contiguous, zigzag, striped, and lists that no kernel takes at once
    "contiguous": [(32, 1, 32)],
    "zigzag": [(16, 1, 16), (64, 1, 16)],
    "striped": [(1, 3, 32)],
    "three": [(0, 1, 8), (24, 1, 8), (80, 1, 16)],
    "descending": [(64, 1, 16), (16, 1, 16)],
    "interleaved": [(0, 4, 16), (2, 4, 16)],
}


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", MASKS)
def test_segments_are_rows_of_the_whole(name: str, shard: str, backend: str, dtype: torch.dtype, device: str) -> None:
    """Rows of a shard against the keys of another give what the same rows and keys give inside the whole sequence."""
    mask, at = MASKS[name], SHARDS[shard]
    q, k, v, dout = inputs(dtype, device)
    rows = positions(at, device)
    keys_at = [(8, 1, 40), (64, 2, 16)] if shard != "striped" else [(2, 3, 30)]
    keys = positions(keys_at, device)
    seen = mask.visible(torch.arange(LENGTH), torch.arange(LENGTH)).to(device)[:, rows][:, :, keys]
    out, lse, grads = dense_rows(q[:, rows], k[:, keys], v[:, keys], dout[:, rows], seen)

    def pad(x: Tensor) -> Tensor:
        """Rows behind the segments, which hold anything."""
        return torch.cat([x, torch.full_like(x[:, :5], float("nan"))], 1)

    padded = [pad(x) for x in (q[:, rows], k[:, keys], v[:, keys])]
    got, got_lse = block_forward(*padded, mask, at, keys_at, backend=backend)
    assert_close(got[:, :-5], out, dtype, 3e-6)
    assert_close(got_lse[:, :, :-5], lse, lse.dtype, 3e-6)
    assert (got[:, -5:] == 0).all() and (got_lse[:, :, -5:] == -float("inf")).all()
    delta = output_delta(pad(dout[:, rows]), got)
    results = sums(*padded)
    block_backward(pad(dout[:, rows]), *padded, got_lse, delta, mask, at, keys_at, *results, backend=backend)
    for result, grad in zip(results, grads, strict=True):
        assert_close(result[:, :-5], grad, dtype, 1e-5)
        assert (result[:, -5:] == 0).all()


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("at", [[(0, 1, 93), (100, 2**27, 3)], [(0, 2**22, 93), (2**28 + 2**27, 1, 3)]], ids=["far", "near"])
def test_segments_of_different_steps(at: list, backend: str, dtype: torch.dtype, device: str) -> None:
    """The product of one's step and the other's count does not fit into 32 bits."""
    q, k, v, dout = inputs(dtype, device)
    results = []
    for its, x in ((backend, dtype), ("chunked", torch.float64)):
        given = [tensor.to(x) for tensor in (q, k, v, dout)]
        out, lse = block_forward(*given[:3], Mask(causal=True), at, at, backend=its)
        delta, grads = output_delta(given[3], out), sums(*given[:3])
        block_backward(given[3], *given[:3], lse, delta, Mask(causal=True), at, at, *grads, backend=its)
        results.append((out, lse, *grads))
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted.to(got.dtype), dtype, 1e-5)


def dense_rows(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    s = s.masked_fill(~seen[:, None], -float("inf"))
    lse = s.logsumexp(-1)
    p = torch.where(seen[:, None], torch.exp(s - torch.where(lse == -float("inf"), 0, lse)[..., None]), 0)
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    acc = accumulation_dtype(dout.dtype)
    return out.to(dout.dtype), lse.to(acc), [torch.nan_to_num(g).to(acc) for g in grads]


@pytest.mark.parametrize("backend, dtype", ENGINES)
def test_a_block_that_nobody_sees_changes_nothing(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = inputs(dtype, device)
    before = block_forward(q, k, v, Mask(causal=True), whole(LENGTH), whole(LENGTH), last=False, backend=backend)
    kept = [x.clone() for x in before]
    late = whole(LENGTH, start=LENGTH)
    after = block_forward(q, k, v, Mask(causal=True), whole(LENGTH), late, carry=before, last=False, backend=backend)
    inside = block_forward(
        q, k, v, Mask(causal=True), whole(LENGTH), late, carry=before, into=before, last=False, backend=backend
    )
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(kept, after, inside, strict=True))
    # rows that see nothing keep their bits in a tile where others see something
    split = block_forward(
        q, k, v, Mask(causal=True), whole(LENGTH), whole(LENGTH, start=70), carry=kept, last=False, backend=backend
    )
    assert torch.equal(split[0][:, :70], kept[0][:, :70]) and torch.equal(split[1][:, :, :70], kept[1][:, :, :70])
    assert not torch.equal(split[0][:, 70:], kept[0][:, 70:])
    dq, dk, dv = sums(q, k, v, begin=3.0)
    delta = output_delta(dout, kept[0].to(dout.dtype))
    block_backward(dout, q, k, v, kept[1], delta, Mask(causal=True), whole(LENGTH), late, dq, dk, dv, backend=backend)
    assert all((g == 3).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("rows_at", [whole(LENGTH), whole(LENGTH - 9), [(64, 1, 16), (16, 1, 16)]], ids=["all", "tail", "runs"])
def test_dq_adds_up_alone(rows_at: list, backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = inputs(dtype, device)
    mask, at = Mask(causal=True), (rows_at, whole(LENGTH))
    out, lse = block_forward(q, k, v, mask, *at, backend=backend)
    given = dout, q, k, v, lse, output_delta(dout, out), mask, *at
    added = [*sums(q, begin=3.0), *sums(k, v)]
    block_backward(*given, *added, backend=backend)
    mixed = [*sums(q, begin=3.0), *sums(k, v, begin=float("nan"))]
    block_backward(*given, *mixed, backend=backend, accumulate="dq")
    assert all(torch.equal(a, b) for a, b in zip(added, mixed, strict=True))  # dq too: one program has all these keys
    final = [
        *sums(q, begin=3.0),
        *(torch.full_like(x, float("nan")) for x in (k, v)),
    ]  # and others as they are to be at the end
    block_backward(*given, *final, backend=backend, accumulate="dq")
    for one, other in zip(final, added, strict=True):
        assert_close(one, other.to(one.dtype), one.dtype, 2e-6)
    with pytest.raises(ValueError, match="accumulate"):
        block_backward(*given, *mixed, backend=backend, accumulate="dk")


@pytest.mark.parametrize("backend, dtype", ENGINES)
def test_an_empty_block_is_the_carry(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, _ = inputs(dtype, device)
    before = block_forward(q, k, v, None, last=False, backend=backend)
    after = block_forward(q, k[:, :0], v[:, :0], None, whole(LENGTH), [], carry=before, last=False, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("backend, dtype", ENGINES)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_rows_that_see_none_of_a_block_keep_the_carry(size: float, backend: str, dtype: torch.dtype, device: str) -> None:
    """To the last bit."""
    q, k, v, _ = inputs(dtype, device)
    out, lse = block_forward(q, k, v, None, last=False, backend=backend)
    before, seen = (out * size, lse * size), LENGTH // 2
    at = whole(LENGTH), [(seen, 1, LENGTH - seen)]
    after = block_forward(q, k[:, seen:], v[:, seen:], Mask(causal=True), *at, carry=before, last=False, backend=backend)
    assert torch.equal(after[0][:, :seen], before[0][:, :seen]) and torch.equal(after[1][:, :, :seen], before[1][:, :, :seen])
    assert not torch.equal(after[1][:, :, seen:], before[1][:, :, seen:]) or size > 1


@pytest.mark.parametrize("backend", ["reference", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_a_carry_counts_where_scores_are_so_large_that_64_is_nothing_beside_them(backend: str, device: str) -> None:
    q = torch.full((1, 64, 1, 64), 2.0**14, dtype=torch.bfloat16, device=device)
    k, v = -q.tile(1, 2, 1, 1), -torch.ones(1, 128, 1, 64, dtype=torch.bfloat16, device=device)
    carry = torch.ones(1, 64, 1, 64, device=device), torch.full((1, 1, 64), -(2.0**34), device=device)
    at = whole(64), whole(128)
    out, _ = block_forward(q, k, v, None, *at, carry=carry, last=False, scale=1.0, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, -127 / 129))


@pytest.mark.parametrize("accumulate", [True, False, "dq"])
@pytest.mark.parametrize("backend, dtype", ENGINES)
def test_no_queries_give_no_gradients(backend: str, dtype: torch.dtype, accumulate: bool | str, device: str) -> None:
    q, k, v, dout = inputs(dtype, device)
    lse = block_forward(q[:, :0], k, v, None, [], whole(LENGTH), backend=backend)[1]
    dq, dk, dv = sums(q[:, :0], k, v, begin=1.0)
    at = [], whole(LENGTH)
    block_backward(dout[:, :0], q[:, :0], k, v, lse, lse, None, *at, dq, dk, dv, backend=backend, accumulate=accumulate)
    assert all((x == (accumulate is True)).all() for x in (dk, dv))


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
@pytest.mark.parametrize("blocks", [2, 4, 8, 16] if HAS_GPU else [2, 16])
def test_carry_loses_no_accuracy_in_bf16(blocks: int, backend: str, device: str) -> None:
    """RMS error of out and gradients over carried blocks ≤ 1.05 × that of one call (DESIGN: the ring rule)."""
    length = 4096 if HAS_GPU else 256
    mask = Mask(causal=True)
    q, k, v, dout = (x[:1] for x in inputs(torch.bfloat16, device, length, heads=2, width=64))
    exact_inputs = [x.double() for x in (q, k, v)]
    truth, truth_lse = block_forward(*exact_inputs, mask, backend="chunked")
    truth_grads = [torch.zeros_like(x) for x in exact_inputs]
    exact_delta = output_delta(dout.double(), truth)
    at = whole(length), whole(length)
    block_backward(dout.double(), *exact_inputs, truth_lse, exact_delta, mask, *at, *truth_grads, backend="chunked")

    def errors(pieces: list) -> list[float]:
        out, lse = carried(q, k, v, mask, pieces, backend=backend)
        delta = output_delta(dout, out, backend=backend)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for a, b in pieces:
            block = whole(length), [(a, 1, b - a)]
            block_backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, mask, *block, dq, dk[:, a:b], dv[:, a:b], backend=backend)
        pairs = zip((out, dq, dk, dv), (truth, *truth_grads), strict=True)
        return [(x.double() - ref).square().mean().sqrt().item() for x, ref in pairs]

    step = length // blocks
    many = errors([(a, a + step) for a in range(0, length, step)])
    for name, one, several in zip(("out", "dq", "dk", "dv"), errors([(0, length)]), many, strict=True):
        assert several <= 1.05 * one, f"{name}: {several:.3e} over {blocks} blocks, {one:.3e} in one call"


@pytest.mark.parametrize("backend, dtype", ENGINES)
def test_five_backwards_are_bit_equal(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = (x.requires_grad_() for x in inputs(dtype, device))

    def run() -> tuple[Tensor, ...]:
        out = attention(q, k, v, Mask(causal=True), deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_block_that_is_seen_whole_has_no_mask(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have nothing to compare then: neither at first nor when a backend does the same again, after others too."""
    monkeypatch.setattr(call_cache, "_passed", {})
    module, given, at = blocks._module("chunked", way == "backward"), [], ([(64, 1, 32)], [(0, 1, 32)])

    def run(block: Block, *_: Any) -> Any:
        given.append(block.mask.bounds())
        return lambda q, k, v, bounds, *_: given.append(bounds)

    monkeypatch.setattr(module, f"block_{way}", run)
    q, k, v, dout = (torch.randn(1, 32, 2, 16) for _ in range(4))
    out, lse = torch.randn(1, 32, 2, 16), torch.randn(1, 2, 32)
    whole_seen, cut = Mask(causal=True), Mask(causal=True, window=80)
    for mask in (whole_seen, cut, whole_seen, cut):
        if way == "forward":
            block_forward(q, k, v, mask, *at, backend="chunked")
        else:
            block_backward(dout, q, k, v, lse, output_delta(dout, out), mask, *at, *sums(q, k, v), backend="chunked")
    assert given == [Mask().bounds(), cut.bounds()] * 2


UNIT = 100 if HAS_GPU else 10  # of rows, of which these sequences have 30
PADDED = torch.tensor(packed(7 * UNIT, 10 * UNIT, -3 * UNIT, 10 * UNIT))
ORDERED = {  # name: (heads, key heads, head dim, mask, whether rows are a zigzag's)
    "causal": (4, 2, 128, Mask(causal=True), False),
    "full": (4, 1, 64, Mask(), False),
    "window": (2, 2, 128, Mask(window=(7 * UNIT, UNIT // 2)), False),
    "edge": (2, 2, 128, Mask(window=(65, 10)), False),  # of a tile of queries a program's keys see one row
    "documents": (4, 4, 64, Mask.from_lengths([7 * UNIT, 1, 9 * UNIT, 14 * UNIT - 1], causal=True), False),
    "padding": (4, 2, 128, Mask(causal=True, documents=torch.stack([PADDED, PADDED.flip(0)])), False),
    "prefix": (2, 2, 128, Mask(causal=True, prefix=3 * UNIT + 3), False),
    "wide": (2, 1, 256, Mask(causal=True), False),
    "zigzag": (4, 2, 128, Mask(causal=True, window=50 * UNIT), True),
}


@pytest.mark.hopper
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_turns_change_the_order_and_nothing_else(name: str, dtype: torch.dtype, device: str) -> None:
    """The same in every run. dk and dv come from the same registers, dq from the same sums in an order of their own."""
    heads, kv_heads, width, mask, zigzag = ORDERED[name]
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, dout = (torch.randn(2, 30 * UNIT, n, width, dtype=dtype, device=device) for n in sizes)
    at = (None, None)
    if zigzag:
        at = [(first * UNIT, 1, 15 * UNIT) for first in (10, 70)], [(first * UNIT, 1, 15 * UNIT) for first in (0, 65)]
    out, lse = block_forward(q, k, v, mask, *at, backend="hopper")
    delta = output_delta(dout, out)

    def run(deterministic: bool) -> list[Tensor]:
        gradients = sums(q, k, v, begin=1.0)
        block_backward(dout, q, k, v, lse, delta, mask, *at, *gradients, deterministic=deterministic, backend="hopper")
        return gradients

    first, other = run(True), run(False)
    for _ in range(5 if HAS_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(True), strict=True))
    for one, another in zip(first, other, strict=True):
        assert (one - another).norm() <= 1e-5 * another.norm()
    if mask.length is None:  # with documents tiles begin elsewhere where nobody takes turns
        assert torch.equal(first[1], other[1]) and torch.equal(first[2], other[2])


def test_head_start_shifts_dropout(device: str) -> None:
    """Half of the heads, told where they stand, drop what they drop in the whole."""
    q, k, v, _ = inputs(torch.float32, device)
    options = dict(dropout=0.4, seed=7)
    for backend in ("chunked", "triton"):
        out, _ = block_forward(q, k, v, None, backend=backend, **options)
        half, _ = block_forward(
            q[:, :, 2:].contiguous(),
            k[:, :, 1:].contiguous(),
            v[:, :, 1:].contiguous(),
            None,
            head_start=2,
            backend=backend,
            **options,
        )
        torch.testing.assert_close(half, out[:, :, 2:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_device_is_not_asked_for_values(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have none: what runs on them waits for nobody, on a GPU either."""
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 8)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 8)
    q, k, v = (torch.randn(2, 24, heads, 16, device="meta") for heads in (4, 2, 2))
    mask, at = Mask(causal=True, window=30, documents=torch.arange(90) // 40), [(0, 1, 12), (33, 2, 12)]
    options = dict(dropout=0.2, seed=5, softcap=3.0, backend=backend)
    out, lse = block_forward(q, k, v, mask, at, at, **options)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = output_delta(out, out, backend=backend, mask=mask, q_at=at)
    block_backward(out, q, k, v, lse, delta, mask, at, at, dq, dk, dv, **options)
    assert out.is_meta and dk.is_meta


def test_segments() -> None:
    assert check_segments("q_at", [(0, 1, 4), (4, 1, 3), (9, 1, 0), (9, 2, 2)], 9) == ((0, 1, 7), (9, 2, 2))
    assert positions([(3, 2, 3), (20, 1, 2)]).tolist() == [3, 5, 7, 20, 21]
    assert num_rows([(3, 2, 3), (20, 1, 2)]) == 5
    assert ascending_runs(((5, 1, 5), (0, 1, 5), (8, 1, 2), (20, 1, 1))) == (
        (slice(0, 5), ((5, 1, 5),)),
        (slice(5, 12), ((0, 1, 5), (8, 1, 2))),
        (slice(12, 13), ((20, 1, 1),)),
    )
    for wrong in ([(0, 0, 4)], [(0, 1, -1)], [(0, 1, 10)], [(2**29, 1, 1)], [(0.0, 1, 4)], [(0, 1)], [(torch.tensor(0), 1, 4)]):
        with pytest.raises(ValueError, match="q_at"):
            check_segments("q_at", wrong, 9)


def test_wrong_blocks(device: str) -> None:
    q, k, v, dout = inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    with pytest.raises(ValueError, match="carry's lse"):
        block_forward(q, k, v, None, carry=(out, lse[:, :, 1:]))
    with pytest.raises(ValueError, match="into's out"):
        block_forward(q, k, v, None, into=(out[:, 1:], lse))
    with pytest.raises(ValueError, match="q_at and k_at"):
        block_forward(q, k, v, None, q_at=whole(LENGTH))
    with pytest.raises(ValueError, match="seed"):
        block_forward(q, k, v, None, dropout=0.5)
    for head_start in (-1, 1.0, True):
        with pytest.raises(ValueError, match="head_start"):
            block_forward(q, k, v, None, head_start=head_start)
    with pytest.raises(ValueError, match="dout"):
        output_delta(dout[:, 1:], out)
    low = [x.bfloat16() for x in (q, k, v)]
    with pytest.raises(ValueError, match="dq"):
        block_backward(dout.bfloat16(), *low, lse, lse, None, None, None, *low)
    with pytest.raises(ValueError, match="dq"):
        block_backward(dout.bfloat16(), *low, lse, lse, None, None, None, *low, accumulate="dq")
    with pytest.raises(ValueError, match="dk"):
        block_backward(dout.bfloat16(), *low, lse, lse, None, None, None, q.clone(), *low[1:])


def test_blocks_check_what_they_are_given(device: str) -> None:
    q, k, v, dout = inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    delta, grads = output_delta(dout, out), [torch.zeros_like(x) for x in (q, k, v)]
    for position, name in ((0, "dout"), (4, "lse"), (5, "delta")):
        given = [dout, q, k, v, lse, delta]
        given[position] = given[position][:1]
        with pytest.raises(ValueError, match=name):
            block_backward(*given, None, None, None, *grads)
    with pytest.raises(ValueError, match="dlse"):
        output_delta(dout, out, torch.zeros(LENGTH, device=device))
    with pytest.raises(ValueError, match="k_at"):
        block_forward(q, k, v, None, whole(LENGTH), whole(LENGTH, start=-5))
    with pytest.raises(ValueError, match="mask"):
        block_forward(q, k, v, torch.ones(LENGTH, LENGTH))
    with pytest.raises(ValueError, match="strides"):
        wide = torch.zeros(2, LENGTH, 4, 20, device=device)[..., :16]
        block_backward(dout, q, k, v, lse, delta, None, None, None, wide, *grads[1:])


def test_what_passed_once_is_checked_again(device: str) -> None:
    """Checks are remembered by what they look at: the same call with one thing changed is another call."""
    q, k, v, dout = inputs(torch.float32, device)
    at = [(0, 1, LENGTH)]
    out, lse = block_forward(q, k, v, None, at, at, last=False)
    delta, grads = output_delta(dout, out), [torch.zeros_like(x) for x in (q, k, v)]
    stepped = q.transpose(0, 1).contiguous().transpose(0, 1)  # other strides, which are as good

    def forward(q: Tensor = q, q_at: list = at, carry: tuple = (out, lse), into: tuple = (out, lse), **options) -> None:
        block_forward(q, k, v, options.pop("mask", None), q_at, at, carry=carry, into=into, **options)

    def backward(dq: Tensor = grads[0], lse: Tensor = lse, **options) -> None:
        block_backward(dout, q, k, v, lse, delta, None, at, at, dq, *grads[1:], **options)

    wide = torch.zeros(2, LENGTH, 4, 20, device=device)[..., :16]
    for _ in range(2):
        forward(), forward(stepped), backward(), backward(accumulate="dq")
        for call, change, name in (
            (forward, dict(q=q.double()), "k is"),
            (forward, dict(q=q[:, 1:]), "q_at"),
            (forward, dict(q_at=[(0, 1, LENGTH + 1)]), "q_at"),
            (forward, dict(q_at=None), "q_at"),
            (forward, dict(carry=(out, lse.double())), "carry"),
            (forward, dict(into=(wide, lse)), "strides"),
            (forward, dict(into=(None, lse)), "into"),
            (forward, dict(softcap=True), "softcap"),
            (forward, dict(mask=Mask(causal=True, prefix=torch.ones(3, dtype=torch.int32))), "prefix"),
            (backward, dict(lse=lse[:, 1:]), "lse"),
            (backward, dict(dq=wide), "strides"),
            (backward, dict(dq=grads[0].half()), "dq"),
            (backward, dict(accumulate=1), "accumulate"),
        ):
            with pytest.raises(ValueError, match=name):
                call(**change)


def test_segments_that_can_be_read_once_are_read_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Or an empty list would be remembered for them, and for every list like them."""
    monkeypatch.setattr(call_cache, "_passed", {})
    q, k, v, dout = inputs(torch.float32, device)
    at, mask = [(0, 1, LENGTH)], Mask(causal=True)
    expected, grads = attention(q, k, v, mask, return_lse=True), [torch.zeros_like(x) for x in (q, k, v)]
    for q_at, k_at in ((iter(at), iter(at)), (at, at)):
        out, lse = block_forward(q, k, v, mask, q_at, k_at)
        torch.testing.assert_close((out, lse), expected)
    delta = output_delta(dout, out)
    block_backward(dout, q, k, v, lse, delta, mask, iter(at), iter(at), *grads)
    assert all(x.any() for x in grads)


def test_checks_remember_no_tensors_and_not_everything(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(call_cache, "_passed", {})
    monkeypatch.setattr(call_cache, "REMEMBERED", 3)
    for length in range(1, 9):
        q, k, v, dout = inputs(torch.float32, device, length)
        out, lse = block_forward(q, k, v, None)
        block_backward(dout, q, k, v, lse, output_delta(dout, out), None, None, None, *(torch.zeros_like(x) for x in (q, k, v)))
        assert 0 < len(call_cache._passed) <= 3
    gone = [weakref.ref(x) for x in (q, k, v, dout, out, lse)]
    del q, k, v, dout, out, lse
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6


class Shorter:
    """Stands where a backend would be: says how often it got a block, and how often it was asked to do the same again."""

    def __init__(self) -> None:
        self.blocks, self.again = 0, []

    def block_forward(self, *_block: object) -> object:
        self.blocks += 1
        return lambda *given: self.again.append(given)

    block_backward = block_forward


def test_a_shorter_way_is_taken_for_the_same_call_only(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    backend = Shorter()
    monkeypatch.setattr(call_cache, "_passed", {})
    monkeypatch.setattr(blocks, "_module", lambda name, backward: backend)
    mask, at = Mask(causal=True), [(0, 1, LENGTH)]

    def call(mask: Mask | None = mask, q_at: list | None = at, q: Tensor | None = None, **options) -> tuple[Tensor, ...]:
        given, k, v, _ = inputs(torch.float32, device)
        q = given if q is None else q
        out, lse = block_forward(q, k, v, mask, q_at, at, **options)
        return q, k, v, out, lse

    call()
    q, k, v, out, lse = call()
    [(*qkv, bounds, carry, to_out, to_lse)] = backend.again
    assert [x is y for x, y in zip((*qkv, to_out, to_lse), (q, k, v, out, lse), strict=True)] == [True] * 5
    assert bounds == mask.bounds() and carry is None
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], LENGTH)
    documents = torch.zeros(LENGTH, dtype=torch.int32)
    for change in (
        dict(mask=None),
        dict(mask=Mask(causal=True, window=3)),
        dict(mask=Mask(causal=True, documents=documents)),
        dict(mask=Mask(causal=True, documents=documents - 1)),  # padding
        dict(q_at=[(1, 1, LENGTH)]),
        dict(q=q.transpose(0, 1).contiguous().transpose(0, 1)),
        dict(carry=(None, lse)),
        dict(carry=(out, lse)),
        dict(into=(out, lse)),
        dict(last=False),
        dict(scale=0.5),
        dict(softcap=1.0),
        dict(backend="reference"),
    ):
        before = backend.blocks, len(backend.again)
        call(**change)
        assert (backend.blocks, len(backend.again)) == (before[0] + 1, before[1]), change
        call(**change)
        assert (backend.blocks, len(backend.again)) == (before[0] + 1, before[1] + 1), change
    wrong = dict(seed="3"), dict(seed=2**70), dict(seed=torch.zeros(7)), dict(scale=True), dict(scale=np.float64("nan"))
    for change in (*wrong, dict(dropout=np.float64(0.5)), dict(q=q[:, 1:]), dict(deterministic=1), dict(backend="fast")):
        with pytest.raises(ValueError):
            call(**change)
    for change in (dict(scale=np.float64(0.5)), dict(backend=np.str_("reference")), dict(seed=3)):  # as good, but not known by
        before = backend.blocks
        call(**change), call(**change)
        assert backend.blocks == before + 2, change


def test_a_shorter_way_back(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    backend = Shorter()
    q, k, v, dout = inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    delta = output_delta(dout, out)
    monkeypatch.setattr(call_cache, "_passed", {})
    monkeypatch.setattr(blocks, "_module", lambda name, backward: backend)
    for accumulate in (True, False):
        for times in range(3):
            grads = [torch.zeros_like(x) for x in (q, k, v)]
            block_backward(dout, q, k, v, lse, delta, None, None, None, *grads, accumulate=accumulate)
            assert len(backend.again) == times + 2 * (not accumulate)
            if times:
                *_, gradients = backend.again[-1]
                assert all(x is y for x, y in zip(gradients, (dout, lse, delta, *grads), strict=True))
    assert backend.blocks == 2
