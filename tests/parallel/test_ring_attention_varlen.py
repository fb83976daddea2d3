"""`ring_attention_varlen` against dense attention of each document, on 1 to 4 ranks; transfers, compilation and errors."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from ringspan import Layout, ring_attention_varlen
from tests.parallel.helpers import varlen_jobs
from tests.parallel.helpers.pool import Failed, Pool
from tests.parallel.helpers.varlen_jobs import PackedCase

EXACT = 1e-12
EVERYTHING = (("window", 11), ("softcap", 3.0), ("dropout", 0.3), ("scale", 0.3))
CASES = [
    PackedCase((5, 1, 17, 14)),
    PackedCase((12, 13, 12), options=(("causal", False),), transport="all_gather"),
    PackedCase((0, 0, 37, 0), options=EVERYTHING, sinks=True),
    PackedCase((1,) * 37, heads=(2, 2)),
    PackedCase((9, 0, 1, 1, 26), options=EVERYTHING, sinks=True, heads=(4, 1), as_tensor=True),
    PackedCase((3, 30, 8), options=(("window", (4, 9)), ("causal", False)), transport="all_gather", as_tensor=True),
    PackedCase((1,), sinks=True),
    PackedCase((0, 2, 1), options=EVERYTHING),
    PackedCase((0, 0)),
    PackedCase((64, 1, 64), options=(("window", 5),), sinks=True, backend="chunked"),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_equals_dense_attention_of_each_document(kind: str, ranks: int, pools) -> None:
    """out, lse and all gradients. Lengths that no number of ranks divides, documents across shards, of length 0 and 1."""
    cases = [replace(case, kind=kind) for case in CASES]
    for errors in pools(ranks)(varlen_jobs.compare_packed, cases):
        for case, gaps in errors.items():
            assert max(gaps.values()) <= EXACT, f"{case}: {gaps}"


def test_without_torch_distributed() -> None:
    x = torch.randn(9, 2, 16)
    out = ring_attention_varlen(x, x, x, [0, 4, 9], layout=Layout("zigzag", 9, 1))
    assert out.shape == (9, 2, 16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_group_may_be_a_device_mesh(ranks: int, pools) -> None:
    for errors in pools(ranks)(varlen_jobs.compare_groups):
        assert max(errors) <= EXACT, errors


@pytest.mark.parametrize("as_tensor", [False, True])
def test_compiles_as_one_graph(as_tensor: bool, pools) -> None:
    assert max(pools(2)(varlen_jobs.compare_compiled, as_tensor)) <= 1e-6


def test_blocks_without_visible_keys_are_not_sent(pools) -> None:
    """One document per shard, then one that crosses the border of the first two."""
    assert pools(4)(varlen_jobs.count_received, (16, 16, 16, 16)) == [0, 0, 0, 0]
    assert pools(4)(varlen_jobs.count_received, (8, 16, 8, 16, 16)) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens=[1, 16]), "cu_seqlens=[1, 16]: the first boundary must be 0"),
        (dict(cu_seqlens=[0, 5, 4, 16]), "cu_seqlens[2]=4 is below cu_seqlens[1]=5"),
        (dict(cu_seqlens=[0, 5]), "cu_seqlens=[0, 5]: the last boundary must be 16, the number of tokens"),
        (dict(cu_seqlens=torch.tensor([0, 16])), "cu_seqlens is torch.int64; int32 works"),
        (dict(cu_seqlens=[0, 3, 16]), "documents must be the same on every rank"),
        (dict(window=3), "mask must be the same on every rank"),
        (dict(layout=None), "layout must be a ringspan.Layout, not NoneType"),
        (dict(dropout=0.1), "needs a seed, the same on each"),
    ],
)
def test_an_error_of_one_rank_reaches_all(change: dict, message: str, four_checking_ranks) -> None:
    with pytest.raises(Failed) as failed:
        four_checking_ranks(partial(varlen_jobs.call_packed, 2, **change))
    assert all("ValueError" in error and message in error for error in failed.value.errors), failed.value


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["p2p", "copy"])
@pytest.mark.parametrize("on_device", [False, True])
def test_two_gpus_are_as_accurate_as_one(transport: str, on_device: bool) -> None:
    """RMS error of out, dq, dk, dv in bf16 ≤ 1.05 × that of one GPU, with boundaries on the host and on the GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pool = Pool(2, "nccl", 120, on_gpus=True)
    try:
        for errors in pool(varlen_jobs.rms_errors, transport, on_device, patience=300):
            for name, (ring_error, single_error) in errors.items():
                assert 0 < ring_error <= 1.05 * single_error, f"{name}: {ring_error:.3e}, one GPU {single_error:.3e}"
    finally:
        pool.close()
