"""Time training steps of two checkouts on the same GPUs, in turns within one job.

    git worktree add ../base COMMIT
    python -m tests.trainer.memory.alternate --base ../base --out steps.json 1b-128k gpt2-8k

Both checkouts load and compile side by side, then train in turns of a few steps, while the other waits between two steps with
its GPU idle. So both see the same clocks and temperature, and each compiles once. A turn's first step is not counted.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan import ROOT

COMMON = [
    "data=recall", "schedule.warmup=0", "checkpoint=none", "evaluate.batches=0", "evaluate.sample=0",
    "debug.watchdog=0", "parallel.timeout=900", "tracking.log_every=1", "steps=100000",
]  # fmt: skip
WARM_UP = 1  # steps of each checkout before the first turn
PATIENCE = 240.0  # seconds for the other checkout's turn


@dataclass(frozen=True)
class Comparison:
    """Options of both checkouts; `base` and `new` add those that only one of them has."""

    options: str
    gpus: int = 1
    base: str = ""
    new: str = ""
    turns: int = 4
    steps: int = 4  # of a turn, the first included


ATTENTION_KEPT: dict[str, Any] = dict(base="engine.activations=attention", new="engine.memory='x/1 outs=16'")
ONE_B, WIDTH_8B = "model=llama-1b engine=zero1 data.batch=1", "model=llama-8b engine=zero1 model.layers=4 data.batch=1"
GPT2 = "model=gpt2-124m engine=zero1 data.length=8k data.batch=32 data.micro_batch=4"
COMPARISONS = {
    "1b-128k": Comparison(f"{ONE_B} data.length=128k", turns=3, steps=2, **ATTENTION_KEPT),
    "1b-128k-ring-2": Comparison(f"{ONE_B} data.length=128k parallel.ring=2", 2, turns=3, steps=2, **ATTENTION_KEPT),
    "1b-16k-ring-2": Comparison(
        f"{ONE_B} data.length=16k parallel.ring=2", 2, "engine.activations=none", "engine.memory=none", turns=5, steps=11
    ),
    "gpt2-8k": Comparison(GPT2, 1, "engine.activations=none", "engine.memory=none", turns=4, steps=5),
    "8b-window-4k": Comparison(
        f"{WIDTH_8B} model.windows=[4096] data.length=32k",
        1,
        "engine.activations=attention",
        "engine.memory='x/1 outs=4'",
        steps=6,
    ),
    "toy": Comparison("model=tiny data.length=256 data.batch=2 parallel.device=cpu parallel.ring=2", 2, turns=2, steps=3),
}


def take_turns(folder: Path, own: str, turns: int, steps: int) -> Callable[[], None]:
    """Return what a rank calls at the end of each step; it waits for its turn, and ends the process after the last one."""
    first, rank, world = own == "base", os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    other = "new" if first else "base"
    began = 0.0
    times: list[float] = []
    turn, count = -1, 0

    def wait(number: int) -> None:
        """Wait until all ranks of the other checkout have ended this turn."""
        limit = time.monotonic() + PATIENCE
        while len(list(folder.glob(f"{other}-{number}-*"))) < world:
            if time.monotonic() > limit:
                raise TimeoutError(f"{own}: the checkout {other} did not end its turn {number} in {PATIENCE:.0f} s")
            time.sleep(0.001)

    def end_of_step() -> None:
        nonlocal turn, count, began
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done = time.perf_counter()
        if turn >= 0 and count > 0:
            times.append(done - began)
        count += 1
        if count == (WARM_UP if turn < 0 else steps):
            (folder / f"{own}-{turn}-{rank}").write_text(json.dumps(times))
            turn, count = turn + 1, 0
            wait(turn - 1 if first else min(turn, turns - 1))
            if turn == turns:
                os._exit(0)  # a checkpoint would be written during the other checkout's turn
        began = time.perf_counter()

    return end_of_step


def train_in_turns(folder: str, own: str, turns: str, steps: str, *options: str) -> None:
    """Run a checkout's trainer until all turns are over."""
    from ringspan.trainer import loop, train

    end_of_step, reduce = take_turns(Path(folder), own, int(turns), int(steps)), loop.Sums.reduce

    def reduce_and_wait(*args: Any, **keywords: Any) -> Any:
        total = reduce(*args, **keywords)
        end_of_step()
        return total

    loop.Sums.reduce = reduce_and_wait  # type: ignore[method-assign]
    raise SystemExit(train.main(list(options)))


def compare(name: str, base: Path, logs: Path, port: int) -> dict[str, Any]:
    """Run a comparison. The checkouts' output goes into files in `logs`, which show how far a cut comparison came."""
    run = COMPARISONS[name]
    with tempfile.TemporaryDirectory() as text:
        folder, processes = Path(text), {}
        for index, (own, tree) in enumerate({"base": base.resolve(), "new": ROOT}.items()):
            more = shlex.split(run.base if own == "base" else run.new)
            options = [*run.options.split(), *COMMON, *more, f"runs={folder}/runs", f"name={own}"]
            launch = ["torch.distributed.run", f"--nproc-per-node={run.gpus}", f"--master-port={port + index}"]
            command = [sys.executable, "-m", *launch, __file__, text, own, str(run.turns), str(run.steps), *options]
            paths = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
            environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
            log = (logs / f"{name}-{own}.log").open("w")
            processes[own] = subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT)
        for own, process in processes.items():
            if process.wait():
                print((logs / f"{name}-{own}.log").read_text()[-3000:])
        last = {own: folder / f"{own}-{run.turns - 1}-0" for own in processes}
        if not all(path.exists() for path in last.values()):
            return dict(options=run.options, error="a checkout did not finish")
        seconds = {own: json.loads(path.read_text()) for own, path in last.items()}
    median = {own: statistics.median(times) for own, times in seconds.items()}
    result = dict(options=run.options, gpus=run.gpus, base_options=run.base, new_options=run.new)
    return result | dict(seconds=seconds, median=median, speed=median["base"] / median["new"])


def commit(tree: Path) -> str:
    """Return a checkout's commit, or the one in its file COMMIT where it came without a repository; "unknown" without both."""
    if (tree / "COMMIT").exists():
        return (tree / "COMMIT").read_text().strip()
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=COMPARISONS)
    parser.add_argument("--base", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--out", type=Path, default=Path("steps.json"))
    parser.add_argument("--port", type=int, default=29731)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    results: dict[str, Any] = dict(kind="steps of two commits", device=device, base=commit(args.base), results={})
    for number, name in enumerate(args.names):
        results["results"][name] = found = compare(name, args.base, args.out.parent, args.port + 2 * number)
        print(name, {key: found[key] for key in ("median", "speed", "error") if key in found}, flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_in_turns(*sys.argv[1:])
    else:
        main()
