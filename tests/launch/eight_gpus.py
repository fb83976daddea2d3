"""Measurements on eight GPUs of one host, each of at most nine minutes.

python -m tests.launch.eight_gpus NAME --out DIR

    step            Qwen3 8B with 1,048,576 tokens: a short warm-up, then one step, next to its prediction
    ring            shares of the kernel alone at 8k and 32k tokens per GPU, next to Ulysses and torch's context_parallel
    ring-128k       likewise at 128k
    tests           tests/parallel/test_gpu.py on eight ranks, without sweeps of accuracy
    tests-accuracy  those of `copy` on eight ranks
    rehearsal       on one GPU, beforehand: shares of a simulated ring of eight ranks, for `ring`
    rehearsal-128k  likewise for `ring-128k`

Each writes its results into DIR. For H100s add `--hardware h100`.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from ringspan import ROOT

LIMIT = 500  # seconds of a command
GRACE = 20  # seconds between signals after that
CANDIDATES = "alone,ring-zigzag-copy,ring-zigzag-p2p,ulysses,torch-cp-allgather,torch-cp-alltoall"
RING = "-m torch.distributed.run --nproc-per-node=8 -m ringspan.parallel.bench --heads 16/16 16/4 --cycles --only " + CANDIDATES
REHEARSAL = "-m ringspan.parallel.bench.rehearse --ranks 8 --rank 0 3 7 --heads 16/16 16/4 --cycles --rounds 3"
TESTS = "-m pytest tests/parallel/test_gpu.py -v"
COMMANDS = {  # of Python
    "step": "-m tests.trainer.memory.long_steps run qwen3-8b-1m-8-{hardware} --out {out}",
    "ring": RING + " --tokens 8k 32k --rounds 5 --rep 120 --json {out}/ring-8-{hardware}.json",
    "ring-128k": RING + " --tokens 128k --rounds 3 --rep 300 --json {out}/ring-8-128k-{hardware}.json",
    "tests": TESTS + " --junitxml={out}/tests-8.xml -k '8 and not accurate and not equals'",
    "tests-accuracy": TESTS + " --junitxml={out}/tests-accuracy-8.xml -k '8-1 and copy and (accurate or equals)'",
    "rehearsal": REHEARSAL + " --tokens 8k 32k --json {out}/rehearsal-8-{hardware}.json",
    "rehearsal-128k": REHEARSAL + " --tokens 128k --json {out}/rehearsal-8-128k-{hardware}.json",
}


def command(name: str, hardware: str, out: Path) -> list[str]:
    """Return the arguments of a command."""
    return [sys.executable, *shlex.split(COMMANDS[name].format(hardware=hardware, out=shlex.quote(str(out))))]


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit status, or 1 if it reached the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("--hardware", choices=("h100", "h200"), default="h200")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command(args.name, args.hardware, args.out.resolve()), cwd=ROOT, start_new_session=True)
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        print(f"{args.name}: ended after {LIMIT} s", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # pytest writes its report on the first
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
            break
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
