"""Mesh: arrangement of ranks, process groups, and errors for sizes that do not fit."""

import functools
from datetime import timedelta

import pytest

from ringspan import Mesh
from tests.parallel.helpers import jobs
from tests.parallel.helpers.pool import Failed


def test_ulysses_is_the_innermost_axis_then_the_ring(pools) -> None:
    results = pools(8)(jobs.mesh_groups, 2, 2, 2)
    assert results[0] == {"data": [0, 4], "context": [0, 1, 2, 3], "ring": [0, 2], "ulysses": [0, 1], "rank": 0}
    assert results[7] == {"data": [3, 7], "context": [4, 5, 6, 7], "ring": [5, 7], "ulysses": [6, 7], "rank": 7}
    for rank, groups in enumerate(results):
        assert all(rank in ranks for name, ranks in groups.items() if name != "rank")


def test_groups_of_one_rank_exist(pools) -> None:
    """torch.distributed would take None as the default group."""
    assert [groups["data"] for groups in pools(4)(jobs.mesh_groups, 1, 4, 1)] == [[0], [1], [2], [3]]


def test_data_replicas_are_independent(pools) -> None:
    assert max(pools(4)(jobs.compare_replicas)) <= 1e-12


@pytest.mark.parametrize(
    "sizes, remedy",
    [
        (dict(ring=2), "data=2 fits"),
        (dict(data=4, ring=2), "= 8, but the job has 4 ranks: data=2 fits"),
        (dict(ring=3), "ring=4 with data=1 fits"),
        (dict(ulysses=3), "ulysses=3 does not divide 4"),
    ],
)
def test_sizes_that_do_not_fit_name_a_remedy(sizes: dict, remedy: str, pools) -> None:
    with pytest.raises(Failed) as failed:
        pools(4)(functools.partial(jobs.make_unfit_mesh, **sizes))
    assert all("ValueError" in error and remedy in error for error in failed.value.errors)


def test_one_process_needs_no_torch_distributed() -> None:
    mesh = Mesh(timeout=timedelta(seconds=5))
    assert (mesh.data_rank, mesh.context_rank, mesh.context_size, mesh.ring_group) == (0, 0, 1, None)
    with pytest.raises(ValueError, match="torchrun"):
        Mesh(ring=2)
    for arguments in (dict(ring=0), dict(data=True), dict(ulysses=1.0), dict(timeout=0), dict(timeout="1")):
        ((name, value),) = arguments.items()
        with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
            Mesh(**arguments)
