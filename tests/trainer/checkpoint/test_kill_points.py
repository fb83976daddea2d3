"""A process dies before or after each file operation of a start, a save and a prune: the newest checkpoint is whole.

Simulated deaths cover every operation with one and two ranks in one process. Real ones, SIGKILL in training runs, follow each
other in one folder: each start continues what the last one left, and each checkpoint equals the undisturbed run's bit for bit.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer import files
from ringspan.trainer.checkpoint import checkpoint, run_folder
from ringspan.trainer.checkpoint.reader import Position, Reader
from ringspan.trainer.config import compose, schema
from tests.trainer import faults, jobs
from tests.trainer.checkpoint.test_checkpoint import holds, newest
from tests.trainer.checkpoint.test_resume import weights

SMALL = [
    "data=recall", "data.length=64", "data.batch=2", "model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2",
    "model.head_dim=16", "model.mlp_dim=16", "parallel.device=cpu", "parallel.timeout=60", "debug.watchdog=0",
    "debug.deterministic=true", "evaluate.batches=0", "evaluate.sample=0", "checkpoint.every=1", "schedule=constant",
    "schedule.warmup=0",
]  # fmt: skip


def save_step(folder: Path, step: int, rank: Any) -> str:
    """Save the values of a step as one rank, and keep one checkpoint."""
    engine: Any = jobs.FakeEngine(float(step))
    return checkpoint.save(folder, engine, Position(step=step), {}, rank, schema.Checkpoint(keep_last=1))


def is_of(rank: int, path: Path) -> bool:
    """Whether an operation on this path is one of the rank; rank 0 does all but the files of rank 1."""
    return ("-00001" in path.name and path.parent.suffix == ".tmp") == (rank == 1)


@pytest.mark.parametrize(("world", "dying"), [(1, 0), (2, 0), (2, 1)])
def test_death_at_every_operation_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, dying: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # 3 ms each; a process that dies loses nothing without it
    before = tmp_path / "before"
    assert faults.run_threads(world, lambda rank: save_step(before, 10, rank)) == [""] * world
    saved_new = set()
    total = point = 0
    while point <= total:
        folder = tmp_path / str(point)
        shutil.copytree(before, folder)
        death = faults.Death(point, lambda path: is_of(dying, path))
        with faults.observed(death):
            results = faults.run_threads(world, lambda rank: save_step(folder, 20, rank))  # noqa: B023
        if not point:
            total = death.count
            assert results == [""] * world
        else:
            assert isinstance(results[dying], faults.Died) and "" not in results
        name, damaged = newest(folder)
        assert damaged == [], "an interrupted save or prune leaves nothing that looks like a checkpoint"
        assert name in ("step-00000010", "step-00000020") and holds(folder, name, int(name[-2:]))
        saved_new.add(name == "step-00000020")
        assert sorted(path.name for path in folder.iterdir() if path.suffix) == [], "a start removes leftovers"
        assert faults.run_threads(world, lambda rank: save_step(folder, 30, rank)) == [""] * world  # noqa: B023
        assert newest(folder)[0] == "step-00000030" and len(list(folder.iterdir())) == 1
        point += 1
    assert total >= (60 if dying == 0 else 20) and saved_new == {True, False}


def operations_of_a_run(folder: Path) -> list[tuple[str, str, Path]]:
    """File operations of a start's records, of two saves with a prune, and of the end, on two ranks."""
    recorded: list[tuple[str, str, Path]] = []
    with faults.observed(lambda *operation: recorded.append(operation)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", lambda folder: {})
        composed = compose.load([*SMALL, f"runs={folder}", "name=run"])
        run, lock = run_folder.enter(composed)
        run_folder.record(run, composed, 2, "CPU rank", 0, "none")
        for step in (10, 20):
            faults.run_threads(2, lambda rank: save_step(run / "checkpoints", step, rank))  # noqa: B023
        run_folder.finish(run, dict(steps=20))
        lock.close()
    return recorded


def test_everything_is_flushed_before_it_is_renamed(tmp_path: Path) -> None:
    recorded = operations_of_a_run(tmp_path)
    assert sum(operation == "rename" for _, operation, _ in recorded) >= 2 * 5
    assert faults.unsafe_renames(recorded) == []


def test_a_missing_flush_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded defect: no fsync before the rename."""
    monkeypatch.setattr(files, "sync", lambda file, path: None)
    assert "step-00000010.tmp is renamed before weights-00000.safetensors is flushed" in faults.unsafe_renames(
        operations_of_a_run(tmp_path / "files")
    )
    monkeypatch.undo()
    monkeypatch.setattr(files, "sync_folder", lambda path: None)
    found = faults.unsafe_renames(operations_of_a_run(tmp_path / "folders"))
    assert "step-00000010 is discarded before the rename of its successor is flushed" in found


def train_and_die(options: list[str], rank: int, point: int) -> None:
    """Train; one rank is killed at a call of the observer. With point 0 the calls of the first save's end are counted."""
    from ringspan.trainer.run import Run

    if int(os.environ["RANK"]) == rank:
        count = faults.kill_at_operation(point)
        save = Run.save

        def save_and_count(run: Run) -> None:
            save(run)
            if not point:
                (run.folder.parent / f"count-{rank}").write_text(str(count[0]))
                os._exit(0)

        Run.save = save_and_count  # type: ignore[method-assign]
    jobs.train_plain([*SMALL, *options])


RANKS = [(1, 0), (2, 0), (2, 1)]  # (number of ranks, the one that dies)
SAMPLE = [pytest.param(*ranks, zero, 31, marks=pytest.mark.exhaustive) for ranks, zero in zip(RANKS, (0, 3, 0), strict=True)]
EVERY = [pytest.param(*ranks, zero, 1, marks=pytest.mark.faults) for ranks in RANKS for zero in (0, 3)]


@pytest.mark.parametrize(("world", "dying", "zero", "every"), SAMPLE + EVERY)
def test_kills_at_file_operations_of_a_run_lose_no_step(tmp_path: Path, world: int, dying: int, zero: int, every: int) -> None:
    options = [f"runs={tmp_path}", f"engine.zero={zero}"]
    steps = 8 if every > 1 else 60
    undisturbed = [*SMALL, *options, "name=whole", f"steps={steps}", "checkpoint.keep_last=99"]
    assert jobs.run_ranks(world, jobs.train_plain, undisturbed) == [0] * world
    options += ["name=killed", "steps=1000", "checkpoint.keep_last=1"]
    assert jobs.run_ranks(world, jobs.train_plain, [*SMALL, *options, "steps=1"]) == [0] * world
    jobs.run_ranks(world, train_and_die, options, dying, 0)
    total = int((tmp_path / f"count-{dying}").read_text())
    assert total > (60 if dying == 0 else 20)
    whole, killed = tmp_path / "whole" / "checkpoints", tmp_path / "killed" / "checkpoints"
    last = 1
    for point in range(1, total + 1, every):
        codes = jobs.run_ranks(world, train_and_die, options, dying, point)
        assert codes[dying] == -signal.SIGKILL, (point, jobs.output)
        found = sorted(path.name for path in killed.glob("step-????????"))
        step = int(found[-1][5:])
        assert step in (last, last + 1), "no step is lost"
        last = step
        assert last < steps, "the undisturbed run is too short"
        for name in found:
            assert weights(killed / name) == weights(whole / name), (point, name)
            states = [json.loads((folder / name / "state.json").read_text()) for folder in (killed, whole)]
            assert all(states[0][key] == states[1][key] for key in ("samples", "applied", "tokens"))
            assert states[0]["random"]["torch"] == states[1]["random"]["torch"]
            Reader(killed / name).validate_content()
    assert jobs.run_ranks(world, jobs.train_plain, [*SMALL, *options, f"steps={last + 1}"]) == [0] * world
    name = f"step-{last + 1:08d}"
    assert weights(killed / name) == weights(whole / name)
    lines = [json.loads(text) for text in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, last + 2))
