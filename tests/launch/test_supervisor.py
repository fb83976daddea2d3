"""Supervisor of the ranks of a host: exit codes, the cause that came first, signals, orphans. The ranks are small scripts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ringspan import ROOT
from ringspan.launch import listeners, supervisor
from ringspan.launch.supervisor import Supervisor

RANK = """
import os, pathlib, signal, sys, time
from ringspan.trainer.monitoring import supervised
supervised.OWN_ERROR_S = 0.2
rank, mode = os.environ["RANK"], sys.argv[1]
if mode != "starting":
    supervised.watch()
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.3)
    raise SystemExit(0)
if mode in ("save", "busy"):
    signal.signal(signal.SIGTERM, stop if mode == "save" else signal.SIG_IGN)
pathlib.Path(sys.argv[2], rank).write_text(str(os.getpid()))
if rank == "1":
    if mode == "kill":
        while not pathlib.Path(sys.argv[2], "0").exists():  # rank 0 may still import
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stall":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "wrong input":
        raise SystemExit(2)
elif mode == "stall":
    time.sleep(0.2)
    supervised.report("Stalled: waited for rank 1 in training step 7,\\nlayer 3; the time limit is 15 s")
    raise SystemExit(1)
if mode == "both":
    time.sleep(0.5 * int(rank))
    supervised.report(f"ValueError: bad rank {rank}; the traceback is in traceback-rank-{rank}.txt")
    raise SystemExit(1)
if mode == "done":
    raise SystemExit(0)
if mode == "starting":
    time.sleep(1)
    supervised.watch()
time.sleep(60)
"""
SUPERVISE = f"""
import os, sys
from ringspan.launch.supervisor import Supervisor
raise SystemExit(Supervisor([sys.executable, "-c", {RANK!r}, *sys.argv[1:]], 2, os.environ).run().code)
"""


def supervise(mode: str, folder: Path) -> supervisor.Outcome:
    return Supervisor([sys.executable, "-c", RANK, mode, str(folder)], 2, os.environ).run()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(supervisor, "ENDING_S", 1.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("done", 0, ""),
        ("wrong input", 2, ""),
        (
            "kill",
            137,
            "rank 1 was ended by SIGKILL (if no user sent it, the machine was out of memory); the same `ringspan launch",
        ),
        (
            "stall",
            1,
            "rank 0 failed first: Stalled: waited for rank 1 in training step 7, layer 3; the time limit is 15 s; the same",
        ),
    ],
)
def test_the_last_message_names_the_rank_and_the_cause_that_came_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, code: int, message: str
) -> None:
    """A stopped rank is killed a while after the failure of its peer. That death is no cause."""
    assert supervise(mode, tmp_path) == (code, False)
    errors = capfd.readouterr().err
    assert errors.rstrip().rpartition("\n")[2].startswith(message) if message else errors == ""
    if mode == "kill":
        assert "out of memory); rank 0 ends in its start\n" in errors
    assert not any(Path(f"/proc/{(tmp_path / rank).read_text()}").exists() for rank in ("0", "1"))


@pytest.mark.usefixtures("impatient")
def test_two_failing_ranks_are_a_line_each_and_the_first_is_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their tracebacks would be interleaved; each is in a file that its line names."""
    assert supervise("both", tmp_path).code == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "bad rank" in line]
    assert lines[-1].startswith("rank 0 failed first: ValueError: bad rank 0; the traceback is in traceback-rank-0.txt; ")
    assert all(line.startswith("rank 1 failed after that: ") for line in lines[:-1] if "bad rank 1" in line)


@pytest.mark.usefixtures("impatient")
def test_a_swallowed_death_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that the test above guards against: a supervisor that ignores the exit codes of ranks."""
    monkeypatch.setattr(Supervisor, "_find_failure", lambda self: False)
    assert supervise("done", tmp_path).code == 0
    command = [sys.executable, "-c", "import os; os._exit(int(os.environ['RANK']))"]
    assert Supervisor(command, 2, os.environ).run().code == 0
    monkeypatch.undo()
    assert Supervisor(command, 2, os.environ).run().code == 1


def start(mode: str, folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a supervisor in a process of its own, and return it with its ranks."""
    # a shell's background job ignores SIGQUIT, and so would what it starts
    default = partial(signal.signal, signal.SIGQUIT, signal.SIG_DFL)
    command = [sys.executable, "-c", SUPERVISE, mode, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=default)
    ranks = []
    for name in ("0", "1"):
        while not (folder / name).exists() or not (folder / name).read_text():
            time.sleep(0.01)
        ranks.append(int((folder / name).read_text()))
    return process, ranks


def test_a_second_sigterm_does_not_change_the_exit_code(tmp_path: Path) -> None:
    process, _ = start("save", tmp_path)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 0


def test_a_second_ctrl_c_kills_the_ranks(tmp_path: Path) -> None:
    process, ranks = start("busy", tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130 and not any(is_running(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGKILL, "sleep"), (signal.SIGQUIT, "sleep"), (signal.SIGUSR2, "sleep"), (signal.SIGKILL, "starting")],
)
def test_no_rank_outlives_its_supervisor(tmp_path: Path, number: signal.Signals, mode: str) -> None:
    process, ranks = start(mode, tmp_path)
    process.send_signal(number)
    process.wait(timeout=5)
    deadline = time.monotonic() + 5
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_stores_socket_takes_connections_of_this_host_only() -> None:
    with supervisor.bind_store() as store:
        store.listen()
        (own,) = [each for each in listeners.listeners([os.getpid()]) if each.port == store.getsockname()[1]]
        assert own.address == "127.0.0.1" and own.is_local


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("0100007F", "127.0.0.1", True),
        ("00000000", "0.0.0.0", False),
        ("00000000000000000000000001000000", "::1", True),
        ("0000000000000000FFFF00000100007F", "::ffff:7f00:1", True),
        ("00000000000000000000000000000000", "::", False),
    ],
)
def test_addresses_of_the_kernels_table(text: str, address: str, is_local: bool) -> None:
    listener = listeners.Listener(listeners._address(text), 1, 1, "")
    assert listener.address in (address, address.replace("7f00:1", "127.0.0.1")) and listener.is_local == is_local
