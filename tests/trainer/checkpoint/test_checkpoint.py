"""Checkpoints survive a kill at any point of a save; damage is named, and an older checkpoint is used."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from ringspan.trainer.checkpoint import checkpoint, share
from ringspan.trainer.checkpoint.reader import Reader
from tests.trainer import jobs
from tests.trainer.faults import SingleRank

# Ten points of a save: before the folder, the files, the flushes, the manifest, the rename and the pruning; and the rank.
POINTS = [
    ("ringspan.trainer.files.make_folder", 0),
    ("ringspan.trainer.checkpoint.share.Writer", 1),
    ("ringspan.trainer.checkpoint.safetensors/Writer.add:2", 0),
    ("ringspan.trainer.checkpoint.safetensors/Writer.add:3", 1),
    ("os.fsync:1", 0),
    ("os.fsync:2", 1),
    ("ringspan.trainer.checkpoint.checkpoint._random_state", 0),
    ("ringspan.trainer.checkpoint.checkpoint._write_json:2", 0),
    ("os.replace", 0),
    ("ringspan.trainer.checkpoint.checkpoint._prune", 0),
]


def newest(folder: Path) -> tuple[str | None, list[str]]:
    path, damaged = checkpoint.find_newest(folder, SingleRank())  # type: ignore[arg-type]
    return path.name if path else None, damaged


def holds(folder: Path, name: str, step: int) -> bool:
    """Whether a checkpoint has the values that `jobs.save_fake` writes at this step."""
    reader = Reader(folder / name)
    values = jobs.FakeEngine(float(step)).values
    same = all(
        (reader.weight(n) == x).all() and reader.values(n, "exp_avg", 3, 5).eq(x[0, 0] / 2).all() for n, x in values.items()
    )
    return reader.position.step == step and sorted(reader.names) == sorted(values) and bool(same)


@pytest.mark.parametrize(("point", "rank"), POINTS)
def test_kill_during_a_save_never_loses_the_last_checkpoint(tmp_path: Path, point: str, rank: int) -> None:
    codes = jobs.run_ranks(2, jobs.save_fake, str(tmp_path), [10, 20], 5, point, rank)
    assert codes[rank] == -signal.SIGKILL
    name, damaged = newest(tmp_path)
    assert damaged == [], "an interrupted save leaves nothing that looks like a checkpoint"
    committed = point == "ringspan.trainer.checkpoint.checkpoint._prune"
    assert name == ("step-00000020" if committed else "step-00000010")
    assert holds(tmp_path, name, 20 if committed else 10)
    assert not list(tmp_path.glob("*.tmp"))
    assert jobs.run_ranks(2, jobs.save_fake, str(tmp_path), [20, 30]) == [0, 0], "the next save works"
    assert newest(tmp_path)[0] == "step-00000030"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    assert jobs.run_ranks(2, jobs.save_fake, str(tmp_path), [1, 2, 3]) == [0, 0]
    assert newest(tmp_path) == ("step-00000003", [])
    return tmp_path


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[-100] ^= 4
        path.write_bytes(data)
    elif how == "unreadable":
        path.unlink()
        path.symlink_to(path.name)
    elif how == "a folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "is missing"),
        ("truncated", "is cut short: "),
        ("flipped", "has changed since it was written"),
        ("unreadable", "cannot be read: Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("kind", ["weights-00001", "moments-00000"])
def test_each_kind_of_damage_is_named_and_an_older_checkpoint_is_used(saved: Path, kind: str, how: str, message: str) -> None:
    damage(saved / "step-00000003" / f"{kind}.safetensors", how)
    name, problems = newest(saved)
    assert name == "step-00000002" and holds(saved, name, 2)
    assert len(problems) == 1 and f"step-00000003 is damaged: {kind}.safetensors {message}" in problems[0]


def test_damaged_manifest_and_state_are_named(saved: Path) -> None:
    (saved / "step-00000003" / "manifest.json").write_text("{")
    damage(saved / "step-00000002" / "state.json", "truncated")
    name, problems = newest(saved)
    assert name == "step-00000001"
    assert "manifest.json is not readable" in problems[0] and "state.json is cut short" in problems[1]
    damage(saved / "step-00000001" / "manifest.json", "missing")
    assert newest(saved)[0] is None


@pytest.mark.parametrize(("how", "reason"), [("unreadable", "Too many levels"), ("a folder", "Is a directory")])
def test_unreadable_manifest_counts_as_damage(saved: Path, how: str, reason: str) -> None:
    """An exception on one rank would leave the other ranks waiting in a collective."""
    damage(saved / "step-00000003" / "manifest.json", how)
    name, (problem,) = newest(saved)
    assert name == "step-00000002" and f"step-00000003 is damaged: manifest.json cannot be read: {reason}" in problem


def test_keep_last_removes_older_checkpoints(tmp_path: Path) -> None:
    assert jobs.run_ranks(1, jobs.save_fake, str(tmp_path), [1, 2, 3, 4], 2) == [0]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def full_disk(folder: str, rank: int) -> None:
    """Save while the disk of one rank is full from its second tensor on."""
    import errno

    from ringspan.trainer.checkpoint import safetensors

    original, left = safetensors.Writer.add, [2]

    def add(self: safetensors.Writer, tensor: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] <= 0 and int(os.environ["RANK"]) == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, tensor)

    safetensors.Writer.add = add  # type: ignore[method-assign]
    jobs.save_fake(folder, [20])


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_is_reported_on_all_ranks_and_the_run_continues(tmp_path: Path, rank: int) -> None:
    assert jobs.run_ranks(2, jobs.save_fake, str(tmp_path), [10]) == [0, 0]
    assert jobs.run_ranks(2, full_disk, str(tmp_path), rank) == [0, 0]
    for reader in (0, 1):
        assert (tmp_path / f"problem-20-{reader}").read_text() == f"rank {rank}: No space left on device (while writing)"
    assert newest(tmp_path) == ("step-00000010", []) and not list(tmp_path.glob("*.tmp"))


def test_checkpoint_contains_only_json_and_safetensors(saved: Path) -> None:
    for path in (saved / "step-00000003").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text())


def concurrent_save(folder: str) -> None:
    """Save with writes that wait until the other rank writes too, and reads that both ranks do together."""
    import torch.distributed as dist

    from ringspan.trainer.checkpoint import safetensors

    original, rank = safetensors.Writer.add, int(os.environ["RANK"])

    def add(self: safetensors.Writer, tensor: torch.Tensor) -> None:
        (Path(folder) / f"writing-{rank}").touch()
        until = time.monotonic() + 20
        while not (Path(folder) / f"writing-{1 - rank}").exists():
            assert time.monotonic() < until, "the other rank waits for this rank's disk"
            time.sleep(0.01)
        original(self, tensor)

    def read(self: jobs.FakeEngine, name: str) -> dict[str, torch.Tensor]:
        dist.barrier()
        return original_read(self, name)

    original_read, jobs.FakeEngine.read = jobs.FakeEngine.read, read  # type: ignore[method-assign]
    safetensors.Writer.add = add  # type: ignore[method-assign]
    jobs.save_fake(folder, [7])


def test_ranks_write_concurrently(tmp_path: Path) -> None:
    assert jobs.run_ranks(2, concurrent_save, str(tmp_path)) == [0, 0]
    assert newest(tmp_path) == ("step-00000007", []) and holds(tmp_path, "step-00000007", 7)


class SlowWriter:
    def __init__(self) -> None:
        self.written: list[int] = []

    def add(self, tensor: torch.Tensor) -> None:
        time.sleep(0.01)
        self.written.append(int(tensor[0]))


def test_pending_writes_are_bounded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "MAX_PENDING", 100)
    background, writer = share.BackgroundWriter(), SlowWriter()
    for number, size in enumerate([30] * 9 + [300] + [30] * 9):  # the tensor of 300 bytes must wait alone
        background.add(writer, torch.full((size,), number, dtype=torch.uint8))  # type: ignore[arg-type]
        assert number + 1 - len(writer.written) <= (1 if size > 100 else 3)
    background.close()
    assert writer.written == list(range(19))


def test_error_of_a_background_write_is_raised() -> None:
    class Broken(SlowWriter):
        def add(self, tensor: torch.Tensor) -> None:
            super().add(tensor)
            raise ValueError(f"number {int(tensor[0])}")

    background, writer = share.BackgroundWriter(), Broken()
    background.add(writer, torch.tensor([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number 1"):
        background.close()


def test_nothing_is_written_after_the_first_failed_write(tmp_path: Path) -> None:
    """A later tensor that is already queued would be taken for the one that failed, and its error would hide the cause."""
    go = threading.Event()
    writer = share.SplitWriter(tmp_path, "weights", {"up": (4, 3), "down": (3, 4)}, 0)
    background = share.BackgroundWriter()
    background._thread.submit(go.wait)
    background.add(writer, torch.full((4, 3), float("nan")))
    background.add(writer, torch.zeros(3, 4))
    go.set()
    background._pending[1][1].result()
    with pytest.raises(share.NotFiniteError, match="up is not finite"):
        background.close()
    writer.abandon()
