"""Launcher: starts the ranks of this machine, one per GPU, or two on a CPU.

    ringspan launch [--ranks=N] [--multirun] [key=value …]

The launcher checks the config before it starts a rank, so a mistake costs a second; without --ranks on a machine with GPUs some
seconds, because torch counts them. It supervises the ranks (supervisor.py): no
socket is open beyond the loopback interface, and no rank outlives the launcher. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP (a closed
terminal) are forwarded to the ranks, which save a checkpoint and exit; a second Ctrl-C ends them at once.
"""

import contextlib
import os
import re
import sys
from collections import Counter
from pathlib import Path

from ringspan.launch import sweep
from ringspan.launch.supervisor import Outcome, Supervisor
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import compose, rank_variables, validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.monitoring import console
from ringspan.trainer.planning.host_memory import num_cores
from ringspan.trainer.planning.machines import default_num_ranks

PROGRAM = "ringspan launch"


def main(argv: list[str] | None = None) -> int:
    """Run one job, or with --multirun the jobs of a sweep one after another; return the exit code of the first that failed."""
    console.protect()
    rank_variables.unset()
    argv = sys.argv[1:] if argv is None else argv
    multirun = any(text in ("--multirun", "-m") for text in argv)
    rank_flags = [text for text in argv if text.startswith("--ranks=")]
    rest = [text for text in argv if text not in (*rank_flags, "--multirun", "-m")]
    try:
        if "--ranks" in argv or "--ranks=" in argv:
            raise compose.ConfigError("--ranks takes a number, written with =: --ranks=2")
        counts_gpus = not rank_flags and validate.has_gpu()  # imports torch, which takes seconds
        if counts_gpus and not {"--help", "-h", "--cfg", "-c"} & {text.partition("=")[0] for text in rest}:
            print("starting a rank per GPU …", flush=True)
        num_ranks = _num_ranks(rank_flags)
        flags, overrides = compose.split_flags(rest)
        jobs = _number_names(compose.sweep(overrides, flags.get("config-dir"))) if multirun else [overrides]
    except compose.ConfigError as error:
        compose.fail(PROGRAM, error)
    flag_words = [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]
    os.environ["WORLD_SIZE"] = str(num_ranks)  # for the check below; the supervisor sets it for the ranks
    configs = [compose.main(PROGRAM, __doc__, [*flag_words, *job]).config for job in jobs]  # exits on a wrong config
    del os.environ["WORLD_SIZE"]
    if not counts_gpus:
        print(f"starting {num_ranks} rank{'s' * (num_ranks > 1)} …", flush=True)
    if (cores := num_cores()) < num_ranks and not validate.has_gpu():
        print(f"{num_ranks} ranks share {cores} core{'s' * (cores > 1)}, so they run slowly", file=sys.stderr)
    if len(jobs) == 1:
        return start([*flag_words, *jobs[0]], num_ranks)[0]
    common = set.intersection(*map(set, jobs))
    runs: list[tuple[str, Path, int]] = []
    same_name: Counter[Path] = Counter()  # jobs that differ only in their sharding share a name, and get numbers
    for number, (job, config) in enumerate(zip(jobs, configs, strict=True), 1):
        label = " ".join(text for text in job if text not in common)
        print(f"\n[{number} of {len(jobs)}] {label}", flush=True)
        first = run_folder.choose(config, number=1)
        same_name[first] += 1
        folder = run_folder.choose(config, number=same_name[first])
        words = [*flag_words, *job]
        if _is_finished(config, folder):
            print(f"{os.path.relpath(folder)} is finished, so it is not run again; checkpoint.resume=none runs it again")
            if not _evaluates_again(config, folder):
                runs.append((label, folder, 0))
                continue
            words += [f"name={folder.name}"] * (not config.name)
        else:
            folder = run_folder.choose(config)
        code, stopped = start(words, num_ranks)
        runs.append((label, folder, code))
        if stopped or code == 2:  # a signal stops the whole sweep; a wrong option (exit code 2) is in every job
            break
    print(f"\n{sweep.table(runs, configs[0].evaluate.batches)}")
    return next((code for *_, code in runs if code), 0)


def start(arguments: list[str], num_ranks: int) -> Outcome:
    """Run the trainer on all ranks until they exit."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    return Supervisor([sys.executable, "-m", "ringspan.trainer.train", *arguments], num_ranks, environment).run()


def _is_finished(config: Config, folder: Path) -> bool:
    """Whether this run has finished. A named folder may hold a run with other options, which the ranks report."""
    if config.checkpoint.resume == "none" or not run_folder.is_finished(folder):
        return False
    with contextlib.suppress(OSError, ValueError):
        return not config.name or run_folder.identity(run_folder.config_of(folder)) == run_folder.identity(config)
    return False


def _evaluates_again(config: Config, folder: Path) -> bool:
    """Whether a finished run was evaluated on another number of batches than this sweep, and has the weights for another."""
    before, wanted = sweep.outcome(folder)["batches"], config.evaluate.batches
    if not wanted or before == wanted or not (folder / "checkpoints" / f"step-{config.steps:08d}").is_dir():
        return False
    print(
        f"it was evaluated on {'an unknown number of' if before is None else before} batches, this sweep takes {wanted}: "
        "it is evaluated again",
        flush=True,
    )
    return True


def _number_names(jobs: list[list[str]]) -> list[list[str]]:
    """Append the job's number to a name that several jobs share, because each needs its own folder."""
    names = Counter(text for job in jobs for text in job if re.fullmatch(r"name=.*\w.*", text))
    return [
        [re.sub(r"(['\"]?)$", rf"-{number}\1", text, count=1) if names[text] > 1 else text for text in job]
        for number, job in enumerate(jobs, 1)
    ]


def _num_ranks(rank_flags: list[str]) -> int:
    """Value of the last --ranks=N, else the number of GPUs, else 2."""
    if rank_flags:
        text = rank_flags[-1].partition("=")[2]
        if not text.isdigit() or int(text) < 1:
            raise compose.ConfigError(f"{rank_flags[-1]}: not a number of ranks; at least 1 works")
        return int(text)
    return default_num_ranks(cpu=not validate.has_gpu())


if __name__ == "__main__":
    raise SystemExit(main())
