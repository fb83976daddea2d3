"""A rank that dies or stalls in a ring or a save, or whose loss is NaN: the others end in time and name it; the run goes on.

pytest -m gpu tests/launch/test_faults.py        # on two GPUs
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ringspan import ROOT
from ringspan.launch import listeners
from tests.trainer.checkpoint.test_resume import lines
from tests.trainer.jobs import TOY

SCRIPT = """
import os, pathlib, signal, sys, time
point, number, path, *options = sys.argv[1:]
from ringspan.parallel.coordination import progress
from ringspan.trainer import engine, train
from ringspan.trainer.checkpoint import checkpoint
enter, write = progress.enter, checkpoint.write_share
def fail():
    if os.environ["RANK"] == "1":
        pathlib.Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), int(number))
def entering(op):
    if op == point and progress._current.step == 3:
        fail()
    enter(op)
def poisoned(self, loss, labels):
    bad = point == "NaN" and os.environ["RANK"] == "1" and progress._current.step >= 3
    if bad and not os.path.exists(path):
        pathlib.Path(path).write_text(str(time.time()))
    if bad:
        loss.data.fill_(float("nan"))
    backward(self, loss * float("nan") if bad else loss, labels)
def writing(*arguments):
    if point == "save" and (progress._current.step or 0) >= 2:
        fail()
    return write(*arguments)
backward, engine.Engine.backward = engine.Engine.backward, poisoned
progress.enter, checkpoint.write_share = entering, writing
raise SystemExit(train.main(options))
"""
SUPERVISE = """
import os, sys
from ringspan.launch.supervisor import Supervisor
raise SystemExit(Supervisor(sys.argv[1:], 2, os.environ).run().code)
"""
OPTIONS = [*TOY, "checkpoint.every=1", "evaluate.batches=0", "name=run"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def options(device: str, folder: Path) -> list[str]:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    return [*OPTIONS, f"runs={folder}", f"parallel.device={device}"]


def environment(device: str) -> dict[str, str]:
    """Without the variables that the tests set for CPU ranks."""
    clean = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "TRITON_INTERPRET")}
    return clean if device == "cuda" else clean | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("point", ["ring backward", "ring forward", "save"])
def test_a_rank_that_dies_is_named_and_the_run_goes_on(tmp_path: Path, point: str, device: str) -> None:
    end, failed = fail(tmp_path, device, point, 9)
    code, errors = failed.returncode, failed.stderr
    assert end < 10 and code == 137
    assert errors.splitlines()[-1].startswith("rank 1 was ended by SIGKILL")
    assert ("rank 0" in errors and "training step 3" in errors) or point == "save", errors
    if point != "save":
        assert point in errors
    if point != "ring forward":  # it leaves the checkpoint that a death in the backward leaves
        check_that_it_goes_on(tmp_path, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_whose_loss_is_not_finite_is_named_and_the_run_goes_on(tmp_path: Path, device: str) -> None:
    end, done = fail(tmp_path, device, "NaN", 0, "debug.bad_steps=2")
    assert end < 20 and done.returncode == 1, (end, done)
    assert "not finite in 2 steps in a row" in done.stdout and "(the loss was not finite on rank 1)" in done.stdout
    check_that_it_goes_on(tmp_path, device)


def check_that_it_goes_on(tmp_path: Path, device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringspan.launch", "--ranks=2", *options(device, tmp_path), "steps=4"],
        cwd=ROOT, env=environment(device), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_a_stalled_rank_is_named(tmp_path: Path, device: str) -> None:
    end, failed = fail(tmp_path, device, "ring forward", 19, "parallel.timeout=10")
    code, errors = failed.returncode, failed.stderr
    assert end < 10 + 15 and code not in (0, 137), (end, code, errors)
    last = errors.splitlines()[-1]
    assert "rank 1" in last or "rank 0" in last, errors
    assert "ring forward" in errors and "training step 3" in errors


def fail(folder: Path, device: str, point: str, number: int, *more: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a job whose rank 1 fails; return the seconds from then to the end, and the job."""
    rank = [sys.executable, "-c", SCRIPT, point, str(number), str(folder / "time"), *options(device, folder), "steps=4", *more]
    command = [sys.executable, "-c", SUPERVISE, *rank]
    done = subprocess.run(command, cwd=ROOT, env=environment(device), capture_output=True, text=True, timeout=300)
    assert (folder / "time").exists(), f"rank 1 did not reach {point}: {done.stdout}{done.stderr}"
    return time.time() - float((folder / "time").read_text()), done


@pytest.mark.gpu
def test_nccl_listens_on_loopback_only(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", *options("cuda", tmp_path), "steps=1000000"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment("cuda"), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    next(text for text in launcher.stdout if text.startswith("step"))
    found = listeners.listeners(listeners.descendants(launcher.pid))
    launcher.terminate()
    launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    assert found and all(each.is_local for each in found), found


@pytest.mark.gpu
def test_a_long_step_is_abandoned_within_ten_seconds(tmp_path: Path) -> None:
    """A step takes about half a minute, a layer seconds; the host is ahead of the device. The first step completes."""
    shape = ["model.layers=8", "model.dim=512", "model.heads=8", "model.kv_heads=8", "model.head_dim=64", "model.mlp_dim=1024"]
    data = ["data=recall", "data.length=1048576", "data.batch=1", "data.micro_batch=1", "parallel.timeout=600"]
    others = [option for option in options("cuda", tmp_path) if not option.startswith("data")]
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", *others, *shape, *data, "steps=9"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment("cuda"), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    line = next(text for text in launcher.stdout if text.startswith("step"))
    time.sleep(10)
    began = time.monotonic()
    launcher.terminate()
    launcher.communicate(timeout=300)
    seconds = time.monotonic() - began
    print(f"{line}stopped in {seconds:.1f} s")
    assert launcher.returncode == 0 and seconds < 20  # 10, and the save and exit of a small model
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
