"""`context_attention`: one rank, validation of its arguments, forward mode."""

import functools

import pytest
import torch

from ringspan import Layout, Mask, Mesh, attention, context_attention, ring_attention
from tests.parallel.helpers import jobs
from tests.parallel.helpers.pool import Failed


def test_one_rank_is_plain_attention() -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    expected = attention(q, k, v, Mask(causal=True))
    mesh = Mesh()
    for kind in ("contiguous", "zigzag", "striped"):
        layout = mesh.layout(kind, 9)
        assert torch.equal(context_attention(q, k, v, Mask(causal=True), layout=layout, mesh=mesh), expected)
        assert torch.equal(ring_attention(q, k, v, Mask(causal=True), layout=layout), expected)
    assert torch.equal(context_attention(q, k, v, Mask(causal=True)), expected)


def test_one_rank_takes_the_shard_of_a_padded_layout() -> None:
    layout = Layout("zigzag", 9, 1, multiple=8)
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    shards = [layout.shard(x, 1, 0, fill=1) for x in (q, k, v)]
    out, lse = context_attention(*shards, Mask(), layout=layout, return_lse=True)
    assert (out[:, :9] - attention(q, k, v)).abs().max() < 1e-6
    assert not out[:, 9:].any() and torch.isneginf(lse[:, :, 9:]).all()


def test_one_rank_checks_keys_against_the_layout() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match="k has 5 tokens, but a shard"):
        context_attention(q, q[:, :5], q[:, :5], layout=Layout("zigzag", 8, 1))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layout=Layout("zigzag", 10, 1)), "q has 9 tokens, .*length=10.* make a layout of its length"),
        (dict(layout=Layout("zigzag", 9, 2)), "does not fit .* = 1: .*mesh.layout"),
        (dict(layout="zigzag"), "ringspan.Layout, not str"),
        (dict(mesh="ring"), "ringspan.Mesh, not str"),
    ],
)
def test_errors_on_one_rank_name_a_remedy(options: dict, message: str) -> None:
    q = torch.randn(1, 9, 2, 16)
    with pytest.raises(ValueError, match=message):
        context_attention(q, q, q, **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(heads=3), "ulysses=2 does not divide q's 3 heads: on 4 ranks take one of [1]"),
        (dict(rows=5), "cut the sequence with layout.shard"),
        (dict(layout=None), "mesh.layout"),
        (dict(layout=Layout("zigzag", 16, 4)), "mesh.layout"),
        (dict(dropout=0.1), "needs a seed"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(transport="copy"), "needs CUDA"),
    ],
)
def test_errors_with_ring_and_ulysses_name_a_remedy(changes: dict, message: str, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(4)(functools.partial(jobs.call_context_changed, **changes))
    assert all(error.startswith("ValueError") and message in error for error in failed.value.errors), failed.value


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2)])
def test_forward_mode_is_rejected(ring: int, ulysses: int, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(2)(functools.partial(jobs.call_in_forward_mode, ring, ulysses))
    assert all(error.startswith("ValueError: k has a tangent") for error in failed.value.errors), failed.value
