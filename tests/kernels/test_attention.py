"""`attention` with autograd, torch.compile, checkpointing, autocast and unusual memory layouts."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspan import Mask, attention


def random_qkv(
    device: str = "cpu", rows: int = 24, heads: int = 4, dtype: torch.dtype = torch.float32, grad: bool = True
) -> list[Tensor]:
    sizes = (heads, heads // 2, heads // 2)
    return [torch.randn(2, rows, h, 16, device=device, dtype=dtype, requires_grad=grad) for h in sizes]


def test_equals_sdpa(device: str) -> None:
    q, k, v = random_qkv(device)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, Mask(causal=True)), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    q, k, v = (x[:1, :7].detach().requires_grad_() for x in random_qkv(dtype=torch.float64))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(softcap=3.0, sinks=sinks, dropout=0.2, seed=5, return_lse=True)
        return attention(q, k, v, Mask(causal=True, window=4), **options)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_batched_gradients_equal_single_ones() -> None:
    q, k, v = random_qkv()
    out = attention(q, k, v, Mask(causal=True))
    directions = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, (q, k, v), directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        expected = torch.autograd.grad(out, (q, k, v), direction, retain_graph=True)
        torch.testing.assert_close(tuple(x[i] for x in batched), expected)


def test_gradients_of_lse_alone(device: str) -> None:
    q, k, v = random_qkv(device)
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 0.25
    expected = torch.autograd.grad(s.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected, rtol=1e-4, atol=1e-5)


def test_torch_compile_compiles_twice_for_all_lengths(device: str) -> None:
    """With fullgraph, forward and backward: the second length makes the length symbolic, the third compiles nothing."""
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = attention(q * 2, k, v, Mask(causal=True, window=7), sinks=sinks, return_lse=True)
        return out.sum() + lse.sum()

    sinks = torch.randn(4, device=device, requires_grad=True)
    for rows in (24, 17, 33, 20):
        q, k, v = random_qkv(device, rows)
        compiled = torch.autograd.grad(layer(q, k, v, sinks), (q, k, v, sinks))
        out, lse = attention(q * 2, k, v, Mask(causal=True, window=7), sinks=sinks, return_lse=True)
        expected = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
        torch.testing.assert_close(compiled, expected)
    assert counter.frame_count <= 2


def test_compile_with_documents_and_dropout(device: str) -> None:
    """The mask is an argument, with other ids in each call; only padding makes a second graph."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask, dropout=0.3, seed=9), fullgraph=True, backend=counter)
    for ids, graphs in (([0] * 10 + [1] * 14, 1), ([0] * 20 + [1] * 4, 1), ([0] * 20 + [-1] * 4, 2)):
        q, k, v = random_qkv(device)
        mask = Mask(causal=True, documents=torch.tensor(ids))
        torch.testing.assert_close(layer(q, k, v, mask), attention(q, k, v, mask, dropout=0.3, seed=9))
        assert counter.frame_count == graphs


