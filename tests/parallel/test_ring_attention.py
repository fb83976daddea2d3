"""`ring_attention` as an operator: validation, transfers, compile, checkpointing, bit equality and accuracy."""

import functools
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch

from ringspan import Layout, Mask, ring_attention
from ringspan.parallel import ring_attention as ring_attention_module
from tests.conftest import HAS_GPU
from tests.parallel.helpers import jobs
from tests.parallel.helpers.work import RingCase

CAUSAL = dict(causal=True)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layout=Layout("zigzag", 10, 1)), "q has 9 tokens, but a shard of .* has 10: cut the sequence with layout.shard"),
        (dict(layout=Layout("zigzag", 18, 2)), "layout has ranks=2, the group has 1"),
        (dict(layout=Layout("zigzag", 18, 2, 2)), "layout has ulysses=2: call context_attention"),
        (dict(layout="zigzag"), "layout must be a ringspan.Layout, not str"),
        (dict(mask=torch.ones(9, 9)), "mask must be a ringspan.Mask or None, not Tensor"),
        (dict(mask=Mask(documents=[0] * 8)), "documents describe 8 .*natural order"),
        (dict(mask=Mask(documents=torch.zeros(3, 9, dtype=torch.int64))), "documents .*batch.* 3"),
        (dict(dropout=0.5), "dropout=0.5 .*needs a seed"),
        (dict(transport="pigeon"), "transport='pigeon': choose one of"),
        (dict(backend="abacus"), "backend='abacus': choose one of"),
        (dict(sinks=torch.zeros(3)), "sinks"),
        (dict(q=[0.0]), "q must be a tensor, not list"),
        (dict(k=torch.zeros(1, 9, 2, 16, device="meta")), "k is on meta"),
        (dict(k=torch.zeros(1, 8, 2, 16)), r"k \(1, 8, 2, 16\) .*same length"),
        (dict(k=torch.zeros(1, 9, 2, 16, dtype=torch.float64)), "k is torch.float64"),
    ],
)
def test_errors_name_the_argument_and_a_remedy(options: dict, message: str) -> None:
    q = torch.randn(1, 9, 2, 16)
    arguments = dict(q=q, k=q, v=q, layout=Layout("zigzag", 9, 1)) | options
    with pytest.raises(ValueError, match=message):
        ring_attention(**arguments)


def test_files_that_q_visits() -> None:
    """Between `ring_attention` and the backend: the files whose functions get q, as the docstring of `ring_attention` lists."""
    q, files = torch.randn(1, 9, 2, 16), dict[str, None]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "block_forward" and path.parent.name == "backends":
            sys.setprofile(None)
        elif event == "call" and "site-packages" not in path.parts and path.suffix == ".py" and path != Path(__file__):
            values = [y for x in frame.f_locals.values() for y in (x if isinstance(x, tuple) else (x,))]
            if any(x is q for x in values):
                files.setdefault(path.name)

    sys.setprofile(profile)
    try:
        ring_attention(q, torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16), layout=Layout("zigzag", 9, 1), backend="chunked")
    finally:
        sys.setprofile(None)
    assert next(iter(files)) == "ring_attention.py"
    between = list(files)[1:]
    assert len(between) <= 7, between
    listed = re.findall(r"\w+\.py", (ring_attention_module.__doc__ or "").partition("q passes through")[2])
    assert between == listed


def test_a_ring_is_chosen_by_whether_a_backward_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    has_backward: list[bool] = []
    choose_ring = ring_attention_module.choose_ring
    monkeypatch.setattr(ring_attention_module, "choose_ring", lambda *args: has_backward.append(args[-1]) or choose_ring(*args))
    call = functools.partial(ring_attention, layout=Layout("zigzag", 9, 1))
    with torch.no_grad():
        call(q, k, v)
    call(q.detach(), k.detach(), v.detach())
    assert has_backward == [False, False]
    torch.autograd.grad(call(q.detach(), k, v.detach()).sum(), k)
    assert has_backward == [False, False, True, True]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_number_of_transfers(kind: str, ranks: int, pools) -> None:
    """P − 1 blocks in a forward and none in a recomputation; P − 1 blocks and as many gradients in a backward."""
    case = RingCase("transfers", kind=kind, ring=ranks, length=32, options={})
    for counts in pools(ranks)(jobs.count_transfers, case):
        assert counts["forward"] == counts["forward, checkpointed"] == (ranks - 1, 0)
        assert counts["backward"] == counts["backward, checkpointed"] == (ranks - 1, ranks - 1)


