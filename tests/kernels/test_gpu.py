"""Tests that need a GPU: real tile sizes, long sequences, wide strides, memory, CUDA graphs and no host sync."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ringspan import Mask, attention
from ringspan.kernels.backends.choose import choose_backend
from ringspan.kernels.backends.hopper import tile_sizes
from ringspan.kernels.blocks import block_forward
from ringspan.kernels.runtime import call_cache
from ringspan.kernels.segments import one_segment
from tests.kernels.backends.test_backends import check_case
from tests.kernels.helpers.cases import CASES, CHUNKED_CASES
from tests.kernels.helpers.dense import Case

pytestmark = pytest.mark.gpu


KERNELS = ["triton", pytest.param("hopper", marks=pytest.mark.hopper)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_sweep_over_many_tiles(case: Case, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_case(case.grown(13), "triton", dtype, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("growth", [1, 13])
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.dropout and (case.scale is None or case.scale > 0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sweep_on_hopper(case: Case, dtype: torch.dtype, growth: int, poisoned_memory: None) -> None:
    check_case(case.grown(growth) if growth > 1 else case, "hopper", dtype, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.width == 32 and not case.dropout and case.scale is None], ids=str
)
def test_sweep_of_wide_heads_on_hopper(case: Case, poisoned_memory: None) -> None:
    """At head dim 128, a backward's consumers skip query tiles without visible keys of theirs."""
    check_case(replace(case.grown(13), width=128), "hopper", torch.bfloat16, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("growth", [1, 13])
@pytest.mark.parametrize("case", CHUNKED_CASES, ids=str)
def test_sweep_of_head_dims_in_chunks(case: Case, growth: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if growth == 1:  # every window is a long one
        monkeypatch.setattr(tile_sizes, "SHORT_WINDOWS", {})
    check_case(case.grown(growth), "hopper", torch.bfloat16, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("width, v_width", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_staggered_keys(width: int, v_width: int, poisoned_memory: None) -> None:
    """Groups of query tiles begin at five or eight tiles of keys, in windows of 32 or 64; the last tile is partial."""
    case = Case("long", rows=2000, keys=12_600, heads=(8, 2), width=width, v_width=v_width)
    check_case(case, "hopper", torch.bfloat16, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("width, v_width", [(160, 160), (192, 128), (256, 256)])
def test_staggered_queries(width: int, v_width: int, poisoned_memory: None) -> None:
    """In the backward groups of key tiles begin at other tiles of queries, in windows of 64; the last tile is partial."""
    case = Case("long", rows=12_600, keys=2000, heads=(8, 2), width=width, v_width=v_width)
    check_case(case, "hopper", torch.bfloat16, "cuda")


@pytest.mark.hopper
@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout][::4], ids=str)
def test_replays_on_hopper(case: Case, poisoned_memory: None) -> None:
    """The second and third call replay the first with other tensors."""
    if case.scale is None or case.scale > 0:
        for _ in range(3):
            check_case(case.grown(13), "hopper", torch.bfloat16, "cuda")


@pytest.mark.hopper
def test_hopper_calls_have_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_calls", {})
    q, k, v = (torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attention(q, k, v, Mask(causal=True), backend="hopper").backward(
        torch.ones_like(q)
    )  # the gradient of sum() is expanded and would be copied
    assert [call.replay is not None for call in call_cache._calls.values()] == [True, True]


@pytest.mark.hopper
def test_hopper_rejects_what_it_cannot_run_and_auto_uses_triton() -> None:
    q = torch.randn(1, 10, 2, 64, device="cuda", dtype=torch.bfloat16)
    for inputs, options in ((q.float(), {}), (q, dict(dropout=0.1)), (q, dict(scale=-1.0))):
        with pytest.raises(ValueError, match=r"hopper.*use backend='triton'"):
            attention(inputs, inputs, inputs, backend="hopper", **options)
        assert attention(inputs, inputs, inputs, **options).isfinite().all()
    assert choose_backend("auto", q, q) == "hopper"


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("width", range(16, 257, 8))
@pytest.mark.parametrize("v_width", [None, 24, 128])
def test_every_head_dim(width: int, v_width: int | None, backend: str, poisoned_memory: None) -> None:
    case = Case(f"width-{width}-{v_width}", rows=300, width=width, v_width=v_width, causal=True, heads=(4, 2))
    check_case(case, backend, torch.bfloat16, "cuda")


LONG = {  # name: (length, head dim of q and k, of v, mask)
    "causal-64k-d128": (65536, 128, 128, lambda n: Mask(causal=True)),
    "full-32k-d64": (32768, 64, 64, lambda n: Mask()),
    "window-64k-d128": (65536, 128, 128, lambda n: Mask(causal=True, window=4096)),
    "documents-64k-d64": (65536, 64, 64, lambda n: Mask.from_lengths([20000, 1, 15000, n - 35001], causal=True)),
    "prefix-16k-d256": (16384, 256, 256, lambda n: Mask(causal=True, prefix=5000)),
    "causal-16k-d96": (16384, 96, 96, lambda n: Mask(causal=True)),
    "causal-16k-d192-128": (16384, 192, 128, lambda n: Mask(causal=True)),
    "causal-16k-d112": (16384, 112, 112, lambda n: Mask(causal=True)),
    "full-16k-d80": (16384, 80, 80, lambda n: Mask()),
    "window-32k-d160": (32768, 160, 160, lambda n: Mask(causal=True, window=4096)),
    "window-16k-d120": (16384, 120, 120, lambda n: Mask(causal=True, window=4096)),
    "short-window-16k-d96": (16384, 96, 96, lambda n: Mask(causal=True, window=2047)),
}


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("name", LONG)
def test_long_against_chunked_in_fp32(name: str, backend: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setattr("ringspan.kernels.backends.chunked.Q_CHUNK", 1024)
    monkeypatch.setattr("ringspan.kernels.backends.chunked.K_CHUNK", 2048)
    length, width, v_width, make = LONG[name]
    mask = make(length)
    sizes = (4, width), (2, width), (2, v_width), (4, v_width)
    q, k, v, dout = (torch.randn(1, length, *size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask, return_lse=True, backend=backend)
    results = out, lse, *torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    ref_out, ref_lse = attention(*exact, mask, return_lse=True, backend="chunked")
    truth = ref_out, ref_lse, *torch.autograd.grad(ref_out, exact, dout.float())
    baseline = None
    if name.startswith(("causal", "full")):
        low = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=name.startswith("causal"), enable_gqa=True
        )
        baseline = low.transpose(1, 2), None, *torch.autograd.grad(low, leaves, dout.transpose(1, 2))
    for index, label in enumerate(("out", "lse", "dq", "dk", "dv")):
        ref, value = truth[index].double(), results[index].double()
        assert not value.isnan().any(), label
        ratio = (value - ref).square().mean().sqrt() / ref.square().mean().sqrt()
        assert ratio <= (1e-5 if label == "lse" else 0.005), f"{label}: RMS error is {ratio:.3%}"
        if baseline and label != "lse":  # the kernel rule, with torch's own bf16 kernel as the baseline
            rounded = ref.bfloat16()
            step = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
            allowed = 2 * (baseline[index].double() - ref).abs().max() + 2 * step
            assert (value - ref).abs().max() <= allowed, label


@pytest.mark.parametrize("backend", KERNELS)
def test_strides_past_two_to_the_31(backend: str, poisoned_memory: None) -> None:
    """The rows are 8M elements apart, so that the last of 300 has the offset 2.4e9."""
    rows, heads, width, step = 300, 2, 64, 8_000_000
    wide = [
        torch.empty_strided((1, rows, heads, width), (1, step, width, 1), dtype=torch.bfloat16, device="cuda") for _ in range(4)
    ]
    near = [torch.randn(1, rows, heads, width, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    for far, x in zip(wide, near, strict=True):
        far.copy_(x)
    results = []  # in a fixed order, to compare bits
    for q, k, v, dout in (wide, near):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, Mask(causal=True), backend=backend, deterministic=True)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = results[0][0]
    results = []  # hopper accumulates dq in any order; dk and dv still have a fixed one
    for q, k, v, dout in (wide, near):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results.append(torch.autograd.grad(attention(*leaves, Mask(causal=True), backend=backend), leaves, dout))
    (dq, *others), (dq_near, *others_near) = results
    assert all(torch.equal(a, b) for a, b in zip(others, others_near, strict=True))
    assert (dq.float() - dq_near.float()).norm() <= 1e-3 * dq_near.float().norm()
    into = wide[3].fill_(float("nan")), torch.empty(1, heads, rows, device="cuda")
    assert torch.equal(block_forward(*wide[:3], Mask(causal=True), into=into, backend=backend)[0], expected)


def test_forward_memory_is_out_and_lse() -> None:
    q, k, v = (torch.randn(1, 65536, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q[:, :256], k[:, :256], v[:, :256], Mask(causal=True))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, Mask(causal=True))
    torch.cuda.synchronize()
    lse = 65536 * 16 * 4
    assert torch.cuda.max_memory_allocated() - before - out.nbytes <= lse + 64 * 2**20


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])  # with dropout `auto` chooses triton
def test_no_call_synchronises_with_the_device(backend: str, dropout: float) -> None:
    q, k, v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(2, device="cuda", requires_grad=True)

    def step() -> None:
        documents = torch.zeros(2, 300, dtype=torch.int64)  # on the CPU, as from a data loader
        documents[:, 100:] = 1
        for mask in (Mask(causal=True, documents=documents, window=50), Mask(causal=True, prefix=torch.tensor([3, 50]))):
            out = attention(q, k, v, mask, sinks=sinks, dropout=dropout, softcap=20.0, backend=backend)
            out.sum().backward()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert q.grad is not None


def test_sinks_and_carry_in_bf16() -> None:
    """One call with a sink equals several blocks that start with the sink as the carry."""
    q, k, v = (torch.randn(1, 1000, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.randn(4, device="cuda")
    expected, expected_lse = attention(q, k, v, Mask(causal=True), sinks=sinks, return_lse=True)
    carry = None, sinks[None, :, None].expand(1, 4, 1000)
    for a in range(0, 1000, 250):
        at = one_segment(1000), [(a, 1, 250)]
        carry = block_forward(q, k[:, a : a + 250], v[:, a : a + 250], Mask(causal=True), *at, carry=carry, last=a == 750)
    torch.testing.assert_close(carry[1], expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(carry[0], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_cuda_graph_can_be_replayed(backend: str) -> None:
    """Forward and backward, several times with other inputs: a launch's scratch memory belongs to the graph."""
    q, k, v, dout = (torch.randn(1, 3000, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4))

    def run() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, Mask(causal=True), backend=backend)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_results = run()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.normal_()
        graph.replay()
        for name, result, expected in zip(("out", "dq", "dk", "dv"), graph_results, run(), strict=True):
            error = (result.float() - expected.float()).norm()  # not 0, because hopper accumulates dq in any order
            assert error <= 1e-3 * expected.float().norm(), name


@pytest.mark.hopper
def test_torch_compile_with_cuda_graphs() -> None:
    """Cached memory must not come from the memory pool of a graph."""
    q, k, v = (torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plain = partial(attention, mask=Mask(causal=True), backend="hopper")
    compiled = torch.compile(lambda q, k, v: plain(q, k, v) * 2, mode="reduce-overhead")
    for _ in range(4):
        q.normal_()
        assert torch.equal(compiled(q, k, v), plain(q, k, v) * 2)


@pytest.mark.hopper
def test_the_alignment_of_into_is_checked_in_every_call() -> None:
    """A replay needs memory at a multiple of 16 bytes; memory at another address is rejected, also after a valid call."""
    q, k, v = (torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    memory, lse = torch.empty(q.numel() + 8, device="cuda", dtype=q.dtype), torch.empty(1, 4, 1000, device="cuda")
    for begin, is_aligned in ((0, True), (8, True), (1, False)):
        into = memory[begin : begin + q.numel()].view(q.shape), lse
        with nullcontext() if is_aligned else pytest.raises(ValueError, match="into"):
            block_forward(q, k, v, Mask(causal=True), into=into, backend="hopper")
