"""A flipped bit of a weight on one rank is found at the next save."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ringspan.trainer.checkpoint import replicas
from ringspan.trainer.checkpoint.checkpoint import find_newest
from ringspan.trainer.checkpoint.replicas import ReplicasDifferError, checksum
from tests.trainer import faults, jobs
from tests.trainer.checkpoint.test_kill_points import SMALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_changes_with_every_bit_and_with_the_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 7)
    weight = torch.randn(5, 6).to(dtype)
    expected = checksum(weight)
    assert torch.equal(checksum(weight.clone()), expected) and torch.equal(checksum(weight.T.contiguous().T), expected)
    for number in range(30):
        bits = weight.clone().view(torch.int16)
        bits.view(-1)[number] ^= 1 << (number % 15)
        assert not torch.equal(checksum(bits.view(dtype)), expected)
    assert not torch.equal(checksum(weight.flip(0)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_of_a_gpu_equals_the_cpus(dtype: torch.dtype) -> None:
    weight = torch.randn(3 * replicas.CHUNK + 5).to(dtype)
    assert torch.equal(checksum(weight.cuda()), checksum(weight))


@pytest.mark.parametrize(
    ("world", "message"),
    [(3, "rank 2 has another w1 than the other ranks"), (2, "the ranks have different values of w1, and no majority")],
)
def test_the_rank_with_another_weight_is_named(world: int, message: str) -> None:
    def compare(rank: Any) -> None:
        engine: Any = jobs.FakeEngine(1.0)
        if rank.rank == world - 1:
            engine.values["w1"][0, 0] += 64
        replicas.require_equal(engine, rank)

    results = faults.run_threads(world, compare)
    assert all(isinstance(error, ReplicasDifferError) and message in str(error) for error in results)
    assert faults.run_threads(world, lambda rank: replicas.require_equal(jobs.FakeEngine(1.0), rank)) == [None] * world  # type: ignore[arg-type]


def flip_weight(run: Any) -> None:
    """Add 64 to an element of a weight on the last rank, after the optimizer of step 2."""
    import torch

    step = run.engine.step

    def step_and_flip(fraction: float) -> tuple[float, bool]:
        result: tuple[float, bool] = step(fraction)
        if run.position.step == 1 and run.distributed.rank == 1:
            with torch.no_grad():
                dict(run.engine.named)["layers.0.mlp.up.weight"].view(-1)[5] += 64
        return result

    run.engine.step = step_and_flip


@pytest.mark.parametrize("zero", [0, 1])
def test_a_run_with_a_flipped_weight_stops_without_saving(tmp_path: Path, zero: int) -> None:
    options = [*SMALL, f"runs={tmp_path}", "name=run", "steps=4", "parallel.data=2", f"engine.zero={zero}"]
    assert 1 in jobs.run_ranks(2, jobs.train_plain, options, flip_weight)
    assert "have different values of layers.0.mlp.up.weight" in jobs.output
    assert "nothing is saved; the same name= continues after step-00000001" in jobs.output
    path, damaged = find_newest(tmp_path / "run" / "checkpoints", faults.SingleRank())  # type: ignore[arg-type]
    assert path is not None and path.name == "step-00000001" and damaged == []
