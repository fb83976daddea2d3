"""Whole runs on GPUs, in bf16: what a run on the CPU cannot show. The numbers themselves are the CPU tests' in fp32.

pytest tests/trainer/test_gpu.py            # runs for several GPUs are skipped where there are fewer
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
CLOSE = 0.02  # of losses near 6: bf16 rounds in another order


def losses(folder: Path, gpus: int, *options: str) -> list[float]:
    """Of a run under torchrun."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, here are {torch.cuda.device_count()}")
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={gpus}",
        "-m",
        "ringspan.trainer.train",
    ]
    given = [*TOY, f"runs={folder}", "name=run", *options]
    clean = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([*start, *given], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in lines(folder / "run")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(tmp_path_factory.mktemp("plain"), 1, "engine=zero1")
    assert len(found) == 8 and found[-1] < found[0] - 0.5, f"it learns: {found}"
    return found


@pytest.mark.parametrize(
    "gpus, options",
    [
        (1, ["engine=zero0"]),
        (1, ["engine=zero2"]),
        (1, ["engine=zero3"]),
        (1, ["engine=zero1", "engine.offload_optimizer=true"]),
        (1, ["engine=zero1", "engine.activations=attention", "engine.offload_activations=true"]),
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
def test_every_way_learns_the_same(gpus: int, options: list[str], plain: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, gpus, *options)
    gaps = [abs(a - b) for a, b in zip(found, plain, strict=True)]
    assert max(gaps) <= CLOSE, f"{found} beside {plain}"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = ["engine=zero1", "debug.deterministic=true", "schedule=constant", "checkpoint=default"]
    whole = losses(tmp_path / "whole", 1, *options)
    assert losses(tmp_path / "halves", 1, *options, "steps=4") == whole[:4]
    assert losses(tmp_path / "halves", 1, *options) == whole