def test_a_window_transfers_from_neighbour_ranks_only(pools) -> None:
    case = RingCase("transfers", kind="contiguous", ring=4, length=32, mask=dict(causal=True, window=5))
    counts = pools(4)(jobs.count_transfers, case)
    assert [c["forward"] for c in counts] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert [c["backward"] for c in counts] == [(0, 1), (1, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("mask", [CAUSAL, dict(causal=True, documents=[0] * 10 + [1] * 11)], ids=["causal", "documents"])
def test_compiles_as_one_graph(ring: int, ulysses: int, mask: dict, pools) -> None:
    case = RingCase("compiled", ring=ring, ulysses=ulysses, length=21, mask=mask, options=dict(dropout=0.2, seed=3))
    for errors in pools(ring * ulysses)(jobs.compare_compiled, case):
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
def test_interleaved_backwards_use_their_own_buffers(transport: str, pools) -> None:
    case = RingCase("interleaved", ring=4, length=37, mask=CAUSAL, transport=transport)
    for errors in pools(4)(jobs.compare_interleaved_backwards, case):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("ring, ulysses", [(4, 1), (2, 2)])
def test_five_runs_are_bit_equal(ring: int, ulysses: int, pools) -> None:
    options = dict(deterministic=True, dropout=0.1, seed=1)
    case = RingCase("bits", ring=ring, ulysses=ulysses, mask=CAUSAL, dtype=torch.bfloat16, backend="chunked", options=options)
    assert pools(4)(jobs.five_runs_are_bit_equal, case) == [True] * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bf16_is_as_accurate_as_one_call(ranks: int, pools) -> None:
    """RMS error of the ring ≤ 1.05 × that of one call."""
    case = RingCase("rms", ring=ranks, length=512, heads=(2, 1), widths=(32, 32), mask=CAUSAL)
    for errors in pools(ranks)(jobs.rms_errors, replace(case, dtype=torch.bfloat16, backend="chunked")):
        for name, (ring_error, single_error) in errors.items():
            assert 0 < ring_error <= 1.05 * single_error, f"{name}: {ring_error:.3e} on {ranks} ranks, one: {single_error:.3e}"


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
def test_triton_kernels_accept_transferred_blocks(transport: str, pools) -> None:
    """Packed K/V, slices of rows and heads, dk and dv written into send buffers. Interpreted if there is no GPU."""
    case = RingCase("triton", ring=3, length=29, heads=(4, 2), mask=CAUSAL, transport=transport, part_bytes=0)
    for errors in pools(3)(jobs.compare_relative, replace(case, dtype=torch.float32, backend="triton"), patience=300):
        assert max(errors.values()) <= 2e-6, errors


HOPPER = RingCase("hopper", length=300, heads=(4, 2), widths=(64, 64), mask=CAUSAL, dtype=torch.bfloat16, backend="hopper")


@pytest.mark.skipif(HAS_GPU, reason="GPUs run the kernels themselves: test_gpu.py")
@pytest.mark.parametrize(
    "case, ring, ulysses, transport",
    [
        (HOPPER, 4, 1, "copy"),
        (replace(HOPPER, heads=(2, 2), widths=(128, 128), part_bytes=0), 2, 1, "copy"),
        (replace(HOPPER, kind="contiguous", mask=dict(causal=True, window=90), sinks=True), 3, 1, "p2p"),
        (
            replace(HOPPER, heads=(4, 1), mask=dict(causal=True, documents=[0] * 100 + [-1] * 30 + [1] * 170)),
            3,
            1,
            "all_gather",
        ),
        (replace(HOPPER, kind="striped", widths=(128, 64), options=dict(softcap=4.0)), 2, 1, "copy_all"),
        (replace(HOPPER, mask={}), 2, 2, "p2p"),
        (replace(HOPPER, widths=(96, 96)), 3, 1, "copy"),
        (replace(HOPPER, heads=(2, 1), widths=(192, 128)), 2, 1, "copy"),
    ],
    ids=["copy", "parts", "window", "documents", "striped", "ulysses", "head dim 96", "head dims 192 and 128"],
)
def test_hopper_kernels_are_as_accurate_in_a_ring(case: RingCase, ring: int, ulysses: int, transport: str, pools) -> None:
    """Their source in the emulator: RMS error in bf16 ≤ 1.05 × that of one call."""
    case = replace(case, ring=ring, ulysses=ulysses, transport=transport)
    for errors in pools(ring * ulysses)(jobs.run_on_emulated_hopper, jobs.rms_errors, case):
        for name, (ring_error, single_error) in errors.items():
            assert 0 < ring_error <= 1.05 * single_error, f"{name}: {ring_error:.3e}, in one call {single_error:.3e}"


@pytest.mark.skipif(HAS_GPU, reason="GPUs run the kernels themselves: test_gpu.py")
def test_a_deterministic_ring_of_hopper_kernels_is_bit_equal(pools) -> None:
    case = replace(HOPPER, ring=2, transport="copy", options=dict(deterministic=True))
    assert pools(2)(jobs.run_on_emulated_hopper, jobs.five_runs_are_bit_equal, case) == [True] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sequence_without_tokens(ranks: int, pools) -> None:
    for errors in pools(ranks)(jobs.compare, RingCase("empty", ring=ranks, length=0, mask=CAUSAL)):
        assert max(errors.values()) == 0


@pytest.mark.parametrize(
    "mask, visible", [(CAUSAL, 1), (dict(causal=True, documents=[0] * 7 + [1] * 9), 2)], ids=["causal", "documents"]
)
def test_layers_with_one_mask_share_plans(mask: dict, visible: int, pools) -> None:
    """Visible rows are computed once, with documents also once without them; forward and backward have one plan."""
    assert pools(4)(jobs.count_planning, mask) == [(visible, 1)] * 4
