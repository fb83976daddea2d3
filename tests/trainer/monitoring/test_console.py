"""Console: a full, closed or stalled stdout ends no process and no run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringspan.trainer.config import compose
from ringspan.trainer.monitoring import console
from tests.trainer import jobs
from tests.trainer.checkpoint.test_resume import lines

ROOT = Path(__file__).resolve().parents[3]
PRINT = """
import sys, traceback
from ringspan.trainer.monitoring import console
console.PATIENCE_S = 0.1
console.protect()
with open(sys.argv[1], "w") as file:  # does not get the number of a closed stream
    assert file.fileno() > 2
    for number in range(50):
        print("x" * 5000, flush=True)
        print("y" * 5000, file=sys.stderr)
    try:
        raise ValueError("of a library")
    except ValueError:
        traceback.print_exc()
    print("not flushed")
    file.write("done")
"""


def connect_standard_streams(state: str) -> None:
    """Give this process a stdout and stderr that take nothing."""
    if state == "closed":
        os.close(1)
        os.close(2)
        return
    if state == "full":
        handle = os.open("/dev/full", os.O_WRONLY)
    else:
        read_end, handle = os.pipe()
        if state == "stalled":
            os.set_inheritable(read_end, True)  # a reader that never reads
        else:
            os.close(read_end)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


@pytest.mark.parametrize("state", ["full", "closed", "closed pipe", "stalled"])
def test_prints_never_fail(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-c", PRINT, str(tmp_path / "file")]
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=lambda: connect_standard_streams(state), close_fds=False)
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "file").read_text() == "done"


def test_text_arrives_and_redirected_streams_stay(capsys: pytest.CaptureFixture[str]) -> None:
    redirected = sys.stdout
    console.protect()
    assert sys.stdout is redirected
    read_end, handle = os.pipe()
    file = console.LossyFile(handle)
    assert file.write("α".encode() * 3000) == 6000 and os.read(read_end, 10000).decode() == "α" * 3000
    os.close(read_end)
    os.close(handle)


def train_on_console(options: list[str], state: str) -> None:
    from ringspan.trainer import train

    connect_standard_streams(state)
    console.protect()
    raise SystemExit(train.run(compose.load([*jobs.TOY, *options])))


@pytest.mark.parametrize("state", ["full", "closed", "stalled"])
def test_a_run_does_not_need_its_console(tmp_path: Path, state: str) -> None:
    options: list[Any] = [f"runs={tmp_path}", "name=run", "steps=2", "checkpoint.every=1"]
    assert jobs.run_ranks(1, train_on_console, options, state) == [0]
    options[2] = "steps=3"
    assert jobs.run_ranks(1, train_on_console, options, state) == [0]
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
