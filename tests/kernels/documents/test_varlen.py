"""`attention_varlen` against dense attention of each document, its cache of masks, launches, compilation and errors."""

import re
import subprocess
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan import Mask, attention, attention_varlen
from ringspan.kernels import varlen
from ringspan.kernels.document_tables import query_origin
from ringspan.kernels.dropout import keep_mask
from ringspan.kernels.runtime.launch import Launch
from ringspan.kernels.segments import one_segment
from tests.kernels.helpers.cases import BACKENDS_AND_DTYPES
from tests.kernels.helpers.dense import assert_close, boundaries, dense_varlen

SEED = 2**40 + 77


@dataclass(frozen=True)
class Packed:
    """A packed batch: lengths of its documents, and the options of a call."""

    name: str
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    heads: tuple[int, int] = (2, 1)
    width: int = 16

    def __str__(self) -> str:
        return self.name


CASES = [
    Packed("causal", (20, 13, 1, 36)),
    Packed("full", (1, 30, 0, 7, 1), options=(("causal", False),)),
    Packed("empty-documents", (0, 0, 33, 0, 31, 0), options=(("window", 9),), sinks=True),
    Packed("window", (40, 3, 25), options=(("causal", False), ("window", (2, 11)), ("softcap", 3.0))),
    Packed("all", (9, 41, 0, 1, 12), options=(("window", 20), ("softcap", 5.0), ("dropout", 0.3), ("scale", 0.4)), sinks=True),
    Packed("one-token-each", (1,) * 67),
    Packed("one-document", (70,), heads=(4, 2), width=48),
    Packed("no-tokens", (0, 0, 0)),
    Packed("no-documents", ()),
    Packed("keys", (5, 1, 30, 0, 12), (40, 3, 7, 9, 12), heads=(4, 2)),
    Packed("keys-full", (33, 2, 0, 20), (0, 60, 1, 5), options=(("causal", False),), sinks=True),
    Packed("keys-window", (17, 40, 3), (30, 22, 0), options=(("causal", False), ("window", (6, 4)))),
    Packed("keys-all", (1, 20, 30), (50, 0, 40), options=(("window", 8), ("softcap", 2.0), ("dropout", 0.2)), sinks=True),
    Packed("one-query-each", (1,) * 9, (3, 50, 1, 0, 7, 20, 30, 2, 5)),
    Packed("no-keys", (4, 2), (0, 0), sinks=True),
    Packed("no-queries", (0, 0), (4, 2)),
]


