"""The public operator: what it refuses, and how it lives with autograd, torch.compile, checkpointing and autocast."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspan import Mask, attention
from ringspan.kernels.backends.choose import adds_in_memory, choose_backend
from ringspan.kernels.runtime import triton_compat
from ringspan.kernels.runtime.custom_op import _nobody_listens


def qkv(
    device: str = "cpu", rows: int = 24, heads: int = 4, dtype: torch.dtype = torch.float32, grad: bool = True
) -> list[Tensor]:
    sizes = (heads, heads // 2, heads // 2)
    return [torch.randn(2, rows, h, 16, device=device, dtype=dtype, requires_grad=grad) for h in sizes]


def test_equals_sdpa(device: str) -> None:
    q, k, v = qkv(device)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, Mask(causal=True)), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    q, k, v = (x[:1, :7].detach().requires_grad_() for x in qkv(dtype=torch.float64))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(softcap=3.0, sinks=sinks, dropout=0.2, seed=5, return_lse=True)
        return attention(q, k, v, Mask(causal=True, window=4), **options)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


class Heard(TorchDispatchMode):
    """Listens to the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Told(Tensor):
    """Is told of functions, and asks nothing of the dispatcher."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


seen: list[object] = []  # by what listens below


def test_who_listens_hears_of_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody does: a call goes past the dispatcher. A mode, a profiler, torch.func or another kind of tensor: it does not."""
    q, k, v = qkv(device)
    seen.clear()
    with monkeypatch.context() as patch:  # what the operator does below autograd
        patch.setattr(torch._C, "_AutoDispatchBelowAutograd", lambda: seen.append("dispatcher") or nullcontext())
        expected = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert not seen and _nobody_listens((q, k, None, "auto"))
    with Heard() as mode:
        torch.testing.assert_close(torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)), expected, rtol=0, atol=0)
    assert {"ringspan::attention_forward", "ringspan::attention_backward"} <= set(mode.names)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert {"ringspan::attention_forward", "ringspan::attention_backward"} <= {event.key for event in profile.key_averages()}
    attention(q.detach().as_subclass(Told), k, v)
    assert "ringspan.attention_forward.default" in seen
    traced = torch.jit.trace(lambda x: attention(x, x, x), (q.detach(),))
    assert "ringspan::attention_forward" in str(traced.graph)
    with torch.inference_mode():
        others = [q + 0, q.to("meta"), torch.nn.Buffer(q), TwoTensor(q, q)]
        assert [_nobody_listens((q, x)) for x in others] == [False, False, True, False]
        torch.testing.assert_close(attention(q + 0, k + 0, v + 0), attention(q, k, v), rtol=0, atol=0)
    seen.clear()
    torch.func.vmap(lambda x: seen.append(_nobody_listens((x,))) or x)(q)
    with FakeTensorMode():
        elsewhere = torch.empty(2, 24, 4, 16, device="cuda")  # which need not be here
    assert seen == [False] and not _nobody_listens((elsewhere,))
    assert attention(*(x.to("meta") for x in (q, k, v))).is_meta


