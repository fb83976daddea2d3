"""Measurements on eight GPUs of one host, each of at most nine minutes.

python -m tests.launch.eight_gpus NAME --out DIR

    step        Qwen3 8B with 1,048,576 tokens: a short warm-up, then one step, next to its prediction
    ring        shares of the kernel alone at 8k and 32k tokens per GPU, next to Ulysses and torch's context_parallel
    ring-128k   likewise at 128k
    tests       tests/parallel/test_gpu.py on eight ranks
    rehearsal   on one GPU, beforehand: shares of a simulated ring of eight ranks

Each writes its results into DIR. For H100s add `--hardware h100`.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from ringspan import ROOT

LIMIT = 540  # seconds of a command
CANDIDATES = "alone,ring-zigzag-copy,ring-zigzag-p2p,ulysses,torch-cp-allgather,torch-cp-alltoall"
RING = "-m torch.distributed.run --nproc-per-node=8 -m ringspan.parallel.bench --heads 16/16 16/4 --cycles --only " + CANDIDATES
COMMANDS = {  # of Python
    "step": "-m tests.trainer.memory.long_steps run qwen3-8b-1m-8-{hardware} --out {out}",
    "ring": RING + " --tokens 8k 32k --rounds 5 --rep 120 --json {out}/ring-8-{hardware}.json",
    "ring-128k": RING + " --tokens 128k --rounds 3 --rep 300 --json {out}/ring-8-128k-{hardware}.json",
    "tests": "-m pytest tests/parallel/test_gpu.py -v --junitxml={out}/tests-8.xml -k '8 or 4-2'",
    "rehearsal": "-m ringspan.parallel.bench.rehearse --ranks 8 --rank 0 3 7 --tokens 8k 32k --heads 16/16 16/4 --cycles "
    "--rounds 3 --json {out}/rehearsal-8-{hardware}.json",
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
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        print(f"{args.name}: ended after {LIMIT} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
