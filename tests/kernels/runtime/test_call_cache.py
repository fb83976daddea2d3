"""The call cache: which calls are validated again, which are replayed, and that it keeps no tensors alive."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from ringspan import Mask, attention
from ringspan.kernels import blocks
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime import call_cache
from tests.kernels.helpers.cases import LENGTH, random_inputs
from tests.kernels.runtime.test_custom_op import RecordingMode


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_calls", {})


def test_a_changed_argument_is_validated_again(device: str) -> None:
    """Calls that differ in one argument have different keys, also right after a valid call."""
    q, k, v, dout = random_inputs(torch.float32, device)
    at = [(0, 1, LENGTH)]
    out, lse = block_forward(q, k, v, None, at, at, last=False)
    delta, grads = output_delta(dout, out), [torch.zeros_like(x) for x in (q, k, v)]
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)  # other strides, which are valid too

    def forward(q: Tensor = q, q_at: list = at, carry: tuple = (out, lse), into: tuple = (out, lse), **options) -> None:
        block_forward(q, k, v, options.pop("mask", None), q_at, at, carry=carry, into=into, **options)

    def backward(dq: Tensor = grads[0], lse: Tensor = lse, **options) -> None:
        block_backward(dout, q, k, v, lse, delta, None, at, at, dq, *grads[1:], **options)

    uneven = torch.zeros(2, LENGTH, 4, 20, device=device)[..., :16]
    for _ in range(2):
        forward(), forward(transposed), backward(), backward(accumulate="dq")
        for call, change, message in (
            (forward, dict(q=q.double()), "k is"),
            (forward, dict(q=q[:, 1:]), "q_at"),
            (forward, dict(q_at=[(0, 1, LENGTH + 1)]), "q_at"),
            (forward, dict(q_at=None), "q_at"),
            (forward, dict(carry=(out, lse.double())), "carry"),
            (forward, dict(into=(uneven, lse)), "strides"),
            (forward, dict(into=(None, lse)), "into"),
            (forward, dict(softcap=True), "softcap"),
            (forward, dict(mask=Mask(causal=True, prefix=torch.ones(3, dtype=torch.int32))), "prefix"),
            (backward, dict(lse=lse[:, 1:]), "lse"),
            (backward, dict(dq=uneven), "strides"),
            (backward, dict(dq=grads[0].half()), "dq"),
            (backward, dict(accumulate=1), "accumulate"),
        ):
            with pytest.raises(ValueError, match=message):
                call(**change)


def test_iterators_of_segments_are_read_once(empty_cache: None, device: str) -> None:
    """Otherwise validation would read an empty list, and the cache would return it for equal segments."""
    q, k, v, dout = random_inputs(torch.float32, device)
    at, mask = [(0, 1, LENGTH)], Mask(causal=True)
    expected, grads = attention(q, k, v, mask, return_lse=True), [torch.zeros_like(x) for x in (q, k, v)]
    for q_at, k_at in ((iter(at), iter(at)), (at, at)):
        out, lse = block_forward(q, k, v, mask, q_at, k_at)
        torch.testing.assert_close((out, lse), expected)
    delta = output_delta(dout, out)
    block_backward(dout, q, k, v, lse, delta, mask, iter(at), iter(at), *grads)
    assert all(x.any() for x in grads)


def test_the_cache_keeps_no_tensors_and_has_a_limit(empty_cache: None, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(call_cache, "MAX_CALLS", 3)
    for length in range(1, 9):
        q, k, v, dout = random_inputs(torch.float32, device, length)
        out, lse = block_forward(q, k, v, None)
        block_backward(dout, q, k, v, lse, output_delta(dout, out), None, None, None, *(torch.zeros_like(x) for x in (q, k, v)))
        assert 0 < len(call_cache._calls) <= 3
    references = [weakref.ref(x) for x in (q, k, v, dout, out, lse)]
    del q, k, v, dout, out, lse
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


class CountingBackend:
    """Stands in for a backend: counts the blocks that it receives, and records the arguments of replays."""

    def __init__(self) -> None:
        self.blocks, self.replays = 0, []

    def block_forward(self, *_block: object) -> object:
        self.blocks += 1
        return lambda *args: self.replays.append(args)

    block_backward = block_forward


@pytest.fixture
def counting_backend(empty_cache: None, monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    backend = CountingBackend()
    monkeypatch.setattr(blocks, "backend_module", lambda name, backward: backend)
    return backend


def test_only_the_same_forward_is_replayed(counting_backend: CountingBackend, device: str) -> None:
    backend = counting_backend
    mask, at = Mask(causal=True), [(0, 1, LENGTH)]

    def call(mask: Mask | None = mask, q_at: list | None = at, q: Tensor | None = None, **options) -> tuple[Tensor, ...]:
        new_q, k, v, _ = random_inputs(torch.float32, device)
        q = new_q if q is None else q
        out, lse = block_forward(q, k, v, mask, q_at, at, **options)
        return q, k, v, out, lse

    call()
    q, k, v, out, lse = call()
    [(*qkv, bounds, carry, replay_out, replay_lse)] = backend.replays
    assert [x is y for x, y in zip((*qkv, replay_out, replay_lse), (q, k, v, out, lse), strict=True)] == [True] * 5
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
        num_blocks, num_replays = backend.blocks, len(backend.replays)
        call(**change)
        assert (backend.blocks, len(backend.replays)) == (num_blocks + 1, num_replays), change
        call(**change)
        assert (backend.blocks, len(backend.replays)) == (num_blocks + 1, num_replays + 1), change
    for change, name in (
        (dict(seed="3"), "seed"),
        (dict(seed=2**70), "seed"),
        (dict(seed=torch.zeros(7)), "seed"),
        (dict(scale=True), "scale"),
        (dict(scale=np.float64("nan")), "scale"),
        (dict(dropout=np.float64(0.5)), "dropout"),
        (dict(q=q[:, 1:]), "q_at"),
        (dict(deterministic=1), "deterministic"),
        (dict(backend="fast"), "backend"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            call(**change)
    for change in (dict(scale=np.float64(0.5)), dict(backend=np.str_("reference")), dict(seed=3)):  # valid, but not cacheable
        num_blocks = backend.blocks
        call(**change), call(**change)
        assert backend.blocks == num_blocks + 2, change


def test_a_backward_is_replayed_with_its_own_gradients(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    q, k, v, dout = random_inputs(torch.float32, device)
    out, lse = block_forward(q, k, v, None)
    delta, backend = output_delta(dout, out), CountingBackend()
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(blocks, "backend_module", lambda name, backward: backend)
    for accumulate in (True, False):
        for times in range(3):
            grads = [torch.zeros_like(x) for x in (q, k, v)]
            block_backward(dout, q, k, v, lse, delta, None, None, None, *grads, accumulate=accumulate)
            assert len(backend.replays) == times + 2 * (not accumulate)
            if times:
                *_, gradients = backend.replays[-1]
                assert all(x is y for x, y in zip(gradients, (dout, lse, delta, *grads), strict=True))
    assert backend.blocks == 2


def test_a_repeated_attention_call_is_replayed(counting_backend: CountingBackend, device: str) -> None:
    """It skips validation, not the operator's derivative; every other call is validated."""
    backend, mask = counting_backend, Mask(causal=True)
    q, k, v, dout = random_inputs(torch.float32, device)
    options: dict = dict(mask=mask, softcap=1.0, sinks=torch.zeros(q.shape[2], device=device))

    def call(**changes) -> torch.Tensor:
        return attention(**(dict(q=q, k=k, v=v) | options | changes))

    call()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = call(**dict(zip("qkv", leaves, strict=True)))
    [(*qkv, bounds, carry, replay_out, _)] = backend.replays
    assert all(x is y for x, y in zip(qkv, leaves, strict=True)) and replay_out.data_ptr() == out.data_ptr()
    assert bounds == mask.bounds() and carry[1].shape == (q.shape[0], q.shape[2], LENGTH)
    torch.autograd.grad(out, leaves, dout)
    assert backend.blocks == 2  # one of a forward, one of a backward
    with torch.no_grad():
        assert not call(q=leaves[0]).requires_grad and len(backend.replays) == 2

    documents = torch.zeros(LENGTH, dtype=torch.int32, device=device)
    for change in (dict(mask=None), dict(mask=Mask(documents=documents)), dict(scale=0.5), dict(softcap=2), dict(sinks=None)):
        call(**change)
        assert len(backend.replays) == 2, change
    for change, name in (
        (dict(softcap=True), "softcap"),
        (dict(deterministic=1), "deterministic"),
        (dict(sinks=options["sinks"][1:]), "sinks"),
        (dict(sinks=options["sinks"].long()), "sinks"),
        (dict(sinks=0.0), "sinks"),
        (dict(mask="causal"), "mask"),
        (dict(mask=Mask(documents=documents[1:])), "documents"),
        (dict(q=q[0]), "q"),
        (dict(q=None), "q"),
        (dict(v=v.half()), "v"),
        (dict(seed="3"), "seed"),
        (dict(dropout=2.0), "dropout"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            call(**change)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(ValueError, match=r"^q has a tangent"):
            call(q=dual)
    num_replays = len(backend.replays)
    with RecordingMode() as mode:
        call()
    assert "ringspan::attention_forward" in mode.names
    assert len(backend.replays) == num_replays + 1  # within the operator
