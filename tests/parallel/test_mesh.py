"""How ranks are arranged, and what a job that does not fit is told."""

import functools
from datetime import timedelta

import pytest
import torch

from ringspan import Layout, Mask, Mesh, attention, context_attention, ring_attention
from tests.parallel import jobs
from tests.parallel.pool import Failed


def test_ulysses_is_innermost_then_the_ring(pools) -> None:
    found = pools(8)(jobs.meshes, 2, 2, 2)
    assert found[0] == {"data": [0, 4], "context": [0, 1, 2, 3], "ring": [0, 2], "ulysses": [0, 1], "rank": 0}
    assert found[7] == {"data": [3, 7], "context": [4, 5, 6, 7], "ring": [5, 7], "ulysses": [6, 7], "rank": 7}
    for rank, groups in enumerate(found):
        assert all(rank in ranks for name, ranks in groups.items() if name != "rank")


def test_groups_of_one_exist(pools) -> None:
    """A group that is None would mean all ranks to torch.distributed."""
    assert [g["data"] for g in pools(4)(jobs.meshes, 1, 4, 1)] == [[0], [1], [2], [3]]


def test_data_replicas_do_not_meet(pools) -> None:
    assert max(pools(4)(jobs.replicas)) <= 1e-12


@pytest.mark.parametrize(
    "sizes, remedy",
    [
        (dict(ring=2), "data=2 fits"),
        (dict(data=4, ring=2), "= 8, but the job has 4 ranks: data=2 fits"),
        (dict(ring=3), "ring=4 with data=1 fits"),
        (dict(ulysses=3), "ulysses=3 does not divide 4"),
    ],
)
def test_a_mesh_that_does_not_fit(sizes: dict, remedy: str, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(4)(functools.partial(jobs.wrong_mesh, **sizes))
    assert all("ValueError" in error and remedy in error for error in failed.value.errors)


@pytest.mark.parametrize(
    "changes, remedy",
    [
        (dict(heads=3), "ulysses=2 does not divide q's 3 heads: on 4 ranks take one of [1]"),
        (dict(rows=5), "use layout.shard"),
        (dict(layout=None), "mesh.layout"),
        (dict(layout=Layout("zigzag", 16, 4)), "mesh.layout"),
        (dict(dropout=0.1), "needs a seed"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(transport="copy"), "needs CUDA"),
    ],
)
def test_ring_and_ulysses_name_a_remedy(changes: dict, remedy: str, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(4)(functools.partial(jobs.refused, **changes))
    assert all(error.startswith("ValueError") and remedy in error for error in failed.value.errors), failed.value


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2)])
def test_forward_mode_is_refused(ring: int, ulysses: int, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(2)(functools.partial(jobs.forward_mode, ring, ulysses))
    assert all(error.startswith("ValueError: k has a tangent") for error in failed.value.errors), failed.value


def test_one_process_needs_no_job() -> None:
    mesh = Mesh(timeout=timedelta(seconds=5))
    assert (mesh.data_rank, mesh.context_rank, mesh.context_size, mesh.ring_group) == (0, 0, 1, None)
    with pytest.raises(ValueError, match="torchrun"):
        Mesh(ring=2)
    for wrong in (dict(ring=0), dict(data=True), dict(ulysses=1.0), dict(timeout=0), dict(timeout="1")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Mesh(**wrong)


def test_one_rank_is_the_plain_kernel() -> None:
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    expected = attention(q, k, v, Mask(causal=True))
    mesh = Mesh()
    for kind in ("contiguous", "zigzag", "striped"):
        layout = mesh.layout(kind, 9)
        assert torch.equal(context_attention(q, k, v, Mask(causal=True), layout=layout, mesh=mesh), expected)
        assert torch.equal(ring_attention(q, k, v, Mask(causal=True), layout=layout), expected)
    assert torch.equal(context_attention(q, k, v, Mask(causal=True)), expected)


@pytest.mark.parametrize(
    "options, remedy",
    [
        (dict(layout=Layout("zigzag", 10, 1)), "make a layout of that length"),
        (dict(layout=Layout("zigzag", 9, 2)), "mesh.layout"),
    ],
)
def test_context_attention_names_a_remedy(options: dict, remedy: str) -> None:
    q = torch.randn(1, 9, 2, 16)
    with pytest.raises(ValueError, match=remedy):
        context_attention(q, q, q, **options)


@pytest.mark.parametrize(
    "options, remedy",
    [
        (dict(layout=Layout("zigzag", 10, 1)), "a shard of"),
        (dict(layout=Layout("zigzag", 18, 2)), "the group has 1"),
        (dict(layout=Layout("zigzag", 18, 2, 2)), "context_attention"),
        (dict(layout="zigzag"), "Layout"),
        (dict(mask=torch.ones(9, 9)), "mask"),
        (dict(mask=Mask(documents=[0] * 8)), "natural order"),
        (dict(mask=Mask(documents=torch.zeros(3, 9, dtype=torch.int64))), "batch of 3"),
        (dict(dropout=0.5), "seed"),
        (dict(transport="pigeon"), "pigeon"),
        (dict(backend="abacus"), "abacus"),
        (dict(sinks=torch.zeros(3)), "sinks"),
        (dict(k=torch.zeros(1, 9, 2, 16, device="meta")), "device"),
        (dict(k=torch.zeros(1, 8, 2, 16)), "length"),
        (dict(k=torch.zeros(1, 9, 2, 16, dtype=torch.float64)), "float64"),
    ],
)
def test_ring_attention_names_a_remedy(options: dict, remedy: str) -> None:
    q = torch.randn(1, 9, 2, 16)
    given = dict(q=q, k=q, v=q, layout=Layout("zigzag", 9, 1)) | options
    with pytest.raises(ValueError, match=remedy):
        ring_attention(**given)
