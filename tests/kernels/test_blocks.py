"""The block functions: blocks at any positions, a carried softmax, accumulated gradients."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan import Mask, attention
from ringspan.kernels.backends.block import Block
from ringspan.kernels.backends.choose import backend_module
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime import call_cache
from ringspan.kernels.segments import one_segment, positions
from ringspan.kernels.tensors import accumulation_dtype
from tests.conftest import HAS_GPU
from tests.kernels.helpers.cases import BACKENDS_AND_DTYPES, LENGTH, gradient_sums, packed, random_inputs

MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=17),
    "window-pair": Mask(window=(30, 7)),
    "documents": Mask(causal=True, documents=torch.tensor(packed(30, 1, 40, -5, 20))),
    "prefix": Mask(causal=True, prefix=37),
}


# without a GPU, each mask with one number of blocks
CARRIED = [*itertools.product(MASKS, (2, 5))] if HAS_GPU else [*zip(MASKS, itertools.cycle((3, 2)), strict=False)]


def assert_close(result: Tensor, expected: Tensor, dtype: torch.dtype, fp32: float = 0.0) -> None:
    """Compare results of inputs in this dtype, up to its rounding; `fp32` is the tolerance in that dtype."""
    allowed = {torch.float64: 1e-12, torch.float32: fp32, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(result, expected, rtol=0, atol=allowed)


def uneven_pieces(length: int, blocks: int) -> list[tuple[int, int]]:
    """Bounds of `blocks` consecutive pieces of different lengths."""
    borders = sorted(random.Random(blocks).sample(range(1, length), blocks - 1))
    return list(itertools.pairwise([0, *borders, length]))


def fewer_heads_if_interpreted(backend: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors; for Triton's interpreter, which runs heads one by one, half of the heads of the first sequence."""
    is_interpreted = backend == "triton" and not HAS_GPU
    return [x[:1, :, : x.shape[2] // 2].contiguous() for x in tensors] if is_interpreted else tensors


def forward_in_pieces(q: Tensor, k: Tensor, v: Tensor, mask: Mask, pieces: list, **options) -> tuple[Tensor, Tensor]:
    """Carry the softmax over pieces of the keys, in this order."""
    carry = None
    for index, (a, b) in enumerate(pieces):
        last = index == len(pieces) - 1
        at = [(0, 1, q.shape[1])], [(a, 1, b - a)]
        carry = block_forward(q, k[:, a:b], v[:, a:b], mask, *at, carry=carry, last=last, **options)
    return carry


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("name, blocks", CARRIED)
def test_carry_equals_one_call(name: str, blocks: int, backend: str, dtype: torch.dtype, device: str) -> None:
    mask, (q, k, v, dout) = MASKS[name], fewer_heads_if_interpreted(backend, random_inputs(dtype, device))
    options = dict(backend=backend, softcap=4.0)
    if backend != "hopper" and (name == "documents" or HAS_GPU or backend != "triton"):  # interpreted Philox takes ten seconds
        options |= dict(dropout=0.25, seed=99)
    out, lse = block_forward(q, k, v, mask, one_segment(LENGTH), one_segment(LENGTH), **options)
    pieces = uneven_pieces(LENGTH, blocks)
    random.Random(3).shuffle(pieces)
    many_out, many_lse = forward_in_pieces(q, k, v, mask, pieces, **options)
    assert_close(many_out, out, dtype, 2e-6)
    assert_close(many_lse, lse, lse.dtype, 2e-6)

    delta = output_delta(dout, out, backend=backend)
    in_one_call = gradient_sums(q, k, v)
    block_backward(dout, q, k, v, lse, delta, mask, one_segment(LENGTH), one_segment(LENGTH), *in_one_call, **options)
    dq, dk, dv = gradient_sums(q, k, v)
    for a, b in pieces:
        at = one_segment(LENGTH), [(a, 1, b - a)]
        block_backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, mask, *at, dq, dk[:, a:b], dv[:, a:b], **options)
    for result, expected in zip((dq, dk, dv), in_one_call, strict=True):
        assert_close(result, expected, dtype, 5e-6)


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("first", [-4, 20 - 4], ids=["before", "after"])
def test_queries_outside_all_documents_have_no_visible_keys(first: int, backend: str, dtype: torch.dtype, device: str) -> None:
    mask, at = Mask(documents=torch.zeros(20, dtype=torch.int64)), ([(first, 1, 10)], one_segment(20))
    (q, *_), (_, k, v, _) = random_inputs(dtype, device, 10), random_inputs(dtype, device, 20)
    into = torch.full_like(q, 7), torch.full((2, 4, 10), 7, dtype=accumulation_dtype(dtype), device=device)
    block_forward(q, k, v, mask, *at, backend=backend, into=into)
    inside = slice(4, None) if first < 0 else slice(4)
    expected, expected_lse = torch.zeros_like(q), torch.full_like(into[1], float("-inf"))
    expected[:, inside], expected_lse[:, :, inside] = block_forward(
        q[:, inside].contiguous(), k, v, Mask(), [(0, 1, 6 if first < 0 else 4)], one_segment(20), backend="reference"
    )
    assert_close(into[0], expected, dtype, 2e-6)
    assert_close(into[1], expected_lse, dtype, 2e-6)


SHARDS = {  # a rank's rows: contiguous, zigzag, striped, and lists that no kernel takes in one launch
    "contiguous": [(32, 1, 30)],  # on a GPU, the last vector of lse and delta also has rows of padding
    "zigzag": [(16, 1, 16), (64, 1, 16)],
    "striped": [(1, 3, 32)],
    "three": [(0, 1, 8), (24, 1, 8), (80, 1, 16)],
    "descending": [(64, 1, 16), (16, 1, 16)],
    "interleaved": [(0, 4, 16), (2, 4, 16)],
}


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", MASKS)
def test_a_shard_gives_the_rows_of_the_whole_sequence(
    name: str, shard: str, backend: str, dtype: torch.dtype, device: str
) -> None:
    """Queries of one shard and keys of another give the results of the same rows and keys in the whole sequence."""
    mask, at = MASKS[name], SHARDS[shard]
    q, k, v, dout = random_inputs(dtype, device)
    rows = positions(at, device)
    keys_at = [(8, 1, 40), (64, 2, 16)] if shard != "striped" else [(2, 3, 30)]
    keys = positions(keys_at, device)
    visible = mask.visible(torch.arange(LENGTH), torch.arange(LENGTH)).to(device)[:, rows][:, :, keys]
    out, lse, grads = dense_rows(q[:, rows], k[:, keys], v[:, keys], dout[:, rows], visible)

    def pad(x: Tensor) -> Tensor:
        """Append rows of NaN past the end of the segments."""
        return torch.cat([x, torch.full_like(x[:, :5], float("nan"))], 1)

    padded = [pad(x) for x in (q[:, rows], k[:, keys], v[:, keys])]
    block_out, block_lse = block_forward(*padded, mask, at, keys_at, backend=backend)
    assert_close(block_out[:, :-5], out, dtype, 3e-6)
    assert_close(block_lse[:, :, :-5], lse, lse.dtype, 3e-6)
    assert (block_out[:, -5:] == 0).all() and (block_lse[:, :, -5:] == -float("inf")).all()
    delta = output_delta(pad(dout[:, rows]), block_out)
    results = gradient_sums(*padded)
    block_backward(pad(dout[:, rows]), *padded, block_lse, delta, mask, at, keys_at, *results, backend=backend)
    for result, grad in zip(results, grads, strict=True):
        assert_close(result[:, :-5], grad, dtype, 1e-5)
        assert (result[:, -5:] == 0).all()


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("at", [[(0, 1, 93), (100, 2**27, 3)], [(0, 2**22, 93), (2**28 + 2**27, 1, 3)]], ids=["far", "near"])
def test_segments_of_different_steps(at: list, backend: str, dtype: torch.dtype, device: str) -> None:
    """One segment's step times the other's count does not fit into 32 bits."""
    q, k, v, dout = fewer_heads_if_interpreted(backend, random_inputs(dtype, device))
    results = []
    for run_backend, run_dtype in ((backend, dtype), ("chunked", torch.float64)):
        *qkv, run_dout = (tensor.to(run_dtype) for tensor in (q, k, v, dout))
        out, lse = block_forward(*qkv, Mask(causal=True), at, at, backend=run_backend)
        delta, grads = output_delta(run_dout, out), gradient_sums(*qkv)
        block_backward(run_dout, *qkv, lse, delta, Mask(causal=True), at, at, *grads, backend=run_backend)
        results.append((out, lse, *grads))
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected.to(result.dtype), dtype, 1e-5)