def test_gradients_of_a_batch_of_directions() -> None:
    q, k, v = qkv()
    out = attention(q, k, v, Mask(causal=True))
    directions = torch.randn(3, *out.shape)
    together = torch.autograd.grad(out, (q, k, v), directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        one = torch.autograd.grad(out, (q, k, v), direction, retain_graph=True)
        torch.testing.assert_close(tuple(x[i] for x in together), one)


def test_only_lse_is_used(device: str) -> None:
    q, k, v = qkv(device)
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 0.25
    expected = torch.autograd.grad(s.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(q=torch.zeros(24, 4, 16)), "q has 3 dimensions"),
        (dict(q=[1.0]), "q must be a tensor"),
        (dict(q=torch.zeros(2, 24, 4, 16, dtype=torch.int64)), "q is torch.int64"),
        (dict(k=torch.zeros(2, 24, 2, 16, dtype=torch.float16)), "k is torch.float16"),
        (dict(v=torch.zeros(2, 24, 2, 16, device="meta")), "v is on meta"),
        (dict(k=torch.zeros(1, 24, 2, 16)), "k has batch size 1"),
        (dict(k=torch.zeros(2, 23, 2, 16)), "same length"),
        (dict(k=torch.zeros(2, 24, 2, 24)), "k has head dim 24"),
        (dict(q=torch.zeros(2, 24, 3, 16)), "q has 3 heads"),
        (dict(q=torch.zeros(2, 24, 4, 20), k=torch.zeros(2, 24, 2, 20)), "head dim 20"),
        (dict(v=torch.zeros(2, 24, 2, 264)), "head dim 264"),
        (dict(mask=torch.ones(24, 24)), "mask must be"),
        (dict(mask=Mask(documents=torch.zeros(23, dtype=torch.int64))), "documents describe 23"),
        (dict(mask=Mask(documents=torch.zeros(3, 24, dtype=torch.int64))), "documents are given for a batch of 3"),
        (dict(mask=Mask(causal=True, prefix=torch.tensor([1, 2, 3]))), "prefix are given for a batch of 3"),
        (dict(scale=float("nan")), "scale"),
        (dict(scale=float("inf")), "scale"),
        (dict(softcap=-1.0), "softcap"),
        (dict(softcap=float("nan")), "softcap"),
        (dict(dropout=1.0), "dropout"),
        (dict(dropout=float("nan")), "dropout"),
        (dict(dropout=0.1, seed=1.5), "seed"),
        (dict(dropout=0.1, seed=torch.zeros(3, dtype=torch.int64)), "seed"),
        (dict(dropout=0.1, seed=torch.zeros((), dtype=torch.int32)), "seed"),
        (dict(seed=2**63), "seed"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(sinks=torch.zeros(4, dtype=torch.int64)), "sinks"),
        (dict(backend="flash"), "backend"),
        (dict(backend="hopper"), "backend"),
    ],
)
def test_wrong_arguments(change: dict, word: str) -> None:
    q, k, v = qkv(grad=False)
    with pytest.raises(ValueError, match=word):
        attention(**(dict(q=q, k=k, v=v) | change))


def test_triton_refuses_fp64(device: str) -> None:
    with pytest.raises(ValueError, match=r"fp64.*chunked"):
        attention(*qkv(device, dtype=torch.float64), backend="triton")


def test_auto_says_why(capfd: pytest.CaptureFixture) -> None:
    code = """
import torch; from kernels import attention
q = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
attention(q, q, q), attention(q, q, q)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], env={"RINGSPAN_LOG": "1", "PATH": "", "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert shown.stderr.count("attention runs on chunked: triton has no fp64") == 1, shown.stderr


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("rows", [0, 9])
def test_opcheck(backend: str, rows: int, device: str) -> None:
    q, k, v = qkv(device, rows)
    sinks = torch.randn(4, device=device, requires_grad=True)
    ids = torch.zeros(2, rows, dtype=torch.int64)
    ids[:, rows // 2 :] = 1
    left, right, padded, *tensors = Mask(causal=True, documents=ids).bounds(device)
    numbers, factors = [left, right, int(padded), False], [0.3, 0.0, 0.0]
    given = (q, k, v, *tensors, sinks, None, numbers, factors, backend)
    torch.library.opcheck(torch.ops.ringspan.attention_forward, given)


def test_compile_twice_is_enough(device: str) -> None:
    """fullgraph, forward and backward; the second length makes the length symbolic, the third compiles nothing."""
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = attention(q * 2, k, v, Mask(causal=True, window=7), sinks=sinks, return_lse=True)
        return out.sum() + lse.sum()

    sinks = torch.randn(4, device=device, requires_grad=True)
    for rows in (24, 17, 33, 20):
        q, k, v = qkv(device, rows)
        got = torch.autograd.grad(layer(q, k, v, sinks), (q, k, v, sinks))
        out, lse = attention(q * 2, k, v, Mask(causal=True, window=7), sinks=sinks, return_lse=True)
        expected = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
        torch.testing.assert_close(got, expected)
    assert counter.frame_count <= 2


def test_compile_with_documents_and_dropout(device: str) -> None:
    """The mask is made outside, once a batch, and comes in with other ids each time; only padding makes a second graph."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask, dropout=0.3, seed=9), fullgraph=True, backend=counter)
    for ids, graphs in (([0] * 10 + [1] * 14, 1), ([0] * 20 + [1] * 4, 1), ([0] * 20 + [-1] * 4, 2)):
        q, k, v = qkv(device)
        mask = Mask(causal=True, documents=torch.tensor(ids))
        torch.testing.assert_close(layer(q, k, v, mask), attention(q, k, v, mask, dropout=0.3, seed=9))
        assert counter.frame_count == graphs


