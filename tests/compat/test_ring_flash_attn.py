"""ringspan.compat.ring_flash_attn against dense attention in fp64 on 1 to 4 ranks, and what it refuses."""

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

from ringspan.compat import ring_flash_attn
from tests.compat import ring_jobs
from tests.compat.ring_jobs import CompatCase
from tests.compat.signatures import RING_FLASH_ATTN, RING_OPTIONS, recorded, signature
from tests.parallel.helpers.pool import Failed

EXACT = 1e-10
FULL = (("causal", False),)
WINDOW = (("causal", True), ("window_size", (17, 0)), ("softmax_scale", 0.3))
TWO_SIDED = (("window_size", (9, 4)), ("deterministic", True))
SIXTHS = (24, 0, 72, 48)  # each document is a multiple of 2P for P = 1 to 4
UNEVEN = (25, 1, 0, 70, 13, 3)
CASES = [
    # the shapes of ring-flash-attn's own tests, an eighth as long: 5 heads, 3824 tokens, documents of 128, 1120 and 2992
    CompatCase("ring_flash_attn", (480,), heads=(5, 5)),
    CompatCase("zigzag_ring_flash_attn", (480,), heads=(5, 5)),
    CompatCase("stripe_flash_attn", (480,), heads=(5, 5)),
    CompatCase("zigzag_ring_flash_attn_varlen", (24, 144, 360), heads=(5, 5)),
    CompatCase("ring_flash_attn_varlen", (24, 144, 360), heads=(5, 5)),
    CompatCase("llama3_flash_attn_varlen", (15, 141, 372), heads=(5, 5), width=8),
    # options
    *(CompatCase(f"{kind}_flash_attn", (96,), o) for kind in ("ring", "zigzag_ring", "stripe") for o in (FULL, WINDOW)),
    *(CompatCase(f"{kind}_flash_attn_varlen", SIXTHS, o) for kind in ("ring", "zigzag_ring") for o in (FULL, WINDOW)),
    CompatCase("zigzag_ring_flash_attn_varlen", SIXTHS, TWO_SIDED),
    CompatCase("llama3_flash_attn_varlen", (23, 1, 0, 71, 49), WINDOW),
    CompatCase("llama3_flash_attn_varlen", (23, 1, 0, 71, 49), FULL),
    CompatCase("llama3_flash_attn_varlen", (144,), TWO_SIDED),
    # documents of lengths that ring-flash-attn refuses: the boundaries of whole documents are passed
    *(CompatCase(f"{kind}_flash_attn_varlen", UNEVEN, whole=True) for kind in ("ring", "zigzag_ring")),
    *(CompatCase(f"{kind}_flash_attn_varlen", UNEVEN, WINDOW, whole=True) for kind in ("ring", "zigzag_ring")),
    CompatCase("zigzag_ring_flash_attn_varlen", (5,), FULL, whole=True),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_function_equals_dense_attention(ranks: int, pools) -> None:
    """out, lse and gradients, for q, k, v and for the forms with stacked tensors."""
    for rank, errors in enumerate(pools(ranks)(ring_jobs.errors, CASES)):
        assert len(errors) == 2 * len(CASES) + 6
        wrong = {name: error for name, error in errors.items() if not error <= EXACT}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("name", RING_FLASH_ATTN)
def test_signatures_are_ring_flash_attns(name: str) -> None:
    assert signature(getattr(ring_flash_attn, name)) == recorded(RING_FLASH_ATTN, RING_OPTIONS)[name]


def test_all_public_functions_have_a_recorded_signature() -> None:
    assert set(ring_flash_attn.__all__) - {"install"} == set(RING_FLASH_ATTN)


def test_launches_do_not_depend_on_the_number_of_documents(pools) -> None:
    """One all-to-all each way, forward and backward, and the kernels of a ring: for 5 and for 200 documents of 1200 tokens."""
    few, many = (pools(3)(ring_jobs.count_launches, n) for n in (5, 200))
    assert [all_to_alls for all_to_alls, _ in many] == [4, 4, 4]
    assert few == many and all(kernels > 2 for _, kernels in many), (few, many)


def test_dropout_draws_one_pattern_for_all_ranks(pools) -> None:
    """A generator of each rank's own would drop other weights of the same row."""
    kept = torch.cat(pools(2)(ring_jobs.dropout_pattern)) != 0
    assert abs(float(kept.double().mean()) - 0.5) < 0.05
    assert len({tuple(row) for row in kept.tolist()}) == 64  # no row repeats another's pattern


PREPARED = {  # (boundaries, causal, rank, world size): what ring-flash-attn 0.1.8 returns
    ((0, 120, 1248, 4232), True, 0, 4): ([0, 120, 1058], [0, 120, 1058], 938, 938, slice(0, 1058)),
    ((0, 120, 1248, 4232), True, 1, 4): ([0, 190, 1058], [0, 1128, 1996], 868, 1128, slice(120, 2116)),
    ((0, 120, 1248, 4232), True, 3, 4): ([0, 1058], [0, 2984], 1058, 2984, slice(1248, 4232)),
    ((0, 120, 1248, 4232), False, 0, 4): ([0, 120, 1058], [0, 120, 1248], 938, 1128, slice(0, 1248)),
    ((0, 120, 1248, 4232), False, 2, 4): ([0, 1058], [0, 2984], 1058, 2984, slice(1248, 4232)),
    ((0, 4, 4, 8, 12), True, 1, 3): ([0, 0, 4], [0, 0, 4], 4, 4, slice(4, 8)),
    ((0, 4, 4, 8, 12), False, 2, 3): ([0, 4], [0, 4], 4, 4, slice(8, 12)),
    ((0, 16), True, 1, 2): ([0, 8], [0, 16], 8, 16, slice(0, 16)),
}


@pytest.mark.parametrize("arguments", PREPARED, ids=str)
def test_prepare_returns_ring_flash_attns_values(arguments: tuple[Any, ...]) -> None:
    cu_seqlens, *others = arguments
    q, k, *rest = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu_seqlens, dtype=torch.int32), *others)
    assert (q.tolist(), k.tolist(), *rest) == PREPARED[arguments]
    assert q.dtype == k.dtype == torch.int32
    assert torch.arange(4232)[rest[2]].shape == (rest[2].stop - rest[2].start,)