def dense_rows(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute out, lse and (dq, dk, dv) as dense matrices in fp64; `visible` is (B or 1, queries, keys)."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    s = s.masked_fill(~visible[:, None], -float("inf"))
    lse = s.logsumexp(-1)
    p = torch.where(visible[:, None], torch.exp(s - torch.where(lse == -float("inf"), 0, lse)[..., None]), 0)
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    grads = torch.autograd.grad(out, (q, k, v), dout.double())
    acc = accumulation_dtype(dout.dtype)
    return out.to(dout.dtype), lse.to(acc), [torch.nan_to_num(g).to(acc) for g in grads]


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
def test_a_block_without_visible_keys_changes_nothing(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = random_inputs(dtype, device)
    mask, rows, options = Mask(causal=True), one_segment(LENGTH), dict(last=False, backend=backend)
    carry = block_forward(q, k, v, mask, rows, rows, **options)
    copy = [x.clone() for x in carry]
    later = one_segment(LENGTH, start=LENGTH)
    result = block_forward(q, k, v, mask, rows, later, carry=carry, **options)
    in_place = block_forward(q, k, v, mask, rows, later, carry=carry, into=carry, **options)
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(copy, result, in_place, strict=True))
    # Rows without visible keys keep their bits in a tile in which other rows have some.
    split = block_forward(q, k, v, mask, rows, one_segment(LENGTH, start=70), carry=copy, **options)
    assert torch.equal(split[0][:, :70], copy[0][:, :70]) and torch.equal(split[1][:, :, :70], copy[1][:, :, :70])
    assert not torch.equal(split[0][:, 70:], copy[0][:, 70:])
    dq, dk, dv = gradient_sums(q, k, v, begin=3.0)
    delta = output_delta(dout, copy[0].to(dout.dtype))
    block_backward(dout, q, k, v, copy[1], delta, mask, rows, later, dq, dk, dv, backend=backend)
    assert all((g == 3).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize(
    "rows_at", [one_segment(LENGTH), one_segment(LENGTH - 9), [(64, 1, 16), (16, 1, 16)]], ids=["all", "tail", "ranges"]
)
def test_accumulate_dq_overwrites_dk_and_dv(rows_at: list, backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = fewer_heads_if_interpreted(backend, random_inputs(dtype, device))
    mask, at = Mask(causal=True), (rows_at, one_segment(LENGTH))
    out, lse = block_forward(q, k, v, mask, *at, backend=backend)
    inputs = dout, q, k, v, lse, output_delta(dout, out), mask, *at
    added = [*gradient_sums(q, begin=3.0), *gradient_sums(k, v)]
    block_backward(*inputs, *added, backend=backend)
    mixed = [*gradient_sums(q, begin=3.0), *gradient_sums(k, v, begin=float("nan"))]
    block_backward(*inputs, *mixed, backend=backend, accumulate="dq")
    assert all(torch.equal(a, b) for a, b in zip(added, mixed, strict=True))  # dq too: one thread block has all these keys
    in_final_dtype = [*gradient_sums(q, begin=3.0), *(torch.full_like(x, float("nan")) for x in (k, v))]
    block_backward(*inputs, *in_final_dtype, backend=backend, accumulate="dq")
    for result, expected in zip(in_final_dtype, added, strict=True):
        assert_close(result, expected.to(result.dtype), result.dtype, 2e-6)
    with pytest.raises(ValueError, match="accumulate='dk' must be True, False or 'dq'"):
        block_backward(*inputs, *mixed, backend=backend, accumulate="dk")


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
def test_an_empty_block_returns_the_carry(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, _ = random_inputs(dtype, device)
    carry = block_forward(q, k, v, None, last=False, backend=backend)
    result = block_forward(q, k[:, :0], v[:, :0], None, one_segment(LENGTH), [], carry=carry, last=False, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(carry, result, strict=True))


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_rows_without_visible_keys_keep_the_bits_of_the_carry(
    size: float, backend: str, dtype: torch.dtype, device: str
) -> None:
    q, k, v, _ = random_inputs(dtype, device)
    out, lse = block_forward(q, k, v, None, last=False, backend=backend)
    (carry_out, carry_lse), half = (out * size, lse * size), LENGTH // 2
    at, options = (one_segment(LENGTH), [(half, 1, LENGTH - half)]), dict(carry=(carry_out, carry_lse), last=False)
    out, lse = block_forward(q, k[:, half:], v[:, half:], Mask(causal=True), *at, **options, backend=backend)
    assert torch.equal(out[:, :half], carry_out[:, :half]) and torch.equal(lse[:, :, :half], carry_lse[:, :, :half])
    assert not torch.equal(lse[:, :, half:], carry_lse[:, :, half:]) or size > 1


@pytest.mark.parametrize("backend", ["reference", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_a_carry_counts_when_scores_are_so_large_that_rounding_hides_64(backend: str, device: str) -> None:
    q = torch.full((1, 64, 1, 64), 2.0**14, dtype=torch.bfloat16, device=device)
    k, v = -q.tile(1, 2, 1, 1), -torch.ones(1, 128, 1, 64, dtype=torch.bfloat16, device=device)
    carry = torch.ones(1, 64, 1, 64, device=device), torch.full((1, 1, 64), -(2.0**34), device=device)
    at = one_segment(64), one_segment(128)
    out, _ = block_forward(q, k, v, None, *at, carry=carry, last=False, scale=1.0, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, -127 / 129))


@pytest.mark.parametrize("accumulate", [True, False, "dq"])
@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
def test_a_block_without_queries_has_zero_gradients(
    backend: str, dtype: torch.dtype, accumulate: bool | str, device: str
) -> None:
    q, k, v, dout = random_inputs(dtype, device)
    lse = block_forward(q[:, :0], k, v, None, [], one_segment(LENGTH), backend=backend)[1]
    dq, dk, dv = gradient_sums(q[:, :0], k, v, begin=1.0)
    at = [], one_segment(LENGTH)
    block_backward(dout[:, :0], q[:, :0], k, v, lse, lse, None, *at, dq, dk, dv, backend=backend, accumulate=accumulate)
    assert all((x == (accumulate is True)).all() for x in (dk, dv))


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
@pytest.mark.parametrize("blocks", [2, 4, 8, 16] if HAS_GPU else [2, 8])
def test_the_carry_loses_no_accuracy_in_bf16(blocks: int, backend: str, device: str) -> None:
    """The ring rule: the RMS error of out and gradients over carried blocks is ≤ 1.05 × that of one call."""
    length = 4096 if HAS_GPU else 128
    mask = Mask(causal=True)
    q, k, v, dout = (x[:1] for x in random_inputs(torch.bfloat16, device, length, heads=2, width=64))
    exact_inputs = [x.double() for x in (q, k, v)]
    truth, truth_lse = block_forward(*exact_inputs, mask, backend="chunked")
    truth_grads = [torch.zeros_like(x) for x in exact_inputs]
    exact_delta = output_delta(dout.double(), truth)
    at = one_segment(length), one_segment(length)
    block_backward(dout.double(), *exact_inputs, truth_lse, exact_delta, mask, *at, *truth_grads, backend="chunked")

    def errors(pieces: list) -> list[float]:
        out, lse = forward_in_pieces(q, k, v, mask, pieces, backend=backend)
        delta = output_delta(dout, out, backend=backend)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for a, b in pieces:
            block = one_segment(length), [(a, 1, b - a)]
            block_backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, mask, *block, dq, dk[:, a:b], dv[:, a:b], backend=backend)
        pairs = zip((out, dq, dk, dv), (truth, *truth_grads), strict=True)
        return [(x.double() - ref).square().mean().sqrt().item() for x, ref in pairs]

    step = length // blocks
    many = errors([(a, a + step) for a in range(0, length, step)])
    for name, error_of_one, error in zip(("out", "dq", "dk", "dv"), errors([(0, length)]), many, strict=True):
        assert error <= 1.05 * error_of_one, f"{name}: {error:.3e} over {blocks} blocks, {error_of_one:.3e} in one call"


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
def test_deterministic_backwards_are_bit_equal(backend: str, dtype: torch.dtype, device: str) -> None:
    q, k, v, dout = (x.requires_grad_() for x in fewer_heads_if_interpreted(backend, random_inputs(dtype, device)))

    def run() -> tuple[Tensor, ...]:
        out = attention(q, k, v, Mask(causal=True), deterministic=True, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = run()
    for _ in range(4 if HAS_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_fully_visible_block_has_no_mask(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels then compare nothing, in the first call and in replays, also with calls of other masks in between."""
    monkeypatch.setattr(call_cache, "_calls", {})
    module, bounds_used, at = backend_module("chunked", direction == "backward"), [], ([(64, 1, 32)], [(0, 1, 32)])

    def run(block: Block, *_: Any) -> Any:
        bounds_used.append(block.mask.bounds())
        return lambda q, k, v, bounds, *_: bounds_used.append(bounds)

    monkeypatch.setattr(module, f"block_{direction}", run)
    q, k, v, dout = (torch.randn(1, 32, 2, 16) for _ in range(4))
    out, lse = torch.randn(1, 32, 2, 16), torch.randn(1, 2, 32)
    covering, window = Mask(causal=True), Mask(causal=True, window=80)
    for mask in (covering, window, covering, window):
        if direction == "forward":
            block_forward(q, k, v, mask, *at, backend="chunked")
        else:
            block_backward(dout, q, k, v, lse, output_delta(dout, out), mask, *at, *gradient_sums(q, k, v), backend="chunked")
    assert bounds_used == [Mask().bounds(), window.bounds()] * 2


UNIT = 100 if HAS_GPU else 10  # rows; these sequences have 30 units
PADDED = torch.tensor(packed(7 * UNIT, 10 * UNIT, -3 * UNIT, 10 * UNIT))
DETERMINISTIC = {  # name: (heads, key heads, head dim, mask, whether rows are a zigzag shard)
    "causal": (4, 2, 128, Mask(causal=True), False),
    "full": (4, 1, 64, Mask(), False),
    "window": (2, 2, 128, Mask(window=(7 * UNIT, UNIT // 2)), False),
    "edge": (2, 2, 128, Mask(window=(65, 10)), False),  # one row of a query tile attends to a thread block's keys
    "documents": (4, 4, 64, Mask.from_lengths([7 * UNIT, 1, 9 * UNIT, 14 * UNIT - 1], causal=True), False),
    "padding": (4, 2, 128, Mask(causal=True, documents=torch.stack([PADDED, PADDED.flip(0)])), False),
    "prefix": (2, 2, 128, Mask(causal=True, prefix=3 * UNIT + 3), False),
    "wide": (2, 1, 256, Mask(causal=True), False),
    "zigzag": (4, 2, 128, Mask(causal=True, window=50 * UNIT), True),
}


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in DETERMINISTIC
        for dtype in (torch.bfloat16, torch.float16)
        if HAS_GPU or dtype == torch.bfloat16 or name in ("causal", "padding")
    ],
)
def test_a_deterministic_backward_only_changes_the_order_of_sums(name: str, dtype: torch.dtype, device: str) -> None:
    """Runs are bit-equal. dk and dv are accumulated in registers as without it; dq is accumulated in another order."""
    heads, kv_heads, width, mask, zigzag = DETERMINISTIC[name]
    sizes = (heads, kv_heads, kv_heads, heads)
    batch = 2 if HAS_GPU or name == "padding" else 1
    q, k, v, dout = (torch.randn(batch, 30 * UNIT, n, width, dtype=dtype, device=device) for n in sizes)
    at = (None, None)
    if zigzag:
        at = [(first * UNIT, 1, 15 * UNIT) for first in (10, 70)], [(first * UNIT, 1, 15 * UNIT) for first in (0, 65)]
    out, lse = block_forward(q, k, v, mask, *at, backend="hopper")
    delta = output_delta(dout, out)

    def run(deterministic: bool) -> list[Tensor]:
        gradients = gradient_sums(q, k, v, begin=1.0)
        block_backward(dout, q, k, v, lse, delta, mask, *at, *gradients, deterministic=deterministic, backend="hopper")
        return gradients

    ordered, unordered = run(True), run(False)
    for _ in range(5 if HAS_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(ordered, run(True), strict=True))
    for one, other in zip(ordered, unordered, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    if mask.length is None:  # with documents, tiles begin at other rows when the backward is not deterministic
        assert torch.equal(ordered[1], unordered[1]) and torch.equal(ordered[2], unordered[2])


def test_head_start_shifts_dropout(device: str) -> None:
    """Half of the heads, with their head_start, have the same dropout pattern as in a call with all heads."""
    q, k, v, _ = random_inputs(torch.float32, device)
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


@pytest.mark.parametrize("rule", ["documents", "prefix"])
def test_chunked_masks_every_tile_whose_documents_or_prefix_are_on_a_gpu(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host then chooses tiles by a mask that shows more."""
    mask = Mask(causal=True, documents=torch.arange(64) // 40) if rule == "documents" else Mask(causal=True, prefix=20)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 8)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 8)
    leaves = [torch.randn(1, 64, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    expected = attention(*leaves, mask, backend="reference")
    wider = Mask(causal=rule == "documents")
    monkeypatch.setattr(Mask, "host_mask", lambda self: wider)
    out = attention(*leaves, mask, backend="chunked")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(x, leaves, torch.ones_like(x)) for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_block_functions_read_no_values_of_tensors(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no values, so code that runs on them does not synchronise with a GPU either."""
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
