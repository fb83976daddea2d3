"""`ringspan launch`: it starts ranks, forwards signals, names a killed rank, runs sweeps and reports errors once."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringspan import ROOT
from ringspan.launch import __main__ as launcher
from ringspan.launch import listeners
from ringspan.launch.supervisor import Outcome
from tests.trainer.jobs import TOY

COMMAND = [sys.executable, "-m", "ringspan", "launch"]  # the console script `ringspan` runs this module
MODULE = [sys.executable, "-m", "ringspan.launch"]


@pytest.mark.parametrize("launch", [COMMAND, MODULE], ids=["command", "module"])
@pytest.mark.parametrize(
    ("option", "reason"), [("model.heads=3", "model.heads"), ("--ranks", "--ranks=2"), ("--ranks=0", "at least 1")]
)
def test_errors_name_the_command(launch: list[str], option: str, reason: str) -> None:
    done = subprocess.run([*launch, option], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.startswith("ringspan launch: "), done.stderr
    assert reason in done.stderr and "`ringspan launch --help` lists every option." in done.stderr


@pytest.mark.parametrize("launch", [COMMAND, MODULE], ids=["command", "module"])
def test_help_names_the_command(launch: list[str]) -> None:
    done = subprocess.run([*launch, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "ringspan launch [--ranks=N] [--multirun] [key=value …]" in done.stdout, done.stderr


@pytest.mark.parametrize(("flags", "line"), [(["--ranks=1"], "starting 1 rank …"), (["--ranks=3"], "starting 3 ranks …")])
def test_the_number_of_ranks_is_printed_before_they_start(
    flags: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def start(words: list[str], num_ranks: int) -> Outcome:
        printed.append(capsys.readouterr().out)
        return Outcome(0, False)

    monkeypatch.setattr(launcher, "start", start)
    options = ["experiment=laptop", "parallel.device=cpu", "data.batch=3", "data.micro_batch=1"]
    assert launcher.main([*flags, *options]) == 0 and printed[0].splitlines()[0] == line


def test_a_sweep_trains_every_job(tmp_path: Path) -> None:
    options = ["--ranks=2", "--multirun", *TOY, f"runs={tmp_path}", "steps=2", "seed=0,1", "name=run"]
    done = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[2 of 2]" in done.stdout
    head, *table = done.stdout.splitlines()[-4:-1]
    assert head.split() == ["held", "out", "loss", "tokens/s", "step"]
    assert {line.split()[3] for line in table} == {"2"}  # steps
    assert sorted(line[line.index("seed=") :].split()[0] for line in table) == ["seed=0", "seed=1"]
    losses = [float(line.split()[0].replace("–", "inf")) for line in table]
    assert losses == sorted(losses)
    assert sorted(path.parent.name for path in tmp_path.glob("*/finished.json")) == ["run-1", "run-2"]


@pytest.mark.parametrize(
    ("file", "message"),
    [("bad.jsonl", "bad.jsonl:2 is no JSON object"), ("/proc/self/mem", "/proc/self/mem cannot be read: Input/output error")],
)
def test_unreadable_data_is_one_message_and_exit_code_2(tmp_path: Path, file: str, message: str) -> None:
    """The ranks find the error, long after the launcher has checked the config."""
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    data = ["data=text", f"data.sources.text.paths=[{tmp_path / file}]", f"data.cache={tmp_path}", f"runs={tmp_path}/runs"]
    command = [*MODULE, "--ranks=2", "experiment=laptop", "parallel.device=cpu", *data]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr and "rank" not in done.stderr


def test_a_running_job_listens_on_loopback_only_and_names_a_killed_rank(tmp_path: Path) -> None:
    """One run for both. A client on another address of this host, and one in another network namespace, get no connection."""
    command = [*COMMAND, "--ranks=2", *TOY, f"runs={tmp_path}", "name=run", "steps=100000"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    next(text for text in launcher.stdout if text.startswith("step"))
    found = listeners.listeners(listeners.descendants(launcher.pid))
    assert found and all(each.is_local for each in found), found
    ranks = ranks_of(launcher)
    assert {each.pid for each in found} == set(ranks)  # gloo listens on each
    for each in found:
        with socket.create_connection((each.address, each.port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", each.port), timeout=5)
    connect = f"import socket; socket.create_connection(('127.0.0.1', {found[0].port}), timeout=5)"
    isolated = subprocess.run(["unshare", "--net", sys.executable, "-c", connect], capture_output=True, text=True)
    assert "unshare" in isolated.stderr or isolated.returncode == 1, isolated.stderr  # not allowed, or no connection
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=600)
    assert launcher.returncode == 128 + signal.SIGKILL
    last = errors.rstrip().splitlines()[-1]
    assert last.startswith("rank 1 was ended by SIGKILL") and "the same `ringspan launch` command resumes" in last
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def test_ranks_save_and_exit_on_a_signal(tmp_path: Path) -> None:
    """Also inside another launcher's environment."""
    command = [*MODULE, "--ranks=2", *TOY, f"runs={tmp_path}", "name=run", "steps=500"]
    foreign = dict(RANK="5", WORLD_SIZE="x", MASTER_ADDR="192.0.2.1", MASTER_PORT="", TORCHELASTIC_USE_AGENT_STORE="True")
    launcher = subprocess.Popen(command, cwd=ROOT, env=os.environ | foreign, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    for text in launcher.stdout:
        if text.startswith("step   3/500"):
            launcher.send_signal(signal.SIGINT)  # Ctrl-C
            break
    launcher.communicate(timeout=600)
    assert launcher.returncode == 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_a_signal_before_the_ranks_start_ends_the_launch(tmp_path: Path) -> None:
    command = [*MODULE, "--ranks=1", *TOY, f"runs={tmp_path}", "name=run", "steps=100000"]
    launcher = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=600) != 0
    assert not list(tmp_path.glob("*/finished.json"))


def test_torchrun_opens_the_ports_of_its_warning_and_leaves_no_orphan(tmp_path: Path) -> None:
    options = [*TOY, f"runs={tmp_path}", "name=run", "steps=100000"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "ringspan.trainer.train",
    ]
    torchrun = subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert torchrun.stdout is not None and torchrun.stderr is not None
    next(text for text in torchrun.stdout if text.startswith("step"))
    ranks = [pid for pid in ranks_of(torchrun) if b"trainer.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    assert all(each.is_local for each in listeners.listeners(ranks))  # all of ours
    open_ports = {each.port for each in listeners.listeners([torchrun.pid]) if not each.is_local}
    torchrun.kill()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{rank}").exists() and "Z" not in Path(f"/proc/{rank}/stat").read_text().split() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    warnings = [text for text in torchrun.stderr.read().splitlines() if text.startswith("torchrun's store listens on port ")]
    assert len(warnings) == 1 and int(warnings[0].split()[5]) in open_ports
