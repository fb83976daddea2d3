"""Runs whose data is wrong: other files on a rank, files that change between two starts or under a run, steps without labels.

The checks that find it are removed one at a time: then the run trains on, so that each check is the reason why it ends.
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

SMALL = [
    "data=tokens", "model.vocabulary=512", "model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2",
    "model.head_dim=16", "model.mlp_dim=48", "data.length=128", "data.batch=4", "data.micro_batch=2", "parallel.device=cpu",
    "parallel.timeout=60", "debug.watchdog=0", "evaluate.sample=0", "evaluate.batches=0", "tracking.log_every=1", "name=run",
]  # fmt: skip


def write_shard(path: Path, low: int, high: int, num: int = 6000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(low).integers(low, high, num).astype(np.uint16).tofile(path)


def options_of(folder: Path, shard: str, *options: str) -> list[str]:
    cache = [] if shard.startswith("~") else [f"data.cache={folder}/cache"]
    return [*SMALL, f"data.sources.tokens.paths=['{shard}']", f"runs={folder}/runs", *cache, *options]


def start(options: list[str], homes: str = "", defects: tuple[str, ...] = (), at: int = 0, change: str = "") -> None:
    """Run a rank of the command `ringspan train`.

    Args:
        options: overrides.
        homes: each rank has the home folder homes/<rank>, like a host of its own.
        defects: checks that are removed, as module.function.
        at, change: the last rank changes its shard during this step.
    """
    from ringspan.trainer import loop, train
    from ringspan.trainer.config import compose
    from ringspan.trainer.data import fingerprint
    from ringspan.trainer.run import Run

    if homes:
        os.environ["HOME"] = f"{homes}/{os.environ['RANK']}"
    if "hash" in defects:
        fingerprint.require_equal = lambda *_: None
    if "samples" in defects:
        loop.signed_checksum = lambda *_: 0.0
    if "checkpoint" in defects:
        fingerprint.require_unchanged = lambda *_: []
    composed = compose.load(options)
    report = Run.report

    def report_and_change(run: Any, step: int, *rest: Any) -> None:
        report(run, step, *rest)
        if step == at and run.distributed.rank == run.distributed.world - 1:
            shard = Path(composed.config.data.sources["tokens"].paths[0]).expanduser()
            size = shard.stat().st_size
            if change == "cut":
                os.truncate(shard, 10)
            else:  # in place: the map of the running process shows it
                with shard.open("r+b") as file:
                    file.write((b"\xff" if change == "beyond" else b"\1") * size)

    if change:
        Run.report = report_and_change  # type: ignore[method-assign]
    raise SystemExit(train.run(composed))


SPLITS = {"ring": ["parallel.ring=2"], "data": ["parallel.data=2"]}


@pytest.fixture
def two_hosts(tmp_path: Path) -> Path:
    write_shard(tmp_path / "0" / "shard.bin", 0, 250)
    write_shard(tmp_path / "1" / "shard.bin", 250, 500)
    return tmp_path


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_that_read_different_files_do_not_start(two_hosts: Path, split: str) -> None:
    options = options_of(two_hosts, "~/shard.bin", "steps=3", *SPLITS[split])
    assert jobs.run_ranks(2, start, options, str(two_hosts)) == [2, 2]
    file = r"/shard.bin \(12,000 bytes, hash \w{8}\)"
    message = rf"rank 1 reads other data than rank 0: {two_hosts}/1{file} differs from {two_hosts}/0{file} of rank 0"
    assert len(re.findall(f"data.sources.tokens: {message}", jobs.output)) == 1 and "Traceback" not in jobs.output
    assert not (two_hosts / "runs" / "run" / "metrics.jsonl").exists()


def test_without_the_hash_data_ranks_train_on(two_hosts: Path) -> None:
    """A seeded defect: the test above fails with it."""
    options = options_of(two_hosts, "~/shard.bin", "steps=3", *SPLITS["data"])
    assert jobs.run_ranks(2, start, options, str(two_hosts), ("hash",)) == [0, 0]


@pytest.mark.parametrize("at", [2, 0])
def test_a_ring_that_reads_different_samples_stops_and_saves_the_step_before(two_hosts: Path, at: int) -> None:
    """At step 0 the files differ from the start, and their hash is not compared; at step 2 one is overwritten under the run."""
    if at:
        write_shard(two_hosts / "1" / "shard.bin", 0, 250)
    options = options_of(two_hosts, "~/shard.bin", "steps=9", "data.prefetch=0", *SPLITS["ring"])
    arguments = (("hash",), 0, "") if not at else ((), at, "other")
    assert set(jobs.run_ranks(2, start, options, str(two_hosts), *arguments)) == {1}
    (text,) = re.findall(r"^stopped: (.*)$", jobs.output, re.MULTILINE)
    assert re.search(
        rf"sample \d+ differs between rank 0 \(.*{two_hosts}/0/shard.bin\) and rank 1 \(.*{two_hosts}/1/shard.bin", text
    )
    assert ("shard.bin has changed since its checksum was made" in text) == bool(at), "the rank whose file is wrong"
    assert [line["step"] for line in lines(two_hosts / "runs" / "run")] == list(range(1, at + 1 + bool(at)))
    saved = [path.name for path in (two_hosts / "runs" / "run" / "checkpoints").glob("*")]
    assert saved == ["step-00000003"] * bool(at) and "Traceback" not in jobs.output


def test_without_the_checksum_of_samples_a_ring_trains_on(two_hosts: Path) -> None:
    """A seeded defect: the test above fails with it."""
    options = options_of(two_hosts, "~/shard.bin", "steps=3", *SPLITS["ring"])
    assert jobs.run_ranks(2, start, options, str(two_hosts), ("hash", "samples")) == [0, 0]


@pytest.mark.parametrize(("change", "message"), [("beyond", "has the id 65535"), ("cut", "has 10 bytes, not 12000")])
def test_a_shard_that_changes_under_a_run_is_one_message(tmp_path: Path, change: str, message: str) -> None:
    write_shard(tmp_path / "shard.bin", 0, 250)
    options = options_of(tmp_path, f"{tmp_path}/shard.bin", "steps=50", "checkpoint.every=1")
    assert jobs.run_ranks(1, start, options, "", (), 2, change) == [1]
    assert re.search(rf"^ringspan train: rank 0: {tmp_path}/shard.bin {message}.*step-0000000", jobs.output, re.MULTILINE)
    assert "Traceback" not in jobs.output


def test_data_that_changed_between_two_starts_is_named_and_can_be_accepted(tmp_path: Path) -> None:
    shard = tmp_path / "shard.bin"
    write_shard(shard, 0, 250)
    options = options_of(tmp_path, str(shard), "checkpoint.every=1", "data.prefetch=0")  # a step's data is checked within it
    assert jobs.run_ranks(1, start, [*options, "steps=2"]) == [0]
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    np.fromfile(shard, np.uint16)[::-1].tofile(shard)
    assert jobs.run_ranks(2, start, [*options, "steps=4"]) == [2, 2]
    assert jobs.output.count("data.sources.tokens: this run reads other data than step-00000002: ") == 1
    assert f"{shard} (12,000 bytes" in jobs.output and "take checkpoint.changed=[data.sources]" in jobs.output
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text() == before and "Traceback" not in jobs.output
    assert jobs.run_ranks(1, start, [*options, "steps=3", "checkpoint.changed=[data.sources]"]) == [0]
    assert jobs.run_ranks(1, start, [*options, "steps=4"]) == [0], "step 3 was saved with the changed data"
    steps = lines(tmp_path / "runs" / "run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:  # the checks are timed in each step
        assert set(line["checks"]) >= {"samples", "shards"} and 0 < sum(line["checks"].values()) < line["seconds"]


def test_without_the_comparison_a_changed_file_trains_on(tmp_path: Path) -> None:
    """A seeded defect: the test above fails with it."""
    shard = tmp_path / "shard.bin"
    write_shard(shard, 0, 250)
    assert jobs.run_ranks(1, start, options_of(tmp_path, str(shard), "steps=1")) == [0]
    np.fromfile(shard, np.uint16)[::-1].tofile(shard)
    assert jobs.run_ranks(1, start, options_of(tmp_path, str(shard), "steps=2"), "", ("checkpoint",)) == [0]


def test_steps_without_labels_end_the_run(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard.bin", 7, 8)
    options = options_of(tmp_path, f"{tmp_path}/shard.bin", "steps=50", "data.sources.tokens.end_token=7", "debug.bad_steps=3")
    assert set(jobs.run_ranks(2, start, options)) == {1}
    assert "stopped: no token had a label in 3 steps in a row, the last of samples 8 to 11: look at end_token" in jobs.output
    assert "Traceback" not in jobs.output
