"""Mesh: arrangement of ranks, process groups, and errors for sizes that do not fit."""

import functools
from datetime import timedelta

import pytest

from ringspan import Mesh
from tests.parallel.helpers import jobs, varlen_jobs
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


def test_a_mesh_after_a_ring_call_connects_its_gradient_group(pools) -> None:
    """With NCCL, two ranks cannot begin a communicator that all have to create."""
    for checks in pools(2)(varlen_jobs.gradient_group_of_a_later_mesh):
        assert all(checks.values()), checks


def test_from_a_device_mesh(pools) -> None:
    """Any order of the dimensions. Its groups are those of the DeviceMesh, or are added; tp has the same tokens."""
    results = pools(8)(varlen_jobs.mesh_of, (2, 2, 2), ("cp", "dp", "tp"), dict(ring="cp", data="dp"))
    assert [r["ring"] for r in results] == [(2, rank // 4) for rank in range(8)]
    assert [r["data"] for r in results] == [(2, rank // 2 % 2) for rank in range(8)]
    assert results[3]["ring_group"] == results[3]["context_group"] == results[3]["context_ranks"] == [3, 7]
    assert results[3]["data_group"] == [1, 3] and results[3]["ulysses_group"] == [3]
    results = pools(8)(varlen_jobs.mesh_of, (2, 2, 2), ("u", "dp", "r"), dict(ring="r", ulysses="u"))
    assert results[3]["context_ranks"] == [2, 6, 3, 7] and results[3]["context_group"] == [2, 3, 6, 7]
    assert [r["context_rank"] for r in results] == [0, 2, 0, 2, 1, 3, 1, 3]
    assert results[7]["ulysses_group"] == [3, 7] and results[7]["ring_group"] == [6, 7] and results[7]["data_group"] == [5, 7]
    results = pools(4)(varlen_jobs.mesh_of, (4,), (), {})
    assert [(r["ring"], r["data"], r["ulysses"]) for r in results] == [((4, rank), (1, 0), (1, 0)) for rank in range(4)]
    results = pools(4)(varlen_jobs.mesh_of, (2, 2), ("dp", "u"), dict(ulysses="u"))
    assert results[2] | dict(timeout=0) == {
        "data": (2, 1), "ring": (1, 0), "ulysses": (2, 0), "data_group": [0, 2], "ring_group": [2], "ulysses_group": [2, 3],
        "context_group": [2, 3], "context_ranks": [2, 3], "context_rank": 0, "timeout": 0,
    }  # fmt: skip
    assert all(r["timeout"] == 60 for r in results)  # the pool's


@pytest.mark.parametrize(
    "sizes, names, axes",
    [
        ((4,), ("cp",), dict(ring="cp")),
        ((2, 2), ("dp", "cp"), dict(ring="cp")),
        ((2, 2), ("ulysses", "ring"), dict(ring="ring", ulysses="ulysses")),
        ((2, 2), ("cp", "tp"), dict(ulysses="cp", data=())),
    ],
)
def test_attention_over_a_device_mesh(sizes: tuple, names: tuple, axes: dict, pools) -> None:
    assert max(pools(4)(varlen_jobs.compare_on_device_mesh, sizes, names, axes)) <= 1e-12


def test_unclear_groups_and_device_meshes_are_rejected(pools) -> None:
    for errors in pools(4)(varlen_jobs.group_errors):
        for name, message in {
            "grid": "group is a DeviceMesh with dimensions ('dp', 'cp'): a group has one; pass (group, 'name of a dimension')",
            "unknown": "group='tp': the DeviceMesh has the dimensions ('dp', 'cp'); take one of them",
            "type": "group='cp': it must be a ProcessGroup, a DeviceMesh of one dimension, or (DeviceMesh,",
            "ranks": "layout has ranks=4, the group has 2",
            "order": "group: the mesh has ranks [3, 2, 1, 0] in this order; a process group has them in ascending order",
            "mesh type": "device_mesh='cp' must be a torch DeviceMesh",
            "mesh part": "device_mesh has 2 ranks, the job has 4: pass the mesh of all ranks",
            "mesh axes": "ring=None, ulysses=None: name the ring's dimension, one of ('dp', 'cp')",
            "mesh unknown": "ring='tp': the DeviceMesh has the dimensions ('dp', 'cp')",
            "outside": "group: rank ",
            "mesh data": "data=3: the DeviceMesh has the dimensions ('dp', 'cp')",
            "mesh twice": "data=None, ring='cp', ulysses='cp': each dimension may be used once",
            "mesh order": "device_mesh: the ranks along 'cp' are not in ascending order",
        }.items():
            assert errors[name].startswith(message), errors[name]