def test_selective_checkpointing_saves_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With (out, lse) saved, recomputation of a layer does not run attention again."""
    module = sys.modules["ringspan.kernels.attention"]
    run, runs = module.block_forward, []
    monkeypatch.setattr(module, "block_forward", lambda *args, **options: runs.append(1) or run(*args, **options))

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator == torch.ops.ringspan.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = random_qkv(device)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k.sin(), v, Mask(causal=True)).sin()

    expected = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    for contexts, count in (({}, 2), ({"context_fn": partial(create_selective_checkpoint_contexts, policy)}, 1)):
        runs.clear()
        out = checkpoint(layer, q, k, v, use_reentrant=False, **contexts)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), expected)
        assert len(runs) == count


def test_autocast_casts_inputs_and_gradients(device: str) -> None:
    q, k, v = random_qkv(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k.half(), v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_frozen_inputs_get_no_gradient(device: str) -> None:
    q, k, v = random_qkv(device, grad=False)
    assert not attention(q, k, v).requires_grad
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    expected = torch.autograd.grad(attention(*leaves, Mask(causal=True)), leaves, dout)
    for index in range(3):
        inputs = [x.clone().requires_grad_(i == index) for i, x in enumerate((q, k, v))]
        attention(*inputs, Mask(causal=True)).backward(dout)
        torch.testing.assert_close(inputs[index].grad, expected[index])
        assert all(x.grad is None for i, x in enumerate(inputs) if i != index)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_forward_mode_is_rejected(name: str, backend: str, device: str) -> None:
    """No backend has a forward-mode derivative, and a silent zero would be worse than an error."""
    inputs = dict(zip("qkv", random_qkv(device, grad=False), strict=True), sinks=torch.randn(4, device=device))

    def run(x: Tensor) -> Tensor:
        return attention(**inputs | {name: x}, backend=backend)

    x = inputs[name]
    with pytest.raises(ValueError, match=f"^{name} has a tangent.*reverse mode"):
        torch.func.jvp(run, (x,), (x,))
    with forward_ad.dual_level():
        for grad in (False, True):
            with pytest.raises(ValueError, match=f"^{name} has a tangent"):
                run(forward_ad.make_dual(x.detach().requires_grad_(grad), x))
        run(x)  # an input without a tangent


def test_an_expanded_batch_with_strides_of_0(device: str) -> None:
    q, k, v = (x[:1].detach() for x in random_qkv(device))
    out = attention(*(x.expand(3, -1, -1, -1) for x in (q, k, v)), Mask(causal=True), backend="triton")
    torch.testing.assert_close(out, attention(q, k, v, Mask(causal=True)).expand(3, -1, -1, -1))


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_documents_and_seeds_in_any_memory_layout(backend: str, device: str) -> None:
    """Transposed ids and expanded seeds give the results of their contiguous copies."""
    q, k, v = (x.detach() for x in random_qkv(device))
    ids = torch.randint(-1, 2, (24, 2), device=device).T
    seed = torch.tensor(5, device=device).expand(2)
    strided = attention(q, k, v, Mask(documents=ids), dropout=0.5, seed=seed, backend=backend)
    contiguous = attention(q, k, v, Mask(documents=ids.contiguous()), dropout=0.5, seed=seed.contiguous(), backend="reference")
    torch.testing.assert_close(strided, contiguous, rtol=1e-4, atol=1e-4)


def test_autocast_does_not_lower_the_precision_of_lse() -> None:
    q, k, v = (x.detach().bfloat16() for x in random_qkv())
    _, expected = attention(q, k, v, return_lse=True, backend="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = attention(q, k, v, return_lse=True, backend="chunked")
    assert torch.equal(lse, expected)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_nan_dlse_of_rows_without_visible_keys_does_not_spread(backend: str, device: str) -> None:
    """The gradient of logaddexp(lse, -inf) is such a NaN."""
    q, k, v = random_qkv(device)
    out, lse = attention(q, k[:, :10], v[:, :10], Mask(causal=True), return_lse=True, backend=backend)
    dlse = torch.where(torch.isinf(lse), float("nan"), 1.0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton", pytest.param("hopper", marks=pytest.mark.hopper)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_contents_of_padding_are_never_read(with_sinks: bool, backend: str, device: str) -> None:
    """All inputs and dout hold NaN in padding rows: results are finite, and padding rows have zero out and gradients."""
    ids = torch.tensor([-1] * 3 + [0] * 6 + [-1] * 2 + [1] * 8 + [-1] * 5)
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    leaves = [x.detach().to(dtype) for x in random_qkv(device)]
    for x in leaves:
        x[:, ids < 0] = float("nan")
    leaves = [x.requires_grad_() for x in leaves]
    sinks = torch.zeros(leaves[0].shape[2], device=device, requires_grad=True)
    inputs = leaves + [sinks] * with_sinks
    out = attention(*leaves, Mask(causal=True, documents=ids), sinks=sinks if with_sinks else None, backend=backend)
    dout = torch.randn_like(out)
    dout[:, ids < 0] = float("nan")
    grads = torch.autograd.grad(out, inputs, dout)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert all((g[:, ids < 0] == 0).all() for g in grads[:3]) and (out[:, ids < 0] == 0).all()


def test_a_mask_made_inside_a_compiled_function() -> None:
    q, k, v = (x.detach() for x in random_qkv())
    layer = torch.compile(lambda: attention(q, k, v, Mask.from_lengths([10, 14], causal=True)), fullgraph=True, backend="eager")
    torch.testing.assert_close(layer(), attention(q, k, v, Mask.from_lengths([10, 14], causal=True)))
