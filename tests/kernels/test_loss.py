"""`linear_cross_entropy` against cross-entropy over all logits at once, in fp64."""

import itertools
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringspan.kernels import loss as module
from ringspan.kernels.loss import linear_cross_entropy

OP = torch.ops.ringspan.linear_cross_entropy.default
MATMULS = ("aten::mm", "aten::addmm")
ALL = dict(label_smoothing=0.1, z_loss=1e-2, softcap=3.0)
OPTIONS = [dict(zip(ALL, values, strict=True)) for values in itertools.product((0.0, 0.1), (0.0, 1e-2), (0.0, 3.0))]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference(hidden, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    z = hidden.reshape(-1, hidden.shape[-1]) @ weight.T
    z = softcap * torch.tanh(z / softcap) if softcap else z
    valid = labels.flatten() != ignore_index
    z, label = z[valid], labels.flatten()[valid].long()
    lse = z.logsumexp(1)
    loss = lse - (1 - label_smoothing) * z.gather(1, label[:, None])[:, 0] - label_smoothing * z.mean(1) + z_loss * lse**2
    return loss.sum(), valid.sum()


def inputs(shape=(300,), D=16, V=37, dtype=torch.float64, ignored=0.3, device="cpu", seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(*shape, D, dtype=torch.float64).to(device, dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64).to(device, dtype).requires_grad_()
    labels = torch.randint(0, V, shape).masked_fill(torch.rand(shape) < ignored, -100).to(device)
    return hidden, weight, labels


def gradients(function, hidden, weight, labels, scale=1.0, **options):
    loss, num_valid = function(hidden, weight, labels, **options)
    return loss.detach(), num_valid, *torch.autograd.grad(loss * scale, (hidden, weight))


def rms_error(x, ref):
    return ((x.double() - ref.double()).square().mean().sqrt() / ref.double().square().mean().sqrt()).item()


class OperationCounter(TorchDispatchMode):
    """A dispatch mode that also covers operations inside the op: counts matmuls and records the largest tensor."""

    def __init__(self):
        super().__init__()
        self.matmuls, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func == OP:
            with self:  # a mode is off while it dispatches; this turns it on inside the op's function
                return module._over_chunks(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.matmuls += func._schema.name in MATMULS
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if torch.is_tensor(x))])
        return out


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK", 1)  # chunks of 128 tokens, the minimum


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(k for k, v in o.items() if v) or "plain")
@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (1,), (128,), (2, 150), (3, 1, 43)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_equals_the_reference(shape, options, ignore_index, small_chunks):
    hidden, weight, labels = inputs(shape)
    if ignore_index == 5:
        labels = torch.where(labels == -100, 5, labels)
    results = gradients(linear_cross_entropy, hidden, weight, labels, ignore_index=ignore_index, scale=3.0, **options)
    ref = gradients(reference, hidden, weight, labels, ignore_index=ignore_index, scale=3.0, **options)
    for x, r in zip(results, ref, strict=True):
        assert x.dtype == r.dtype and x.shape == r.shape
        torch.testing.assert_close(x, r, rtol=1e-12, atol=1e-12)


def test_equals_torch_cross_entropy():
    hidden, weight, labels = inputs()
    loss, num_valid = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1)
    ref = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, ref, rtol=1e-12, atol=0)
    assert num_valid.dtype == torch.int64 and not num_valid.requires_grad