def test_selective_checkpointing_keeps_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With (out, lse) saved, a recomputed block never runs attention again."""
    module = sys.modules["ringspan.kernels.attention"]
    run, runs = module.block_forward, []
    monkeypatch.setattr(module, "block_forward", lambda *args, **options: runs.append(1) or run(*args, **options))

    def policy(ctx, called, *args, **kwargs) -> CheckpointPolicy:
        keep = called == torch.ops.ringspan.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = qkv(device)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k.sin(), v, Mask(causal=True)).sin()

    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    for contexts, count in (({}, 2), ({"context_fn": partial(create_selective_checkpoint_contexts, policy)}, 1)):
        runs.clear()
        out = checkpoint(block, q, k, v, use_reentrant=False, **contexts)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), expected)
        assert len(runs) == count


def test_autocast(device: str) -> None:
    q, k, v = qkv(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k.half(), v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_frozen_inputs_get_no_gradient(device: str) -> None:
    q, k, v = qkv(device, grad=False)
    assert not attention(q, k, v).requires_grad
    out = attention(q, k, v.requires_grad_())
    assert torch.autograd.grad(out.sum(), v)[0].shape == v.shape


def test_no_second_derivative(device: str) -> None:
    q, k, v = qkv(device)
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_forward_mode_is_refused(name: str, backend: str, device: str) -> None:
    """No backend has it, and zeros would be worse than an error."""
    given = dict(zip("qkv", qkv(device, grad=False), strict=True), sinks=torch.randn(4, device=device))

    def run(x: Tensor) -> Tensor:
        return attention(**given | {name: x}, backend=backend)

    x = given[name]
    with pytest.raises(ValueError, match=f"^{name} has a tangent.*reverse mode"):
        torch.func.jvp(run, (x,), (x,))
    with forward_ad.dual_level():
        for grad in (False, True):
            with pytest.raises(ValueError, match=f"^{name} has a tangent"):
                run(forward_ad.make_dual(x.detach().requires_grad_(grad), x))
        run(x)  # an input without one is like any other


def test_an_expanded_batch(device: str) -> None:
    """Strides of 0 are strides like any other."""
    q, k, v = (x[:1].detach() for x in qkv(device))
    many = attention(*(x.expand(3, -1, -1, -1) for x in (q, k, v)), Mask(causal=True), backend="triton")
    torch.testing.assert_close(many, attention(q, k, v, Mask(causal=True)).expand(3, -1, -1, -1))


def test_auto_goes_by_the_device(device: str) -> None:
    q, _, v = qkv(device)
    assert choose_backend("auto", q, v) == ("triton" if device == "cuda" else "chunked")
    assert choose_backend("auto", q.double(), v.double()) == "chunked"
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    low = q.bfloat16(), v.bfloat16()
    assert choose_backend("auto", *low) == ("hopper" if hopper else "triton" if device == "cuda" else "chunked")
    assert choose_backend("auto", *low, dropout=0.1) == ("triton" if device == "cuda" else "chunked")
    with pytest.raises(ValueError, match="needs an sm_90 GPU" if not hopper else "dropout"):
        choose_backend("hopper", *low, dropout=0.1)


def test_only_hopper_leaves_additions_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there neither a deterministic backward nor one that goes to the portable kernel."""
    q = torch.empty(1, 16, 2, 64, dtype=torch.bfloat16, device="meta")
    for chip, hopper in (("sm_90", True), ("sm_100", False)):
        monkeypatch.setattr(triton_compat, "chip", lambda _, chip=chip: chip)
        assert adds_in_memory(q, q) is hopper
        assert not adds_in_memory(q, q, deterministic=True)
        assert not adds_in_memory(q, q, dropout=0.1, seed=1)
        assert not adds_in_memory(q, q, backend="triton")
        assert not adds_in_memory(q.float(), q.float())
    assert not adds_in_memory(torch.empty(1, 16, 2, 64), torch.empty(1, 16, 2, 64))


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_documents_and_seeds_in_any_memory(backend: str, device: str) -> None:
    """Transposed ids and expanded seeds mean what their contiguous copies mean."""
    q, k, v = (x.detach() for x in qkv(device))
    ids = torch.randint(-1, 2, (24, 2), device=device).T
    seed = torch.tensor(5, device=device).expand(2)
    odd = attention(q, k, v, Mask(documents=ids), dropout=0.5, seed=seed, backend=backend)
    plain = attention(q, k, v, Mask(documents=ids.contiguous()), dropout=0.5, seed=seed.contiguous(), backend="reference")
    torch.testing.assert_close(odd, plain, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_the_sums_alone() -> None:
    q, k, v = (x.detach().bfloat16() for x in qkv())
    _, expected = attention(q, k, v, return_lse=True, backend="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = attention(q, k, v, return_lse=True, backend="chunked")
    assert torch.equal(lse, expected)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_nan_in_the_gradient_of_an_empty_row(backend: str, device: str) -> None:
    """logaddexp(lse, -inf) gives one: rows that see nothing pass nothing on."""
    q, k, v = qkv(device)
    out, lse = attention(q, k[:, :10], v[:, :10], Mask(causal=True), return_lse=True, backend=backend)
    dlse = torch.where(torch.isinf(lse), float("nan"), 1.0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton", pytest.param("hopper", marks=pytest.mark.hopper)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_nobody_reads_what_padding_holds(with_sinks: bool, backend: str, device: str) -> None:
    """Ids of -1 over memory that holds NaN, in all inputs and in dout: finite results, and padding's own gradients are 0."""
    ids = torch.tensor([-1] * 3 + [0] * 6 + [-1] * 2 + [1] * 8 + [-1] * 5)
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    leaves = [x.detach().to(dtype) for x in qkv(device)]
    for x in leaves:
        x[:, ids < 0] = float("nan")
    leaves = [x.requires_grad_() for x in leaves]
    sinks = torch.zeros(leaves[0].shape[2], device=device, requires_grad=True)
    given = leaves + [sinks] * with_sinks
    out = attention(*leaves, Mask(causal=True, documents=ids), sinks=sinks if with_sinks else None, backend=backend)
    dout = torch.randn_like(out)
    dout[:, ids < 0] = float("nan")
    grads = torch.autograd.grad(out, given, dout)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert all((g[:, ids < 0] == 0).all() for g in grads[:3]) and (out[:, ids < 0] == 0).all()


@pytest.mark.parametrize(
    "wrong, told",
    [
        (dict(deterministic="no"), "deterministic='no' must be True or False"),
        (dict(dropout=torch.tensor([0.1, 0.2])), "dropout="),
    ],
)
def test_options_of_a_wrong_kind(wrong: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        attention(*qkv(), **wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mask.from_lengths(5),  # type: ignore[arg-type]
        lambda: Mask.from_lengths([True]),
        lambda: Mask(documents=["a"]),  # type: ignore[list-item]
        lambda: Mask(causal=True, prefix=torch.tensor([-3])),
    ],
)
def test_masks_of_a_wrong_kind(make) -> None:
    with pytest.raises(ValueError, match=r"lengths|documents|prefix"):
        make()


def test_a_mask_made_inside_a_compiled_function() -> None:
    q, k, v = (x.detach() for x in qkv())
    layer = torch.compile(lambda: attention(q, k, v, Mask.from_lengths([10, 14], causal=True)), fullgraph=True, backend="eager")
    torch.testing.assert_close(layer(), attention(q, k, v, Mask.from_lengths([10, 14], causal=True)))
