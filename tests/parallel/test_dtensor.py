"""DTensors as inputs of the ring: results and gradients, other mesh dimensions, and placements that do not work."""

import pytest

from tests.parallel.helpers import varlen_jobs

EXACT = 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("packed", [False, True])
def test_dtensors_equal_one_device(packed: bool, kind: str, ranks: int, pools) -> None:
    """Of lengths that the ranks divide, or not: DTensor's shards are then uneven."""
    for length in (24, 19, 4):
        for errors in pools(ranks)(varlen_jobs.compare_dtensors, kind, length, packed):
            assert max(errors.values()) <= EXACT, (length, errors)


def test_other_mesh_dimensions_shard_the_batch_or_replicate(pools) -> None:
    for errors in pools(4)(varlen_jobs.compare_dtensors_on_a_grid):
        assert max(errors) <= EXACT, errors


def test_placements_that_do_not_work_are_rejected(pools) -> None:
    errors = pools(2)(varlen_jobs.dtensor_errors)
    expected = {
        "heads": "q has placements=(Shard(dim=2),): S(2) does not work; Shard(1), the sequence, on the ring's dimension",
        "replicated": "q has placements=(Replicate(),), which shard the sequence over ranks [",
        "mixed": "k is no DTensor, but other inputs are: pass q, k and v as DTensors, or all as local shards",
        "unlike": "k has placements=(Shard(dim=2),) on ",
        "group": "which shard the sequence over ranks [0, 1], but the ring has ranks [",
        "seed": "seed is a DTensor: pass a plain tensor",
        "sinks": "q is no DTensor, but other inputs are",
        "sharded sinks": "sinks have placements=(Shard(dim=0),) on ",
        "mesh": "mesh=None with DTensors: pass Mesh.from_device_mesh",
        "cu_seqlens": "cu_seqlens is a DTensor: pass a plain tensor",
        "length": "tokens, but a shard of Layout(kind='contiguous'",
        "uneven zigzag": "tokens, but a shard of Layout(kind='zigzag'",
    }
    for messages in errors:
        assert messages.keys() == expected.keys()
        for name, text in expected.items():
            assert text in messages[name], f"{name}: {messages[name]}"