@pytest.mark.parametrize("options", [{}, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype, options, small_chunks):
    hidden, weight, labels = inputs((400,), dtype=dtype)
    results = gradients(linear_cross_entropy, hidden, weight, labels, scale=1e-3, **options)
    wide = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss, num_valid, *grads = gradients(reference, *wide, labels, scale=1e-3, **options)
    assert results[0].dtype == torch.float32 and results[1] == num_valid
    torch.testing.assert_close(results[0].double(), loss, rtol=2e-6, atol=0)  # fp32 inside, for every input dtype
    eps = torch.finfo(dtype).eps
    for x, ref in zip(results[2:], grads, strict=True):
        assert x.dtype == dtype and rms_error(x, ref) < (2e-6 if dtype == torch.float32 else eps / 2)  # two roundings


def test_a_small_scale_survives_16_bits():
    """In loss / num_valid, the factor must not be rounded to 16 bits before the multiplication."""
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    plain, scaled = (gradients(linear_cross_entropy, hidden, weight, labels, scale=s)[2].double() for s in (1.0, 1 / 385))
    assert abs((scaled * 385 * plain).sum() / plain.square().sum() - 1) < 2e-4  # 1 / 385 in bf16 is 0.19 % off


def test_chunks_do_not_change_values(monkeypatch):
    args = inputs((1000,))
    in_one_chunk = gradients(linear_cross_entropy, *args, **ALL)
    for budget in (1, 37 * 256, 37 * 999):
        monkeypatch.setattr(module, "CPU_CHUNK", budget)
        for x, ref in zip(gradients(linear_cross_entropy, *args, **ALL), in_one_chunk, strict=True):
            torch.testing.assert_close(x, ref, rtol=1e-12, atol=1e-12)


def test_large_logits_give_finite_results():
    hidden, weight, labels = inputs(dtype=torch.float32)
    results = gradients(linear_cross_entropy, hidden * 1e4, weight, labels)
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("needed, matmuls", [("", 3), ("hidden", 6), ("weight", 6), ("hidden weight", 9), ("no_grad", 3)])
def test_unneeded_gradients_are_not_computed(needed, matmuls, small_chunks):
    hidden, weight, labels = inputs()  # 300 tokens, 3 chunks
    ref = gradients(reference, hidden, weight, labels)
    hidden.requires_grad_("hidden" in needed or needed == "no_grad")
    weight.requires_grad_("weight" in needed or needed == "no_grad")
    with OperationCounter() as counter, torch.set_grad_enabled(needed != "no_grad"):
        loss, num_valid = linear_cross_entropy(hidden, weight, labels)
    assert counter.matmuls == matmuls
    torch.testing.assert_close(loss.detach(), ref[0])
    assert loss.requires_grad == (needed not in ("", "no_grad")) and not num_valid.requires_grad
    if loss.requires_grad:
        loss.backward()
        for x, r in ((hidden, ref[2]), (weight, ref[3])):
            torch.testing.assert_close(x.grad, r if x.requires_grad else None)


@pytest.mark.parametrize("options", [{}, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(dtype, options, small_chunks):
    hidden, weight, labels = inputs((1000,), V=200, dtype=dtype)
    with OperationCounter() as counter:
        loss, _ = linear_cross_entropy(hidden, weight, labels, **options)
        loss.backward()
    assert counter.largest == 128 * 200


def test_contents_of_ignored_rows_do_not_matter(small_chunks):
    hidden, weight, labels = inputs()
    with_nan = hidden.detach().clone()
    with_nan[labels == -100] = torch.tensor([float("nan"), float("inf")] * 8, dtype=torch.float64)
    results = gradients(linear_cross_entropy, with_nan.requires_grad_(), weight, labels, **ALL)
    for x, ref in zip(results, gradients(linear_cross_entropy, hidden, weight, labels, **ALL), strict=True):
        assert torch.equal(x, ref)
    assert not results[2][labels == -100].any()


def test_all_labels_ignored():
    hidden, weight, labels = inputs(ignored=2.0)
    loss, num_valid, dhidden, dweight = gradients(linear_cross_entropy, hidden, weight, labels, **ALL)
    assert loss == 0 and num_valid == 0 and not dhidden.any() and not dweight.any()


def test_non_contiguous_inputs_and_int32_labels():
    hidden, weight, labels = inputs((10, 20))
    ref = gradients(reference, hidden, weight, labels)
    views = hidden.detach().mT.contiguous().mT.requires_grad_(), weight.detach().T.contiguous().T.requires_grad_()
    strided = labels.int().T.contiguous().T
    assert not any(x.is_contiguous() for x in (*views, strided))
    for x, r in zip(gradients(linear_cross_entropy, *views, strided), ref, strict=True):
        torch.testing.assert_close(x, r, rtol=1e-12, atol=1e-12)


def test_opcheck():
    hidden, weight, labels = inputs((40,), dtype=torch.float32)
    for needs_grad in ((True, True), (True, False), (False, True), (False, False)):
        args = (hidden.detach().requires_grad_(needs_grad[0]), weight.detach().requires_grad_(needs_grad[1]), labels)
        torch.library.opcheck(OP, (*args, -100, 0.1, 1e-2, 3.0, *needs_grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_once_for_all_lengths(dtype):
    counter = CompileCounterWithBackend("aot_eager")

    def step(hidden, weight, labels):
        loss, num_valid = linear_cross_entropy(hidden, weight, labels, **ALL)
        return loss / num_valid.clamp(min=1), num_valid

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (33, 50, 70):
        args = inputs((2, length), dtype=dtype)
        for x, ref in zip(gradients(compiled, *args), gradients(step, *args), strict=True):
            assert torch.equal(x, ref)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_for_linear(compiled):
    hidden, weight, labels = inputs(dtype=torch.float32)
    function = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager") if compiled else linear_cross_entropy
    with torch.autocast("cpu", torch.bfloat16):
        results = gradients(function, hidden, weight, labels)
        mixed = gradients(function, hidden.bfloat16(), weight, labels)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    ref = gradients(linear_cross_entropy, *low, labels)
    for x, m, r in zip(results, mixed, ref, strict=True):
        assert torch.equal(x, r.to(x.dtype)) and torch.equal(m, r.to(m.dtype))
    assert results[2].dtype == results[3].dtype == torch.float32


def test_selective_checkpointing_sees_one_op():
    args = inputs(dtype=torch.float32)
    ref = gradients(linear_cross_entropy, *args)
    calls = []

    def policy(ctx, func, *args, **kwargs):
        calls.append((func, ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if func == OP else CheckpointPolicy.PREFER_RECOMPUTE

    def run(*args):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(linear_cross_entropy, *args, use_reentrant=False, context_fn=contexts)

    with OperationCounter() as counter:
        results = gradients(run, *args)
    assert all(torch.equal(x, r) for x, r in zip(results, ref, strict=True))
    assert (OP, False) in calls and counter.matmuls == 3  # saved, so not recomputed


def test_gradcheck_with_undefined_gradients():
    hidden, weight, labels = inputs((5,))
    assert torch.autograd.gradcheck(lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0], (hidden, weight))


def test_torch_func_is_rejected():
    hidden, weight, labels = inputs((5,))
    with pytest.raises(ValueError, match=r"^linear_cross_entropy has no derivative in torch.func.*torch.autograd.grad"):
        torch.func.grad(lambda hidden: linear_cross_entropy(hidden, weight, labels)[0])(hidden)


def test_no_second_derivative():
    hidden, weight, labels = inputs()
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_forward_mode_is_rejected(name):
    tensors = dict(zip(("hidden", "weight", "labels"), inputs(), strict=True))
    x = tensors[name].detach()
    with pytest.raises(ValueError, match=f"^{name} has a tangent.*reverse mode"):
        torch.func.jvp(lambda x: linear_cross_entropy(**tensors | {name: x})[0], (x,), (x,))


H, W, LABELS = torch.zeros(4, 8), torch.zeros(9, 8), torch.zeros(4, dtype=torch.int64)
NAN = float("nan")


@pytest.mark.parametrize(
    "argument, remedy, change",
    [
        ("hidden", "float32", dict(hidden=H.long())),
        ("hidden", r"\(…, D\)", dict(hidden=H[0, 0], labels=LABELS[0])),
        ("weight", "cast", dict(weight=W.double())),
        ("weight", r"\(V ≥ 1, 8\)", dict(weight=W[:, :7])),
        ("weight", r"\(V ≥ 1, 8\)", dict(weight=W[0])),
        ("weight", r"\(V ≥ 1, 8\)", dict(weight=W[:0])),
        ("weight", r"\.to\(device\)", dict(weight=W.to("meta"))),
        ("labels", r"\.to\(device\)", dict(labels=LABELS.to("meta"))),
        ("labels", r"labels\.long\(\)", dict(labels=LABELS.float())),
        ("labels", r"labels\.long\(\)", dict(labels=LABELS.bool())),
        ("labels", r"\(4,\)", dict(labels=LABELS[:3])),
        ("labels", r"\(4,\)", dict(labels=LABELS[:, None])),
        ("labels", r"holds 9.*\[0, 9\)", dict(labels=LABELS + 9)),
        ("labels", r"holds -1.*ignore_index", dict(labels=LABELS - 1)),
        ("label_smoothing", r"\[0, 1\]", dict(label_smoothing=1.1)),
        ("label_smoothing", r"\[0, 1\]", dict(label_smoothing=-0.1)),
        ("label_smoothing", r"\[0, 1\]", dict(label_smoothing=NAN)),
        ("z_loss", "≥ 0", dict(z_loss=-1e-4)),
        ("z_loss", "≥ 0", dict(z_loss=NAN)),
        ("softcap", "≥ 0", dict(softcap=-1.0)),
        ("softcap", "≥ 0", dict(softcap=NAN)),
        ("softcap", "finite", dict(softcap=float("inf"))),
        ("softcap", "Python number", dict(softcap=None)),
        ("label_smoothing", "Python number", dict(label_smoothing=None)),
        ("label_smoothing", "Python number", dict(label_smoothing=torch.tensor(0.1))),
        ("ignore_index", "must be an int", dict(ignore_index=None)),
        ("hidden", "must be a tensor, not list", dict(hidden=[[0.0]])),
        ("weight", "must be a tensor, not list", dict(weight=[[0.0]])),
        ("labels", "must be a tensor, not list", dict(labels=[0])),
        ("hidden", r"hidden.to_dense\(\)", dict(hidden=H.to_sparse())),
    ],
)
def test_errors_name_the_argument_and_a_remedy(argument, remedy, change):
    with pytest.raises(ValueError, match=rf"^{argument}\b.*{remedy}"):
        linear_cross_entropy(**{**dict(hidden=H, weight=W, labels=LABELS), **change})


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, ALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuda(dtype, options, monkeypatch):
    """Compare with fp64 on the same inputs: no host sync, memory for one chunk only, and bit-equal runs."""
    V, D, chunk = 5003, 256, 2**20  # 128 tokens a chunk
    hidden, weight, labels = inputs((3000,), D=D, V=V, dtype=dtype, device="cuda")
    with torch.no_grad():
        hidden *= 0.1
        hidden[labels == -100] = NAN
    wide = hidden.detach().double().masked_fill((labels == -100)[:, None], 0), weight.detach().double()
    loss, num_valid, *grads = gradients(reference, *(x.requires_grad_() for x in wide), labels, scale=1e-3, **options)
    monkeypatch.setattr(module, "CUDA_CHUNK", chunk)
    gradients(linear_cross_entropy, hidden, weight, labels, **options)  # allocates cuBLAS's workspace, among others
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = gradients(linear_cross_entropy, hidden, weight, labels, scale=1e-3, **options)
        repeated = gradients(linear_cross_entropy, hidden, weight, labels, scale=1e-3, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradient_bytes = 2 * (hidden.nbytes + weight.nbytes)  # held from the forward, and scaled; plus dweight in fp32
    assert torch.cuda.max_memory_allocated() - before < 2 * gradient_bytes + V * D * 4 + 4 * chunk * 4
    assert all(torch.equal(x, y) for x, y in zip(results, repeated, strict=True))
    assert results[1] == num_valid
    torch.testing.assert_close(results[0].double(), loss, rtol=1e-5, atol=0)
    for x, ref in zip(results[2:], grads, strict=True):
        assert x.dtype == dtype and rms_error(x, ref) < (1e-5 if dtype == torch.float32 else 0.005)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_return_each_gives_losses_and_hits_per_position(monkeypatch, softcap) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", 1)  # chunks of MIN_TOKENS, so there are three
    hidden, weight, labels = inputs((2, 150))
    with torch.no_grad():
        labels[0, :150:3] = (hidden[0, :150:3] @ weight.T).argmax(-1)  # some labels with the largest logit
    loss_sum, num_valid, losses, hits = linear_cross_entropy(hidden, weight, labels, softcap=softcap, return_each=True)
    assert losses.shape == hits.shape == labels.shape and not losses.requires_grad and loss_sum.requires_grad
    z = hidden.detach() @ weight.detach().T
    expected = (softcap * torch.tanh(z / softcap) if softcap else z).log_softmax(-1)
    valid = labels != -100
    expected = torch.where(valid, -expected.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(hits, (z.argmax(-1) == labels) & valid) and 50 <= hits.sum() < num_valid
    torch.testing.assert_close(losses.sum(), loss_sum.detach(), rtol=1e-12, atol=0)
