"""ringspan.compat.flash_attn: flash_attn's signatures, and results of dense attention in fp64."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.compat import flash_attn
from tests.compat.signatures import FLASH_ATTN, FLASH_OPTIONS, recorded, signature
from tests.kernels.helpers.dense import boundaries, dense_varlen

LENGTHS, KEY_LENGTHS = (5, 0, 31, 1), (9, 3, 31, 1)
CASES: list[dict[str, Any]] = [
    {},
    dict(causal=True),
    dict(causal=True, window_size=(7, 0), softmax_scale=0.3),
    dict(window_size=(4, 2), softcap=3.0),
    dict(window_size=(-1, 0)),
    dict(window_size=(-1, 3), deterministic=True),
]


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def truth(q: Tensor, k: Tensor, v: Tensor, lengths: Any, key_lengths: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    left, right = options.get("window_size", (-1, -1))
    window = (10**6 if left < 0 else left, 10**6 if right < 0 else right)
    others = dict(softcap=options.get("softcap", 0.0), scale=options.get("softmax_scale"))
    return dense_varlen(q, k, v, lengths, key_lengths, None, causal=options.get("causal", False), window=window, **others)


def assert_equal(result: Any, expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """out, lse and all gradients."""
    out, lse, third = result
    assert third is None
    dout, dlse = torch.randn_like(expected[0]), torch.randn_like(expected[1])
    for mine, reference in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)
    finite = torch.isfinite(expected[1])
    gradients = [
        torch.autograd.grad((o, torch.where(finite, s, 0.0)), leaves, (dout, dlse), retain_graph=True)
        for o, s in ((out, lse), expected)
    ]
    for mine, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_signatures_are_flash_attns(name: str) -> None:
    assert signature(getattr(flash_attn, name)) == recorded(FLASH_ATTN, FLASH_OPTIONS)[name]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_packed_documents_equal_dense_attention(options: dict[str, Any]) -> None:
    """Queries align with the last keys of their document; documents of other key lengths, without queries, of one token."""
    q, k, v = make(37, 4, 16), make(44, 2, 16), make(44, 2, 16)
    cu_q, cu_k = (torch.tensor(boundaries(x), dtype=torch.int32) for x in (LENGTHS, KEY_LENGTHS))
    result = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 31, 31, return_attn_probs=True, **options)
    assert_equal(result, truth(q, k, v, LENGTHS, KEY_LENGTHS, options), [q, k, v])
    kv = torch.stack([k, v], 1)
    result = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 31, 31, return_attn_probs=True, **options)
    assert_equal(result, truth(q, k, v, LENGTHS, KEY_LENGTHS, options), [q, k, v])


@pytest.mark.parametrize("options", CASES, ids=str)
def test_batches_equal_dense_attention(options: dict[str, Any]) -> None:
    """Fewer queries than keys, and the layouts with stacked tensors."""
    q, kv = make(1, 20, 4, 16), make(1, 29, 2, 2, 16)
    k, v = kv.unbind(2)
    expected = truth(q[0], k[0], v[0], (20,), (29,), options)
    expected = expected[0][None], expected[1][None]
    assert_equal(flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options), expected, [q, kv])
    assert_equal(flash_attn.flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options), expected, [q, kv])


@pytest.mark.parametrize("width", [8, 24])
def test_stacked_queries_keys_and_values(width: int) -> None:
    """qkv as a batch and packed, also of a head dim that Ringspan's kernels do not have."""
    qkv = make(24, 3, 5, width)
    expected = truth(*qkv.unbind(1), (10, 14), (10, 14), dict(causal=True))
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    result = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 14, causal=True, return_attn_probs=True)
    assert_equal(result, expected, [qkv])
    expected = truth(*qkv.unbind(1), (24,), (24,), {})
    result = flash_attn.flash_attn_qkvpacked_func(qkv[None], return_attn_probs=True)
    assert_equal((result[0][0], result[1][0], result[2]), expected, [qkv])
    assert flash_attn.flash_attn_qkvpacked_func(qkv[None]).shape == (1, 24, 5, width)


def test_dropout_drops_the_share_that_is_asked_for() -> None:
    q = torch.zeros(1, 256, 1, 16)
    v = torch.ones(1, 256, 1, 16)
    kept = flash_attn.flash_attn_func(q, q, v, dropout_p=0.25).mean()
    assert abs(float(kept) - 1) < 0.02
    assert float(flash_attn.flash_attn_func(q, q, v, dropout_p=0.25).std()) > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(alibi_slopes=torch.ones(2)), "alibi_slopes: not supported"),
        (dict(window_size=3), "window_size=3: it must be a pair of ints"),
        (dict(window_size=(-1, None)), "window_size=(-1, None): it must be a pair of ints"),
        (dict(dropout_p=0.1, return_attn_probs=True), "return_attn_probs=True with dropout_p=0.1"),
        (dict(softcap=-1.0), "softcap=-1.0"),
    ],
)
def test_an_option_that_is_missing_is_named(options: dict[str, Any], message: str) -> None:
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError) as error:
        flash_attn.flash_attn_func(x, x, x, **options)
    assert message in str(error.value)


def test_a_shape_that_does_not_fit_is_named() -> None:
    x, cu = torch.randn(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    for q_width, k_width in ((8, 12), (0, 0)):
        q, k = torch.randn(1, 8, 2, q_width), torch.randn(1, 8, 2, k_width)
        with pytest.raises(ValueError, match=f"head dim {k_width}"):
            flash_attn.flash_attn_func(q, k, k)
    with pytest.raises(ValueError, match=r"kv=\(8, 2, 16\): dimension 2 must have size 2"):
        flash_attn.flash_attn_kvpacked_func(x[None], x)
    with pytest.raises(ValueError, match="block_table: not supported here"):
        flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 8, 8, block_table=cu)
    with pytest.raises(ValueError, match="the last boundary must be 8"):
        flash_attn.flash_attn_varlen_func(x, x, x, cu[:1], cu[:1], 8, 8)


def test_all_public_functions_have_a_recorded_signature() -> None:
    public = {name for name, value in vars(flash_attn).items() if inspect.isfunction(value) and name.startswith("flash_")}
    assert public == set(FLASH_ATTN) == set(flash_attn.__all__)
