"""Random kills over supervisor and ranks from cold starts: no process stays, and the run continues bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringspan import ROOT
from ringspan.launch import listeners
from tests.launch.test_supervisor import is_running
from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

CHAINS = [(40, 3), *(pytest.param(seed, 10, marks=pytest.mark.faults) for seed in range(41, 47))]  # seed, kills
OPTIONS = [*jobs.TOY, "debug.deterministic=true", "evaluate.batches=0", "checkpoint.every=1", "schedule=constant", "name=run"]


@pytest.mark.parametrize("seed, kills", CHAINS)
def test_random_kills_leave_no_process_and_change_no_number(tmp_path: Path, seed: int, kills: int) -> None:
    draw = random.Random(seed)
    command = [sys.executable, "-m", "ringspan.launch", "--ranks=2", *OPTIONS, f"runs={tmp_path}", "steps=100000"]
    for number in range(kills):
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert launcher.stdout is not None
        if draw.random() < 0.7:  # in a step or a save, else at any moment of the start
            next(text for text in launcher.stdout if text.startswith("step"))
            time.sleep(draw.uniform(0, 0.5))
        else:
            time.sleep(draw.uniform(0, 6))
        processes = listeners.descendants(launcher.pid)
        target = draw.choice(["launcher", "rank", "all"])
        victims = {"launcher": processes[:1], "rank": [draw.choice(processes[1:] or processes)], "all": processes}[target]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        launcher.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while left := [pid for pid in processes if is_running(pid)]:
            assert time.monotonic() < deadline, f"kill {number} of the {target}: processes {left} still run"
            time.sleep(0.05)
    steps = max((line["step"] for line in lines(tmp_path / "run")), default=0) + 1
    assert jobs.run_ranks(2, jobs.train_plain, [*OPTIONS, f"runs={tmp_path}", f"steps={steps}"]) == [0, 0]
    assert jobs.run_ranks(2, jobs.train_plain, [*OPTIONS, f"runs={tmp_path}/undisturbed", f"steps={steps}"]) == [0, 0]
    measured, expected = ([(line["step"], line["loss"], line["grad"]) for line in lines(path)] for path in (
        tmp_path / "run", tmp_path / "undisturbed/run"
    ))  # fmt: skip
    assert len(measured) == steps and measured == expected