def results_of(call: Any, leaves: dict[str, Tensor], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """out, lse and the gradients of all inputs."""
    out, lse = call(**leaves)
    dlse = torch.where(torch.isinf(lse), 0, dlse.to(lse.dtype))
    finite = torch.where(torch.isinf(lse), 0, lse)
    loss = (out * dout.to(out.dtype)).sum() + (finite * dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def check(case: Packed, backend: str, dtype: torch.dtype, device: str, as_tensor: bool = False, **extra: Any) -> None:
    """Compare a call with the dense truth under the error rule."""
    key_lengths = case.lengths if case.key_lengths is None else case.key_lengths
    num_queries, num_keys, (heads, kv_heads) = sum(case.lengths), sum(key_lengths), case.heads
    sizes = dict(q=(num_queries, heads), k=(num_keys, kv_heads), v=(num_keys, kv_heads))
    inputs = {name: torch.randn(*size, case.width, device=device).to(dtype) for name, size in sizes.items()}
    if case.sinks:
        inputs["sinks"] = torch.randn(heads, device=device, dtype=torch.promote_types(dtype, torch.float32))
    dout, dlse = (
        torch.randn(num_queries, heads, case.width, device=device).to(dtype),
        torch.randn(heads, num_queries, device=device),
    )
    options = dict(case.options)
    bounds: list[Any] = [boundaries(case.lengths), None if case.key_lengths is None else boundaries(key_lengths)]
    if as_tensor:
        bounds = [None if b is None else torch.tensor(b, dtype=torch.int32, device=device) for b in bounds]
    keep = None
    if "dropout" in options:
        p = torch.arange(num_queries, device=device) + (query_origin(num_keys) if case.key_lengths is not None else 0)
        keep = keep_mask(torch.tensor(SEED, device=device), options["dropout"], 1, range(heads), p, one_segment(num_keys))[0]
        extra["seed"] = SEED

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return attention_varlen(q, k, v, *bounds, sinks=sinks, return_lse=True, backend=backend, **options, **extra)

    def oracle(precision: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: x.to(precision).requires_grad_() for name, x in inputs.items()}
        truth = partial(dense_varlen, lengths=case.lengths, key_lengths=key_lengths, keep=keep, **options)
        return results_of(truth, leaves, dout.to(precision), dlse.to(precision))

    results = results_of(call, {name: x.clone().requires_grad_() for name, x in inputs.items()}, dout, dlse)
    assert_close(results, oracle(torch.float64), oracle(dtype), dtype)


@pytest.fixture
def boundaries_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors on the CPU like those on a GPU, which the host does not read."""
    read = varlen._host_numbers
    monkeypatch.setattr(varlen, "_host_numbers", lambda x: None if isinstance(x.values, Tensor) else read(x))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_equals_dense_attention_of_each_document(
    case: Packed, backend: str, dtype: torch.dtype, device: str, poisoned_memory: None
) -> None:
    if backend == "hopper" and "dropout" in dict(case.options):
        pytest.skip("hopper has no dropout")
    check(case, backend, dtype, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_boundaries_on_a_device_equal_dense_attention(case: Packed, device: str, boundaries_on_device: None) -> None:
    check(case, "auto", torch.float64, device, as_tensor=True)


@pytest.mark.hopper
def test_deterministic_on_hopper(device: str) -> None:
    for name in ("causal", "keys", "keys-window"):
        case = next(case for case in CASES if case.name == name)
        check(case, "hopper", torch.bfloat16, device, deterministic=True)


def random_qkv(rows: int, keys: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    keys = rows if keys is None else keys
    sizes = ((rows, 2), (keys, 1), (keys, 1))
    return [torch.randn(n, heads, 16, dtype=dtype, device=device, requires_grad=True) for n, heads in sizes]


def test_gradcheck() -> None:
    q, k, v = random_qkv(4, 5, torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        options = dict(softcap=3.0, sinks=sinks, dropout=0.2, seed=5, return_lse=True)
        return attention_varlen(q, k, v, [0, 1, 1, 4], [0, 2, 3, 5], window=2, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_one_document_equals_attention(device: str) -> None:
    """Also with more keys than queries, and with more queries than keys."""
    for rows, keys in ((20, 20), (5, 33), (33, 5)):
        q, k, v = random_qkv(rows, keys, device=device)
        expected = attention(q[None], k[None], v[None], Mask(causal=True, window=7))[0]
        packed = attention_varlen(q, k, v, [0, rows], [0, keys], window=7)
        torch.testing.assert_close(packed, expected, rtol=1e-6, atol=1e-6)


def test_equal_boundaries_of_the_keys_change_nothing() -> None:
    """Not even the pattern of dropout."""
    q, k, v = random_qkv(9)
    bounds = [0, 4, 4, 9]
    expected = attention_varlen(q, k, v, bounds, dropout=0.5, seed=3)
    tensor = torch.tensor(bounds, dtype=torch.int32)
    for pair in ((bounds, bounds), (bounds, list(bounds)), (tensor, tensor), (tensor, tensor.clone()), (tuple(bounds), tensor)):
        assert torch.equal(attention_varlen(q, k, v, *pair, dropout=0.5, seed=3), expected)


@pytest.mark.parametrize("with_keys", [False, True])
def test_launches_do_not_depend_on_the_number_of_documents(
    with_keys: bool, device: str, boundaries_on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and other operations of forward and backward, with boundaries on the device: the same for 2 and for 200."""
    counts: dict[str, int] = {}
    launch = Launch.__call__

    def counted(self: Launch) -> Any:
        counts["kernels"] += 1
        return launch(self)

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts["operations"] += 1
            return func(*args, **kwargs or {})

    monkeypatch.setattr(Launch, "__call__", counted)
    seen = []
    for num_documents in (2, 200):
        counts.update(kernels=0, operations=0)
        bounds = torch.arange(num_documents + 1, dtype=torch.int32, device=device) * (200 // num_documents)
        pair = (bounds, bounds // 2) if with_keys else (bounds,)
        q, k, v = random_qkv(200, 100 if with_keys else 200, device=device)
        with Operations():
            attention_varlen(q, k, v, *pair, window=50, backend="triton").sum().backward()
        seen.append(dict(counts))
    assert seen[0] == seen[1] and seen[0]["kernels"] >= 3 and seen[0]["operations"] > 10


def test_masks_are_cached(boundaries_on_device: None) -> None:
    """By value if the host has the boundaries, else by the tensor and its version. Masks do not outlive a tensor."""

    def mask(values: Any, keys: Any = None, window: int | None = None) -> Mask:
        wrap = lambda name, x: None if x is None else varlen.Boundaries(name, x, 8)  # noqa: E731
        return varlen.packed_mask(wrap("cu_seqlens_q", values), wrap("cu_seqlens_k", keys), torch.empty(0), True, window)

    assert mask([0, 3, 8]) is mask((0, 3, 8)) and mask([0, 3, 8]) is not mask([0, 4, 8])
    assert mask([0, 3, 8], window=3) is not mask([0, 3, 8])
    tensor = torch.tensor([0, 3, 8], dtype=torch.int32)
    first = mask(tensor)
    assert mask(tensor) is first and mask(tensor, window=3) is not first and mask(tensor) is first
    other = torch.tensor([0, 5, 8], dtype=torch.int32)
    assert mask(tensor, other) is mask(tensor, other)
    assert mask(tensor, other) is not mask(tensor, other.clone())
    tensor[1] = 6
    changed = mask(tensor)
    assert changed is not first and changed.bounds().starts.tolist() == [0] * 6 + [6] * 2
    reference = weakref.ref(changed)
    del changed, tensor
    assert reference() is None


def test_layers_of_a_step_make_one_mask(boundaries_on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = varlen._make_mask
    monkeypatch.setattr(varlen, "_make_mask", lambda *args: made.append(1) or make(*args))
    bounds = torch.tensor([0, 3, 9], dtype=torch.int32)
    x = torch.randn(9, 2, 16, requires_grad=True)
    for _ in range(3):
        x = attention_varlen(x, x, x, bounds)
    x.sum().backward()
    assert len(made) == 1


def test_a_mask_made_in_inference_mode_works_in_training() -> None:
    q, k, v = random_qkv(9)
    with torch.inference_mode():
        attention_varlen(q, k, v, [0, 7, 9])
        attention_varlen(q, k, v, torch.tensor([0, 7, 9], dtype=torch.int32))
    attention_varlen(q, k, v, [0, 7, 9]).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("with_keys", [False, True])
def test_compiles_as_one_graph_for_any_boundaries(with_keys: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def layer(q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor) -> Tensor:
        out, lse = attention_varlen(q * 2, k, v, *bounds, window=7, return_lse=True)
        return out.sum() + torch.where(torch.isinf(lse), 0, lse).sum()

    for first in (0, 5, 20):
        q, k, v = random_qkv(20, 31 if with_keys else 20)
        bounds = [torch.tensor([0, first, 20], dtype=torch.int32)]
        bounds += [torch.tensor([0, 30, 31], dtype=torch.int32)] * with_keys
        compiled = torch.autograd.grad(layer(q, k, v, *bounds), (q, k, v))
        out, lse = attention_varlen(q * 2, k, v, *bounds, window=7, return_lse=True)
        expected = torch.autograd.grad(out.sum() + torch.where(torch.isinf(lse), 0, lse).sum(), (q, k, v))
        torch.testing.assert_close(compiled, expected)
    assert counter.frame_count == 1
    with pytest.raises(RuntimeError, match="cu_seqlens_q: boundaries must begin with 0"):
        layer(q, k, v, torch.tensor([1, 5, 20], dtype=torch.int32), *bounds[1:])


def test_fake_tensors_stay_out_of_the_cache() -> None:
    """Nor do they find a mask there that was made of others."""
    shape, bounds = (23, 2, 16), [0, 11, 23]
    for _ in range(2):
        with FakeTensorMode():
            x = torch.empty(shape)
            assert attention_varlen(x, x, x, bounds).shape == shape
        x = torch.randn(shape)
        assert torch.isfinite(attention_varlen(x, x, x, bounds)).all()


def test_compiles_with_a_list() -> None:
    q, k, v = random_qkv(8)
    layer = torch.compile(lambda: attention_varlen(q, k, v, [0, 3, 3, 8]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(layer(), attention_varlen(q, k, v, [0, 3, 3, 8]))


INT32 = torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens_q=[1, 4, 8]), "cu_seqlens_q=[1, 4, 8]: the first boundary must be 0"),
        (dict(cu_seqlens_q=[]), "cu_seqlens_q=[]: the first boundary must be 0"),
        (dict(cu_seqlens_q=[0, 5, 4, 8]), "cu_seqlens_q[2]=4 is below cu_seqlens_q[1]=5: boundaries must not decrease"),
        (dict(cu_seqlens_q=[0, 4, 7]), "cu_seqlens_q=[0, 4, 7]: the last boundary must be 8, the number of tokens"),
        (dict(cu_seqlens_q=[*range(9), 9]), "cu_seqlens_q=[0, 1, …, 9]: the last boundary must be 8"),
        (dict(cu_seqlens_q=torch.tensor([0, 9], dtype=INT32)), "cu_seqlens_q=[0, 9]: the last boundary must be 8"),
        (dict(cu_seqlens_q=torch.tensor([0, 4, 8])), "cu_seqlens_q is torch.int64; int32 works: cu_seqlens_q.int()"),
        (dict(cu_seqlens_q=torch.tensor([0.0, 8.0])), "cu_seqlens_q is torch.float32; int32 works"),
        (dict(cu_seqlens_q=torch.zeros(1, 2, dtype=INT32)), "cu_seqlens_q has shape (1, 2): it must be (documents + 1,)"),
        (dict(cu_seqlens_q=torch.tensor(8, dtype=INT32)), "cu_seqlens_q has shape (): it must be (documents + 1,)"),
        (dict(cu_seqlens_q=torch.zeros(0, dtype=INT32)), "cu_seqlens_q has shape (0,)"),
        (dict(cu_seqlens_q=torch.zeros(2, dtype=INT32, device="meta")), "cu_seqlens_q is on meta, but q is on cpu"),
        (
            dict(cu_seqlens_q=[0, 8.0]),
            "cu_seqlens_q=[0, 8.0] must be an int32 tensor of shape (documents + 1,) or a list of ints",
        ),
        (dict(cu_seqlens_q=[False, 8]), "cu_seqlens_q=[False, 8] must be"),
        (dict(cu_seqlens_q=8), "cu_seqlens_q=8 must be"),
        (dict(cu_seqlens_k=[0, 3, 9]), "cu_seqlens_k=[0, 3, 9]: the last boundary must be 8"),
        (dict(cu_seqlens_k=[0, 8]), "cu_seqlens_k has 2 boundaries, cu_seqlens_q has 3: they bound the same documents"),
        (dict(k=torch.zeros(9, 2, 16), v=torch.zeros(9, 2, 16)), "q has 8 tokens and k has 9: pass the boundaries of the keys"),
        (dict(v=torch.zeros(9, 2, 16)), "k (1, 8, 2, 16) and v (1, 9, 2, 16) must have the same length"),
        (dict(q=torch.zeros(1, 8, 2, 16)), "q has 4 dimensions (1, 8, 2, 16); packed, it must be (tokens, heads, head dim)"),
        (dict(k=None), "k must be a tensor, not NoneType"),
        (dict(causal=1), "causal=1 must be True or False"),
        (dict(window=0), "window=0: a window includes the query itself"),
        (dict(dropout=0.1, seed=torch.zeros(8, dtype=torch.int64)), "seed is torch.int64 (8,)"),
        (dict(backend="flash"), "backend='flash': choose one of"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        attention_varlen(**dict(q=x, k=x, v=x, cu_seqlens_q=[0, 3, 8]) | change)


@pytest.mark.parametrize("values", [[1, 8], [0, 5, 4, 8], [0, 7], [0, 9]])
def test_invalid_boundaries_on_a_device_fail_an_assertion(values: list[int], boundaries_on_device: None) -> None:
    x = torch.zeros(8, 2, 16)
    bounds = torch.tensor(values, dtype=INT32)
    with pytest.raises(RuntimeError, match="cu_seqlens_q: boundaries must begin with 0, not decrease, and end with"):
        attention_varlen(x, x, x, bounds)
    with pytest.raises(RuntimeError, match="cu_seqlens_k: boundaries must"):
        attention_varlen(x, x, x, torch.linspace(0, 8, len(bounds)).int(), bounds)


def test_boundaries_on_two_devices_are_rejected(boundaries_on_device: None) -> None:
    x = torch.zeros(8, 2, 16)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q and cu_seqlens_k must be both on the host"):
        attention_varlen(x, x, x, [0, 8], torch.tensor([0, 8], dtype=INT32))


@pytest.mark.gpu
@pytest.mark.parametrize("with_keys", [False, True])
def test_boundaries_on_a_gpu_are_not_read(with_keys: bool) -> None:
    """Forward and backward of two layers, the first of which makes the mask."""
    q, k, v = random_qkv(300, 400 if with_keys else 300, torch.bfloat16, "cuda")

    def step() -> None:
        bounds = torch.arange(0, 301, 3, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
        pair = (bounds, bounds + bounds // 3) if with_keys else (bounds,)
        for window in (None, 2):
            attention_varlen(q, k, v, *pair, window=window).sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert q.grad is not None


@pytest.mark.gpu
def test_a_cuda_graph_takes_new_boundaries() -> None:
    """A replay computes the tables again, although a mask of this tensor was cached before the capture."""
    q, k, v = (x.detach() for x in random_qkv(300, None, torch.bfloat16, "cuda"))
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention_varlen(q, k, v, bounds)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_varlen(q, k, v, bounds)
    for first in (100, 1, 250):
        bounds.copy_(torch.tensor([0, first, 300], dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(out, attention_varlen(q, k, v, [0, first, 300]))


@pytest.mark.gpu
def test_invalid_boundaries_on_a_gpu_end_the_process() -> None:
    code = (
        "import torch; from ringspan import attention_varlen; x = torch.zeros(8, 2, 16, device='cuda');"
        "attention_varlen(x, x, x, torch.tensor([0, 7], dtype=torch.int32, device='cuda')); torch.cuda.synchronize()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode and "device-side assert" in result.stderr
