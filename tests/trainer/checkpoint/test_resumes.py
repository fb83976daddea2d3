"""Resumes across numbers of ranks, ZeRO stages and layouts: losses and samples are those of the undisturbed run.

A round resumes checkpoints of the round before on 1, 2, 3 and 4 ranks, each with a random split, and saves the checkpoints of
the next round. The ranks of a round are forked once per world size and train its runs one after the other. `make test-faults`
runs five rounds of ten resumes per world size (200), and 20 from cold starts; `make test-all` runs a sample of both.
"""

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

BATCH, STEPS = 12, 2  # steps of each resume
OPTIONS = [*jobs.TOY, f"data.batch={BATCH}", "evaluate.batches=0", "schedule=constant", "parallel.timeout=120"]
MESHES = {  # (ring, ulysses, data) by number of ranks; the toy has four heads
    1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1), (1, 1, 3)],
    4: [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)],
}  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """One resume: the checkpoint, the name of the run, its last step, and its split."""

    source: Path
    name: str
    last: int
    split: tuple[str, ...]


def draw_split(draw: random.Random, world: int) -> tuple[str, ...]:
    """Return the options of a random mesh, layout, ZeRO stage, micro-batch and prefetch."""
    ring, ulysses, data = draw.choice(MESHES[world])
    layout = draw.choice(["zigzag", "contiguous"] + ["striped"] * (ulysses == 1))
    micro_batch = draw.choice([size for size in (1, 2, 3) if BATCH // data % size == 0])
    return (
        f"parallel.ring={ring}", f"parallel.ulysses={ulysses}", f"parallel.data={data}", f"parallel.layout={layout}",
        f"engine.zero={draw.randrange(4)}", f"data.micro_batch={micro_batch}", f"data.prefetch={draw.choice([0, 2])}",
    )  # fmt: skip


def resume_all(runs: str, resumes: list[Resume]) -> None:
    """Train all resumes as one rank; the ranks keep one default process group."""
    import torch.distributed as dist

    from ringspan.trainer import loop
    from ringspan.trainer.config import compose
    from ringspan.trainer.run import Run

    dist.init_process_group("gloo")
    for resume in resumes:
        options = [f"runs={runs}", f"name={resume.name}", f"steps={resume.last}", f"checkpoint.resume={resume.source}"]
        run = Run(compose.load([*OPTIONS, *options, *resume.split]))
        assert loop.train(run)
        run.close()
    dist.destroy_process_group()


def undisturbed(tmp_path: Path, steps: int) -> dict[int, dict]:
    """Train the reference on one rank; return its lines by step. Each step is a checkpoint."""
    options = ["name=reference", f"runs={tmp_path}", f"steps={steps}", "checkpoint.every=1", "checkpoint.keep_last=99"]
    assert jobs.run_ranks(1, jobs.train_plain, [*OPTIONS, *options]) == [0]
    return {line["step"]: line for line in lines(tmp_path / "reference")}


def compare(folder: Path, expected: dict[int, dict], first: int, last: int) -> float:
    """Compare a run's steps with the undisturbed run; return the largest relative deviation of a loss."""
    found = {line["step"]: line for line in lines(folder)}
    assert [*found] == list(range(first, last + 1)), folder.name
    for step, line in found.items():
        for name in ("samples", "labels", "tokens"):
            assert line[name] == expected[step][name], (folder.name, step, name)
    return max(abs(line["loss"] / expected[step]["loss"] - 1) for step, line in found.items())


def resume_in_rounds(tmp_path: Path, rounds: int, each: int, seed: int) -> None:
    draw, began, worst = random.Random(seed), time.monotonic(), 0.0
    expected = undisturbed(tmp_path, 1 + STEPS * rounds)
    sources = [tmp_path / "reference" / "checkpoints" / "step-00000001"]
    for number in range(rounds):
        first, last = 2 + STEPS * number, 1 + STEPS * (number + 1)
        saved = []
        for world in MESHES:
            resumes = [
                Resume(draw.choice(sources), f"{number}-{world}-{i}", last, draw_split(draw, world)) for i in range(each)
            ]
            assert jobs.run_ranks(world, resume_all, str(tmp_path), resumes, limit=60 + 20 * each) == [0] * world, resumes
            for resume in resumes:
                deviation = compare(tmp_path / resume.name, expected, first, last)
                assert deviation < 1e-5, (resume, deviation)
                worst = max(worst, deviation)
                saved.append(tmp_path / resume.name / "checkpoints" / f"step-{last:08d}")
        sources = saved
    seconds = time.monotonic() - began
    print(f"{rounds * each * len(MESHES)} resumes: largest deviation {worst:.1e}, {seconds:.0f} s")


def test_resumes_across_splits(tmp_path: Path) -> None:
    resume_in_rounds(tmp_path, rounds=2, each=2, seed=0)


@pytest.mark.faults
def test_200_resumes_across_splits(tmp_path: Path) -> None:
    resume_in_rounds(tmp_path, rounds=5, each=10, seed=1)


def newest(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*[0-9]")), default=0)


def resume_cold(tmp_path: Path, number: int, seed: int) -> None:
    """Start a run by its command with random splits, `number` times after the first; a signal ends each start but the last."""
    draw, folder, most = random.Random(seed), tmp_path / "cold", 8 * number
    for start in range(number + 1):
        world, before, is_last = draw.choice([*MESHES]), newest(folder), start == number
        assert before < most, "a signal came late"
        command = [sys.executable, "-m", "ringspan.launch", f"--ranks={world}", *OPTIONS, *draw_split(draw, world)]
        command += [f"runs={tmp_path}", "name=cold", f"steps={before + 1 if is_last else most}", "checkpoint.every=1"]
        process = subprocess.Popen(command, cwd=jobs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until and (is_last or newest(folder) == before):
            time.sleep(0.02)  # its handlers of signals are there once a step is saved
        if not is_last:
            process.send_signal(draw.choice([signal.SIGTERM, signal.SIGINT]))
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert start == 0 or f"continuing after step {before}" in output, output
        assert newest(folder) > before
    assert compare(folder, undisturbed(tmp_path, newest(folder)), 1, newest(folder)) < 1e-5


@pytest.mark.exhaustive
def test_a_resume_from_a_cold_start(tmp_path: Path) -> None:
    resume_cold(tmp_path, number=1, seed=0)


@pytest.mark.faults
def test_20_resumes_from_cold_starts(tmp_path: Path) -> None:
    resume_cold(tmp_path, number=20, seed=1)
