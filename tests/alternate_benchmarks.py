"""Time the benchmarks of two checkouts in turns on the same GPUs, so that both see the same clocks and temperature.

    git worktree add ../base COMMIT
    python -m tests.alternate_benchmarks --base ../base --out k.json kernels --shapes d128-causal-16k --only hopper --rounds 9
    python -m tests.alternate_benchmarks --base ../base --out r.json --ranks 2 ring --tokens 32k --only alone,ring-zigzag-copy

Each checkout runs `ringspan bench` in processes of its own. They take turns at each measurement of each round; meanwhile the
other one waits with its GPU idle. Both compile before the first turn. The ratio of a round is time of base ÷ time of new. Rows
have the lower quartile, the median and the upper quartile over rounds. In a ring, points are 100 · (share of new - share of
base), both shares of the new checkout's kernel alone in that round.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL = 0.002  # seconds
PATIENCE = 300.0  # seconds for the other checkout; it may compile meanwhile
ROLES = ("base", "new")
BENCHES = {
    "kernels": ("ringspan.kernels.bench.__main__", "ringspan.kernels.bench.measure", "time_round"),
    "ring": ("ringspan.parallel.bench.__main__", "ringspan.parallel.bench.__main__", "time_candidate"),
}
ALONE = "one rank alone"  # label of the ring benchmark's kernel without communication
Row = dict[str, Any]


class Turns:
    """Turns of two checkouts: the ranks of one measure while those of the other wait."""

    def __init__(self, folder: Path, role: str) -> None:
        """Join the turns; `folder` has a file for each step that a rank has reached."""
        self.folder, self.role = folder, role
        self.other = ROLES[1 - ROLES.index(role)]
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.count = 0

    def take(self, measure: Callable[[], Any]) -> Any:
        """Call `measure` alone on the GPUs; return once the other checkout has measured as well."""
        self._reach("arrived")
        self._wait_for_other("arrived")
        if self.role == "new":
            self._wait_for_other("measured")
        result = measure()
        self._reach("measured")
        self._wait_for_other("measured")
        self.count += 1
        return result

    def _reach(self, step: str) -> None:
        (self.folder / f"{self.role}-{step}-{self.count}-{self.rank}").touch()

    def _wait_for_other(self, step: str) -> None:
        limit = time.monotonic() + PATIENCE
        while not all((self.folder / f"{self.other}-{step}-{self.count}-{rank}").exists() for rank in range(self.world)):
            if time.monotonic() > limit:
                raise TimeoutError(f"the {self.other} checkout has not {step} at turn {self.count} in {PATIENCE:g} s")
            time.sleep(POLL)


def work(role: str, folder: Path, bench: str, arguments: list[str]) -> int:
    """Run a benchmark of the checkout on PYTHONPATH in turns; write a row for each measurement."""
    import importlib

    main_module, patched, name = BENCHES[bench]
    module = importlib.import_module(patched)
    measure, turns, rows = getattr(module, name), Turns(folder, role), list[Row]()

    def measure_in_turn(subject: Any, *context: Any) -> Any:
        timing = turns.take(lambda: measure(subject, *context))
        if bench == "kernels":
            rows.append(dict(case=context[2].name, name=subject.args[0], forward=timing[0], backward=timing[1]))
        else:
            rows.append(
                dict(case=context[0].name, name=subject.label, flops=timing.flops, forward=timing.forward, both=timing.both)
            )
        if turns.rank == 0:
            (folder / f"{role}.json").write_text(json.dumps(rows))
        return timing

    setattr(module, name, measure_in_turn)
    return int(importlib.import_module(main_module).main(arguments) or 0)


def compare(base: list[Row], new: list[Row]) -> list[Row]:
    """Return a row for each case and name: ms of both and, with their spread over rounds, ratios and in a ring points."""
    table: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for old, own in zip(base, new, strict=False):  # a cut run may lack the last measurement of new
        assert (old["case"], old["name"]) == (own["case"], own["name"])
        table.setdefault((own["case"], own["name"]), []).append((old, own))
    rows = []
    for (case, name), pairs in table.items():
        row: Row = dict(case=case, name=name, rounds=len(pairs))
        for part in [key for key in pairs[0][1] if key not in ("case", "name", "flops")]:
            row[f"{part}_ms"] = [statistics.median(pair[i][part] for pair in pairs) for i in (0, 1)]
            row[f"{part}_ratio"] = spread([old[part] / own[part] for old, own in pairs])
            if name != ALONE and (case, ALONE) in table:
                kernels = [own[part] / own["flops"] for _, own in table[case, ALONE]]
                shares = [
                    [kernel * row["flops"] / row[part] for row in pair] for kernel, pair in zip(kernels, pairs, strict=True)
                ]
                row[f"{part}_share"] = spread([own for _, own in shares])
                row[f"{part}_points"] = spread([100 * (own - old) for old, own in shares])
        rows.append(row)
    return rows


def spread(values: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(value, 4) for value in quartiles]


def main() -> int:
    """Run both checkouts; print and write the comparison."""
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--new", type=Path, default=Path(), help="folder of the new checkout (default: this one)")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=29611, help="first of two ports for torchrun")
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of `ringspan bench`")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    workers = []
    for index, (role, tree) in enumerate(zip(ROLES, (args.base, args.new), strict=True)):
        launcher = [sys.executable]
        if args.ranks > 1:
            launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", f"--master-port={args.port + index}"]
        command = [*launcher, str(Path(__file__).resolve()), "--worker", role, str(folder), args.bench, *args.arguments]
        paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        workers.append(subprocess.Popen(command, cwd=tree, env=env, stdout=sys.stderr if index else subprocess.DEVNULL))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            time.sleep(0.2)
    finally:  # also when this process is ended: what was measured is written
        for worker in workers:
            worker.terminate()  # the other one, if one failed
        codes = [worker.wait() for worker in workers]
        results = [json.loads(path.read_text()) if (path := folder / f"{role}.json").exists() else [] for role in ROLES]
        rows = compare(*results)
        about = dict(kind="benchmarks of two checkouts", bench=args.bench, arguments=args.arguments, device=device_name())
        args.out.write_text(json.dumps(about | dict(rows=rows, times=dict(zip(ROLES, results, strict=True))), indent=1) + "\n")
        for row in rows:
            print(json.dumps(row))
    return max(map(abs, codes))


def device_name() -> str:
    """Return the name of the first GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    sys.exit(main())
