"""The ring on GPUs over NCCL and over copy engines, on 2 and 4 of one host: what gloo cannot show.

pytest tests/parallel            # on a host with 4 GPUs this is the whole check; fewer GPUs skip what needs more

Copy engines need no NCCL, which wants a GPU for each rank: where there are too few, ranks share them in short tests of these.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringspan.parallel import ring
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.transport.select import COPIED
from tests.parallel import jobs, work
from tests.parallel.pool import Failed, Pool
from tests.parallel.work import RingCase

pytestmark = pytest.mark.gpu
TRANSPORTS = ["p2p", "all_gather", "copy", "copy_all"]
CAUSAL = dict(causal=True)
DOCUMENTS = dict(causal=True, documents=[0] * 700 + [1] * 1000 + [-1] * 48 + [2] * 2300)
BF16 = RingCase(
    "bf16", length=4048, heads=(8, 2), widths=(64, 64), dtype=torch.bfloat16, backend="auto", device="cuda", mask=CAUSAL
)
FP32 = replace(BF16, name="fp32", length=1037, dtype=torch.float32, long=ring.LONG)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Callable[..., Pool]]:
    started: dict[int, Pool] = {}

    def pool(size: int, transport: str = "") -> Pool:
        """With a transport ranks may share GPUs, if it can."""
        few = torch.cuda.device_count() < size
        if few and (transport not in COPIED or torch.cuda.device_count() == 1):  # a GPU alone sees nobody's memory
            pytest.skip(f"needs {size} GPUs, here are {torch.cuda.device_count()}")
        if size not in started:
            allowed = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if few else {}
            started[size] = Pool(size, "gloo" if few else "nccl", 120, allowed, on_gpus=True)
        return started[size]

    yield pool
    for each in started.values():
        each.close()


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "case",
    [
        BF16,
        replace(BF16, name="mha", heads=(8, 8), widths=(128, 128)),
        replace(BF16, name="contiguous", kind="contiguous"),
        replace(BF16, name="striped", kind="striped"),
        replace(BF16, name="full", mask={}),
        replace(BF16, name="window", mask=dict(causal=True, window=300)),
        replace(BF16, name="documents", mask=DOCUMENTS),
        replace(BF16, name="mqa", heads=(8, 1)),
        replace(BF16, name="parts", heads=(8, 8), part_bytes=0),
        replace(BF16, name="parts-documents", heads=(8, 8), part_bytes=0, mask=DOCUMENTS),
    ],
    ids=lambda case: case.name,
)
def test_bf16_loses_nothing(case: RingCase, transport: str, ring: int, ulysses: int, gpus) -> None:
    """RMS error of out, dq, dk, dv ≤ 1.05 × the single GPU's (DESIGN: the ring rule)."""
    if case.kind == "striped" and ulysses > 1:
        pytest.skip("striped has no Ulysses")
    case = replace(case, ring=ring, ulysses=ulysses, transport=transport)
    for found in gpus(ring * ulysses, transport)(jobs.rms_against_one, case, patience=600):
        for name, (many, one) in found.items():
            assert 0 < many <= 1.05 * one, f"{name}: {many:.3e}, single GPU {one:.3e}"


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "case",
    [
        replace(FP32, name="dropout", options=dict(dropout=0.3, seed=2**40 + 1)),
        replace(FP32, name="everything", options=dict(dropout=0.2, seed=3, softcap=20.0), sinks=True, batch=2),
        replace(FP32, name="mqa", heads=(8, 1), mask=dict(causal=True, window=200)),
        replace(FP32, name="prefix", mask=dict(causal=True, prefix=400)),
        replace(FP32, name="short", length=3),
    ],
    ids=lambda case: case.name,
)
def test_equals_a_single_gpu(case: RingCase, transport: str, ring: int, ulysses: int, gpus) -> None:
    """In fp32 a different dropout pattern, or one row in the wrong place, would be a difference of about 1."""
    case = replace(case, ring=ring, ulysses=ulysses, transport=transport)
    for errors in gpus(ring * ulysses, transport)(jobs.gpu_compare, case, patience=600):
        assert max(errors.values()) <= 5e-5, errors


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_five_runs_are_bit_equal(transport: str, ranks: int, gpus) -> None:
    case = replace(BF16, ring=ranks, transport=transport, options=dict(deterministic=True))
    assert gpus(ranks, transport)(jobs.bit_equal, case, patience=600) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case, allowed", [(FP32, 1e-4), (BF16, 0.05)], ids=["fp32", "bf16"])
def test_two_backwards_in_a_row(case: RingCase, allowed: float, transport: str, ranks: int, gpus) -> None:
    for errors in gpus(ranks, transport)(jobs.two_backwards, replace(case, ring=ranks, transport=transport), patience=600):
        assert max(errors.values()) <= allowed, errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_compiles_as_one_graph(ranks: int, gpus) -> None:
    for errors in gpus(ranks)(jobs.compiled, replace(BF16, ring=ranks, transport="p2p"), patience=600):
        assert max(errors.values()) <= 0.05, errors


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["p2p", "copy"])
def test_peak_memory(transport: str, ranks: int, gpus) -> None:
    for found, promised in gpus(ranks)(functools.partial(jobs.peak_memory, 131072, transport), patience=600):
        for name in found:
            assert found[name] <= promised[name] + 64 * 2**20, (found, promised)


@pytest.mark.parametrize("transport", ["p2p", "copy"])
def test_a_stalled_rank_ends_the_others(transport: str) -> None:
    """Within the time limit, by an error or by the end of the process; nothing hangs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pool = Pool(2, "nccl", timeout=8, on_gpus=True)
    begun = time.monotonic()
    try:
        with pytest.raises(Failed) as failed:
            pool(functools.partial(jobs.stall_on_gpu, transport), patience=120)
    finally:
        pool.close()
    assert failed.value.errors[0] is not None
    assert time.monotonic() - begun < 100


@pytest.mark.parametrize("ranks", [2, 4])
def test_documents_that_are_given_on_the_gpu(ranks: int, gpus) -> None:
    """They mask all the same; only the plan cannot use them."""
    case = replace(FP32, ring=ranks, mask=dict(causal=True, documents=[0] * 300 + [1] * 737))
    for errors in gpus(ranks)(work.compare_on_device, case, patience=600):
        assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("transport", ["p2p", "copy"])
def test_transfers_run_beside_kernels(transport: str, tmp_path: Path, gpus) -> None:
    pytest.importorskip("matplotlib")
    where = str(tmp_path / "ring.png")
    for counts, hidden in gpus(2)(jobs.traced, where, Setting(16384, 16, 16, 128), f"ring-zigzag-{transport}", "cuda"):
        assert all(its["compute"] and its["transfer"] for its in counts)
        assert hidden >= 0.5, f"{hidden:.0%} of the time of transfers is beside a kernel"
