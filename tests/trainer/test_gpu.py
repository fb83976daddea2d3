"""Whole runs on GPUs in bf16. The CPU tests check the numbers in fp32.

pytest tests/trainer/test_gpu.py            # skips runs that need more GPUs than the machine has
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.checkpoint.test_resume import lines
from tests.trainer.jobs import ROOT

pytestmark = pytest.mark.gpu
TOY = [
    "model=tiny", "model.dim=256", "model.heads=4", "model.kv_heads=2", "model.head_dim=64", "model.mlp_dim=512",
    "data=recall", "data.length=2048", "data.batch=8", "data.micro_batch=2", "steps=8", "schedule.warmup=0", "optim.lr=1e-3",
    "evaluate.batches=0", "evaluate.sample=0", "tracking.log_every=1", "checkpoint=none", "debug.watchdog=0",
]  # fmt: skip
TOLERANCE = 0.02  # of losses near 6: bf16 rounds in another order


def losses(folder: Path, gpus: int, *options: str) -> list[float]:
    """Train under torchrun and return the losses."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, this machine has {torch.cuda.device_count()}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*torchrun, "-m", "ringspan.trainer.train", *TOY, f"runs={folder}", "name=run", *options]
    clean = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in lines(folder / "run")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one GPU at ZeRO 1."""
    values = losses(tmp_path_factory.mktemp("reference"), 1, "engine=zero1")
    assert len(values) == 8 and values[-1] < values[0] - 0.5, f"the loss must fall: {values}"
    return values


@pytest.mark.parametrize(
    "gpus, options",
    [
        (1, ["engine=zero0"]),
        (1, ["engine=zero2"]),
        (1, ["engine=zero3"]),
        (1, ["engine=zero1", "engine.offload_optimizer=true"]),
        (1, ["engine=zero1", "engine.memory=x/1 outs=2 rows=512 heads=1"]),
        (1, ["engine=zero1", "engine.memory=x/2@1 outs=1@1"]),
        (1, ["engine=zero3", "engine.memory=least"]),
        (2, ["engine=zero3", "parallel.ring=2", "engine.memory=x/2 rows=512 heads=2"]),
        (1, ["engine=offload"]),
        (2, ["engine=zero1", "parallel.ring=2"]),
        (2, ["engine=zero3", "parallel.ring=2"]),
        (2, ["engine=zero2", "parallel.ulysses=2"]),
        (2, ["engine=offload", "parallel.ring=2"]),
        (4, ["engine=zero3", "parallel.ring=2", "parallel.ulysses=2"]),
        (4, ["engine=zero3", "parallel.ring=4"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else str(x),
)
def test_every_engine_and_split_has_the_same_losses(
    gpus: int, options: list[str], reference: list[float], tmp_path: Path
) -> None:
    values = losses(tmp_path, gpus, *options)
    gaps = [abs(a - b) for a, b in zip(values, reference, strict=True)]
    assert max(gaps) <= TOLERANCE, f"{values}, reference {reference}"


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options = ["engine=zero1", "debug.deterministic=true", "schedule=constant", "checkpoint=default"]
    uninterrupted = losses(tmp_path / "whole", 1, *options)
    assert losses(tmp_path / "halves", 1, *options, "steps=4") == uninterrupted[:4]
    assert losses(tmp_path / "halves", 1, *options) == uninterrupted


def test_checks_take_less_than_a_500th_of_a_step_of_1b_at_128k(tmp_path: Path) -> None:
    """The sum of all timers of checks, on all GPUs of the machine."""
    gpus = torch.cuda.device_count()
    command = [
        sys.executable,
        "-m",
        "ringspan.launch",
        f"--ranks={gpus}",
        "experiment=llama_1b_128k",
        "steps=8",
        "checkpoint=none",
    ]
    command += ["evaluate.batches=0", "evaluate.sample=0", f"parallel.ring={gpus}", f"runs={tmp_path}", "name=run"]
    clean = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = lines(tmp_path / "run")[2:]  # without compilation
    checks, seconds = sum(sum(line["checks"].values()) for line in steps), sum(line["seconds"] for line in steps)
    print(f"{gpus} GPUs: checks {1e3 * checks / len(steps):.3f} ms of {seconds / len(steps):.2f} s: {checks / seconds:.2e}")
    assert checks < 0.002 * seconds