ZIGZAG, LLAMA3 = "zigzag_ring_flash_attn_varlen_func", "llama3_flash_attn_varlen_func"


@pytest.mark.parametrize(
    ("name", "rank", "change", "message"),
    [
        ("zigzag_ring_flash_attn_func", -1, dict(q=torch.randn(1, 7, 2, 16)), "q has 7 tokens: a zigzag shard is two chunks"),
        ("zigzag_ring_flash_attn_func", 1, dict(alibi_slopes=torch.ones(2)), "alibi_slopes: not supported"),
        ("ring_flash_attn_func", -1, dict(q=torch.randn(8, 2, 16)), "q=(8, 2, 16): it must be (B, n, heads, head dim)"),
        (ZIGZAG, -1, dict(cu_seqlens=torch.tensor([0, 3, 8])), "document 0 has 3 tokens in this shard, and a zigzag shard"),
        (ZIGZAG, -1, dict(cu_seqlens=torch.tensor([0, 20])), "q has 8 tokens, and rank"),
        (ZIGZAG, 1, dict(cu_seqlens=torch.tensor([0, 9])), "q has 8 tokens, and rank 1 of 2 has 6 of these whole documents"),
        (ZIGZAG, 1, dict(cu_seqlens=torch.tensor([0, 4, 8])), "cu_seqlens of whole documents must be the same on every rank"),
        (ZIGZAG, -1, dict(cu_seqlens=[1, 8]), "cu_seqlens=[1, 8]: boundaries must begin with 0"),
        (ZIGZAG, 1, dict(k=torch.randn(6, 2, 16)), "q, k and v have 8, 6 and 8 tokens"),
        (ZIGZAG, 1, dict(cu_seqlens=None), "cu_seqlens=None must be an int32 tensor"),
        (ZIGZAG, -1, dict(cu_seqlens=torch.tensor([0.0, 8.0])), "cu_seqlens has shape (2,) and is torch.float32"),
        (ZIGZAG, -1, dict(cu_seqlens=torch.tensor([[0, 8]])), "cu_seqlens has shape (1, 2)"),
        ("zigzag_ring_flash_attn_func", -1, dict(v=None), "v=None: it must be (B, n, heads, head dim)"),
        (LLAMA3, -1, dict(local_k_slice=slice(0, 16)), "local_k_slice=slice(0, 16, None) does not carry the boundaries"),
        (LLAMA3, -1, dict(causal=False), "local_k_slice was prepared with causal=True, and this call has causal=False"),
        (LLAMA3, -1, dict(q=torch.randn(6, 2, 16)), "q has 6 tokens, local_k_slice is of shards of 8"),
        (LLAMA3, 0, dict(dropout_p=0.1, return_attn_probs=True), "return_attn_probs=True with dropout_p=0.1"),
    ],
)
def test_an_error_of_one_rank_reaches_all(name: str, rank: int, change: dict[str, Any], message: str, checking_ranks) -> None:
    with pytest.raises(Failed) as failed:
        checking_ranks(ring_jobs.call_wrong, name, rank, change)
    assert all("ValueError" in error and message in error for error in failed.value.errors), failed.value


def test_prepare_refuses_what_no_rank_can_shard() -> None:
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    with pytest.raises(ValueError, match="ends with 15 tokens, no multiple of world_size=2: pad"):
        prepare(torch.tensor([0, 3, 15], dtype=torch.int32), True, 0, 2)
    for numbers in ([0, 5, 4], [0]):
        with pytest.raises(ValueError, match="must begin with 0, not decrease"):
            prepare(torch.tensor(numbers, dtype=torch.int32), True, 0, 2)
    for rank, size in ((9, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank}, world_size={size}: ranks are counted from 0"):
            prepare(torch.tensor([0, 4], dtype=torch.int32), True, rank, size)
    with pytest.raises(ValueError, match=r"cu_seqlens=\[0, 4\] must be an int32 tensor"):
        prepare([0, 4], True, 0, 2)


def test_install_lets_other_packages_import_the_functions() -> None:
    with mock.patch.dict(sys.modules):  # other tests look for the package itself
        for name in ("ring_flash_attn", "ring_flash_attn.adapters", "ring_flash_attn.adapters.hf_adapter"):
            sys.modules.pop(name, None)
        ring_flash_attn.install()
        ring_flash_attn.install()
        found: dict[str, Any] = {}
        exec("import ring_flash_attn.adapters.hf_adapter\nfrom ring_flash_attn import zigzag_ring_flash_attn_func as f", found)
        assert found["f"] is ring_flash_attn.zigzag_ring_flash_attn_func
        assert found["ring_flash_attn"].adapters.hf_adapter.DATA_PARAMS == {}
        sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn")
        with pytest.raises(ValueError, match=r"ring_flash_attn=.* has been imported already: call install\(\) before"):
            ring_flash_attn.install()
