"""Time the benchmarks of two checkouts in turns on the same GPUs, so that both see the same clocks and temperature.

    git worktree add ../base COMMIT
    python -m tests.kernels.bench.alternate --base ../base --out k.json kernels --shapes d64-causal-16k --only hopper --rounds 9
    python -m tests.kernels.bench.alternate --base ../base --out r.json --ranks 2 ring --tokens 8k --only alone,ring-zigzag-copy

Each checkout runs `ringspan bench` in processes of its own. They take turns at each measurement, and who is first alternates by
round; meanwhile the other one waits with its GPU idle. Both compile before the first turn. The ratio of a round is time of
base ÷ time of new. Rows have the lower quartile, the median and the upper quartile over rounds. In a ring, points are
100 · (share of new - share of base), both shares of the new checkout's kernel alone in that round. A run that ends early writes
what it has measured.
"""

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL = 0.002  # seconds
TIMEOUT = 300.0  # seconds for the other checkout; it may compile meanwhile
ROLES = ("base", "new")
MAIN = {"kernels": "ringspan.kernels.bench.__main__", "ring": "ringspan.parallel.bench.__main__"}
ALONE = "one rank alone"  # label of the ring benchmark's kernel without communication
Row = dict[str, Any]


class Turns:
    """Turns of two checkouts: the ranks of one measure while those of the other wait.

    Args:
        folder: has a file for each step that a rank has reached.
        role: this checkout, of ROLES.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self.folder, self.role = folder, role
        self.other = ROLES[1 - ROLES.index(role)]
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.rounds = Counter[str]()  # by subject

    def take(self, subject: str, measure: Callable[[], Any]) -> Any:
        """Measure alone on the GPUs; return once the other checkout has measured the same subject in the same round."""
        number = self.rounds[subject]
        self.rounds[subject] += 1
        turn = f"{subject.replace('/', '_')} {number}"
        self._reach("arrived", turn)
        self._wait_for_other("arrived", turn)
        if self.role != ROLES[number % 2]:
            self._wait_for_other("measured", turn)
        result = measure()
        self._reach("measured", turn)
        self._wait_for_other("measured", turn)
        return result

    def _reach(self, step: str, turn: str) -> None:
        (self.folder / f"{self.role} {step} {turn} {self.rank}").touch()

    def _wait_for_other(self, step: str, turn: str) -> None:
        limit = time.monotonic() + TIMEOUT
        while not all((self.folder / f"{self.other} {step} {turn} {rank}").exists() for rank in range(self.world)):
            if time.monotonic() > limit:
                raise TimeoutError(f"the {self.other} checkout has not {step} in round {turn} after {TIMEOUT:g} s")
            time.sleep(POLL)


def work(role: str, folder: Path, bench: str, arguments: list[str]) -> int:
    """Run a benchmark of the checkout on PYTHONPATH in turns; write a row for each measurement."""
    turns, rows = Turns(folder, role), list[Row]()

    def in_turn(case: str, name: str, measure: Callable[[], Any], numbers: Callable[[Any], Row]) -> Any:
        try:
            timing = turns.take(f"{case} {name}", measure)
        except BaseException:  # the benchmark would go on without this kernel, and the other checkout would wait
            traceback.print_exc()
            os._exit(1)
        rows.append(dict(case=case, name=name) | numbers(timing))
        if turns.rank == 0:
            (folder / f"{role}.new").write_text(json.dumps(rows))
            os.replace(folder / f"{role}.new", folder / f"{role}.json")
        return timing

    main = importlib.import_module(MAIN[bench])
    if bench == "ring":
        time_candidate = main.time_candidate
        main.time_candidate = lambda candidate, setting, *rest: in_turn(
            setting.name,
            candidate.label,
            lambda: time_candidate(candidate, setting, *rest),
            lambda timing: dict(flops=timing.flops, forward=timing.forward, both=timing.both),
        )
    else:
        module = importlib.import_module("ringspan.kernels.bench.measure")
        time_round, kernels, names = module.time_round, module.kernels, dict[int, str]()

        def kernels_with_names() -> Any:
            table = kernels()
            names.update({id(kernel.run): name for name, kernel in table.items()})
            return table

        module.kernels = kernels_with_names
        module.time_round = lambda run, inputs, dout, shape, rep: in_turn(
            shape.name,
            names[id(run)],
            lambda: time_round(run, inputs, dout, shape, rep),
            lambda times: dict(forward=times[0], backward=times[1]),
        )
    return int(main.main(arguments) or 0)


def compare(base: list[Row], new: list[Row]) -> list[Row]:
    """Return a row for each case and name: ms of both and, with their spread over rounds, ratios and in a ring points."""
    table: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for pair in zip(base, new, strict=False):  # of a run that ended early one checkout may have a measurement more
        assert (pair[0]["case"], pair[0]["name"]) == (pair[1]["case"], pair[1]["name"])
        table.setdefault((pair[1]["case"], pair[1]["name"]), []).append(pair)
    rows = []
    for (case, name), pairs in table.items():
        row: Row = dict(case=case, name=name, rounds=len(pairs))
        for part in [key for key in pairs[0][1] if key not in ("case", "name", "flops")]:
            row[f"{part}_ms"] = [statistics.median(pair[i][part] for pair in pairs) for i in (0, 1)]
            row[f"{part}_ratio"] = spread([old[part] / own[part] for old, own in pairs])
            if name != ALONE and (case, ALONE) in table:
                alone = [own[part] / own["flops"] for _, own in table[case, ALONE]]
                shares = [
                    [kernel * row["flops"] / row[part] for row in pair] for kernel, pair in zip(alone, pairs, strict=False)
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
    parser.add_argument("bench", choices=MAIN)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of `ringspan bench`")
    args = parser.parse_args()
    if not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist; make it first")
    trees = dict(zip(ROLES, (args.base.resolve(), args.new.resolve()), strict=True))
    result = about(trees) | dict(bench=args.bench, arguments=args.arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory() as name:
        folder, workers = Path(name), []
        for index, (role, tree) in enumerate(trees.items()):
            launcher = [sys.executable]
            if args.ranks > 1:
                launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}"]
                launcher += [f"--master-port={args.port + index}"]
            command = [*launcher, str(Path(__file__).resolve()), "--worker", role, name, args.bench, *args.arguments]
            paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            workers.append(subprocess.Popen(command, cwd=tree, env=env, stdout=sys.stderr if index else subprocess.DEVNULL))
        try:
            while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
                time.sleep(0.2)
        finally:
            for worker in workers:
                worker.terminate()  # the other one, if one failed
            codes = [worker.wait() for worker in workers]
            found = [json.loads(path.read_text()) if (path := folder / f"{role}.json").exists() else [] for role in ROLES]
            result |= dict(rows=compare(*found), times=dict(zip(ROLES, found, strict=True)))
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            for row in result["rows"]:
                print(json.dumps(row))
    return max(map(abs, codes))


def about(trees: dict[str, Path]) -> Row:
    """Return the machine, and the commits of both checkouts."""
    import torch

    from ringspan.kernels.bench.measure import machine
    from tests.trainer.memory.alternate import commit

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {name: value for name, value in machine(device).items() if name != "commit"}
    return dict(kind="benchmarks of two checkouts") | found | {role: commit(tree) for role, tree in trees.items()}


if __name__ == "__main__":
    sys.exit(main())
