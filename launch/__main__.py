"""Starts the ranks of this machine: one for each GPU, or two on the CPU.

    ringspan launch [--ranks=N] [--multirun] [key=value …]

The config is checked here first, so a mistake costs a second and no rank. The ranks are torchrun's. Ctrl-C, SIGTERM,
SIGUSR1 and SIGHUP (of a terminal that closes) go to the ranks themselves, which save and leave; to torchrun they would mean
the end of everything in 30 seconds.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ringspan.launch import sweep
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose, validate
from ringspan.trainer.config.schema import Config

PROGRAM = "ringspan launch"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    multirun = any(text in ("--multirun", "-m") for text in argv)
    given = [text for text in argv if text.startswith("--ranks=")]
    rest = [text for text in argv if text not in (*given, "--multirun", "-m")]
    try:
        if "--ranks" in argv or "--ranks=" in argv:
            raise compose.ConfigError("--ranks takes a number, written with =: --ranks=2")
        num_ranks = _ranks(given)
        flags, overrides = compose.split(rest)
        jobs = _named(compose.sweep(overrides, flags.get("config-dir"))) if multirun else [overrides]
    except compose.ConfigError as error:
        compose.fail(PROGRAM, error)
    given = [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]
    os.environ["WORLD_SIZE"] = str(num_ranks)  # the check is for so many; torchrun sets its own
    configs = [compose.main(PROGRAM, __doc__, [*given, *job]).config for job in jobs]  # ends here if something is wrong
    del os.environ["WORLD_SIZE"]
    if (cores := os.cpu_count() or 1) < num_ranks and not validate.has_gpu():
        print(f"{num_ranks} ranks share {cores} core{'s' * (cores > 1)}: they will take turns", file=sys.stderr)
    if len(jobs) == 1:
        return start([*given, *jobs[0]], num_ranks)[0]
    same = set.intersection(*map(set, jobs))
    runs: list[tuple[str, Path, int]] = []
    alike: Counter[Path] = Counter()  # jobs that differ only in how they are split share a name, and are numbered
    for number, (job, config) in enumerate(zip(jobs, configs, strict=True), 1):
        own = " ".join(text for text in job if text not in same)
        _say(f"\n[{number} of {len(jobs)}] {own}")
        first = run_folder.choose(config, number=1)
        alike[first] += 1
        folder = run_folder.choose(config, number=alike[first])
        if _finished(config, folder):
            _say(f"{os.path.relpath(folder)} is finished, so it is not run again (checkpoint.resume=none would)")
            runs.append((own, folder, 0))
            continue
        folder = run_folder.choose(config)
        code, stopped = start([*given, *job], num_ranks)
        runs.append((own, folder, code))
        if stopped or code == 2:  # who stops one job does not want the next, and a mistake is in all of them
            break
    _say(f"\n{sweep.table(runs)}")
    return next((code for *_, code in runs if code), 0)


def start(arguments: list[str], num_ranks: int) -> tuple[int, bool]:
    """Runs torchrun to its end; its exit code, and whether it was asked to stop."""
    command = [sys.executable, "-m", "ringspan.launch.local", "--standalone", f"--nproc-per-node={num_ranks}"]
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", threads)  # torchrun would take 1 and print a banner
    heard: list[int] = []
    caught = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup wants it
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in caught}
    told = 0
    try:
        # In a session of its own it hears no Ctrl-C from the terminal: what the ranks hear is decided here.
        process = subprocess.Popen(
            [*command, "-m", "ringspan.trainer.train", *arguments], env=environment, start_new_session=True
        )
        while process.poll() is None:
            for number in heard[told:]:
                told += 1
                _tell(process, number, again=told > 1)
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return process.returncode, bool(heard)


def _tell(process: subprocess.Popen[bytes], number: int, again: bool) -> None:
    """Hands a signal to the ranks; before there are any nothing can be saved, and a second Ctrl-C means now."""
    ranks = workers(process.pid)
    if not ranks or (again and number == signal.SIGINT):
        process.terminate()
        return
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(rank, signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number)


def workers(parent: int) -> list[int]:
    """The ranks: torchrun's children that run the trainer."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if ppid == parent and b"trainer.train" in command:
            found.append(int(entry.name))
    return found


def _finished(config: Config, folder: Path) -> bool:
    """Whether this very run has ended. A folder that was given a name may hold another: that is for the ranks to say."""
    if config.checkpoint.resume == "none" or not (folder / run_folder.FINISHED).exists():
        return False
    with contextlib.suppress(OSError, ValueError):
        return not config.name or run_folder.identity(run_folder.config_of(folder)) == run_folder.identity(config)
    return False


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the terminal is gone; what the buffer still holds would be an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _named(jobs: list[list[str]]) -> list[list[str]]:
    """A name that several jobs share gets the job's number, for each needs a folder of its own."""
    names = Counter(text for job in jobs for text in job if re.fullmatch(r"name=.*\w.*", text))
    return [
        [re.sub(r"(['\"]?)$", rf"-{number}\1", text, count=1) if names[text] > 1 else text for text in job]
        for number, job in enumerate(jobs, 1)
    ]


def _ranks(given: list[str]) -> int:
    if given:
        text = given[-1].partition("=")[2]
        if not text.isdigit() or int(text) < 1:
            raise compose.ConfigError(f"{given[-1]}: a number of ranks, at least 1")
        return int(text)
    if not validate.has_gpu():
        return 2
    import torch

    return torch.cuda.device_count() or 2


if __name__ == "__main__":
    raise SystemExit(main())
