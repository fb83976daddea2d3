"""Measure that sharding does not change training: one step of a toy model under every split, against one rank.

    ringspan parity                          1, 2 and 4 gloo ranks × ZeRO 0 to 3
    ringspan parity ranks=[1,2] zero=[0,3]

Each row is a split into ring, ulysses and data, and a ZeRO stage. The batch has uneven documents and three micro-batches. The
loss and every gradient are compared with one rank at ZeRO 0, in fp32. The table shows the largest deviation, relative to the
largest element of that gradient. Gradients are read before clipping, through the optimizer: Adam's averages start at zero, so
that the first average after a step is (1 - β₁) · gradient.
"""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringspan import ROOT
from ringspan.trainer.config import compose
from ringspan.trainer.config.schema import option
from ringspan.trainer.monitoring import console

PROGRAM = "ringspan parity"
TOY = [
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.mlp_dim=48", "model.name=toy",
    "model.head_dim=16", "data.length=150", "data.batch=12", "steps=1", "schedule=constant", "schedule.warmup=0",
    "optim.clip=0", "debug.watchdog=0", "parallel.device=cpu", "parallel.timeout=120", "checkpoint.resume=none",
]  # fmt: skip
HEADS, BATCH = (int(dict(text.split("=") for text in TOY)[key]) for key in ("model.heads", "data.batch"))
SEQUENCES = BATCH // 3  # of all ranks in a micro-batch: accumulation 3


@dataclass
class Parity:
    """Options of the command."""

    ranks: list[int] = option([1, 2, 4], "numbers of ranks", least=1)
    zero: list[int] = option([0, 1, 2, 3], "ZeRO stages")
    steps: int = option(1, "steps; after the first, only losses are compared", least=1)
    save: str = option("", "a JSON file for the results")


@dataclass(frozen=True)
class Split:
    """A way to distribute the toy over ranks."""

    ring: int
    ulysses: int
    data: int
    zero: int

    @property
    def options(self) -> list[str]:
        mesh = [f"parallel.{name}={getattr(self, name)}" for name in ("ring", "ulysses", "data")]
        return [*mesh, f"engine.zero={self.zero}", f"data.micro_batch={SEQUENCES // self.data}"]

    def __str__(self) -> str:
        return f"ring {self.ring} × ulysses {self.ulysses} × data {self.data}, ZeRO {self.zero}"


def splits(num_ranks: int, stages: list[int]) -> Iterator[Split]:
    """Yield every split that the toy's heads and sequences can be divided into; a ring may have any number of ranks."""
    for ring, ulysses, data in meshes(num_ranks):
        if not indivisible(ulysses, data):
            yield from (Split(ring, ulysses, data, zero) for zero in stages)


def meshes(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield every (ring, ulysses, data) of this many ranks."""
    for ring in range(1, num_ranks + 1):
        for ulysses in range(1, num_ranks // ring + 1):
            if num_ranks % (ring * ulysses) == 0:
                yield ring, ulysses, num_ranks // (ring * ulysses)


def indivisible(ulysses: int, data: int) -> str:
    """Return why the toy cannot be divided over these ranks, or ""."""
    if HEADS % ulysses:
        return f"the toy's {HEADS} heads are no multiple of ulysses {ulysses}"
    return f"the toy's {SEQUENCES} sequences per micro-batch are no multiple of data {data}" if SEQUENCES % data else ""


def main(argv: list[str] | None = None) -> int:
    options = compose.parse_flat(Parity, PROGRAM, __doc__, argv)
    results: dict[Split, dict[str, Any]] = {}
    reference = Split(1, 1, 1, 0)
    print(f"{'split':44}  {'loss':>9}  {'gradients':>9}  largest relative deviation from one rank, and its weight", flush=True)
    for num_ranks in sorted({1, *options.ranks}):
        selected = list(splits(num_ranks, options.zero)) if num_ranks in options.ranks else []
        for ring, ulysses, data in meshes(num_ranks):
            if reason := indivisible(ulysses, data):
                print(f"left out: ring {ring} × ulysses {ulysses} × data {data}, because {reason}", flush=True)
        if num_ranks == 1 and reference not in selected:
            selected.insert(0, reference)
        results |= measure(num_ranks, selected, options.steps, expected=results.get(reference), show=True)
    rows, worst = [], 0.0
    for split, result in results.items():
        row = compare(result, results[reference])
        rows.append(dict(split=str(split), **row))
        worst = max(worst, row["loss"], row["gradients"])
    print(f"largest deviation: {worst:.1e}; fp32 has a relative precision of 6.0e-08")
    if options.save:
        Path(options.save).write_text(json.dumps(dict(rows=rows, worst=worst, steps=options.steps), indent=1))
    return 0


def compare(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return the largest relative deviations of the losses and gradients, and the weight with the largest one."""
    import numpy as np

    loss = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], expected["losses"], strict=True))
    deviations = {}
    for name, gradient in expected["gradients"].items():
        a, b = np.asarray(result["gradients"][name]), np.asarray(gradient)
        deviations[name] = float(np.abs(a - b).max() / np.abs(b).max())
    where = max(deviations, key=lambda name: deviations[name])
    return dict(loss=loss, gradients=deviations[where], where=where)


def measure(
    num_ranks: int,
    selected: list[Split],
    steps: int = 1,
    extra: list[str] | None = None,
    start: Callable[[int, dict[str, Any]], list[int | None]] | None = None,
    expected: dict[str, Any] | None = None,
    show: bool = False,
) -> dict[Split, dict[str, Any]]:
    """Run splits one after the other in one set of processes.

    Args:
        num_ranks: number of processes.
        selected: the splits.
        steps: steps of each run.
        extra: more overrides of the config.
        start: runs `run_rank` on every rank and returns the exit codes; None: `start_processes`.
        expected: result that each split is compared with; None: that of the first split.
        show: print each comparison as soon as its split has run.

    Returns:
        The losses and gradients of each split.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = dict(splits=[vars(split) for split in selected], steps=steps, extra=extra or [], folder=folder, show=show)
        (Path(folder) / "expected.json").write_text(json.dumps(expected))
        codes = (start or start_processes)(num_ranks, task)
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        results = json.loads((Path(folder) / "results.json").read_text())
    return dict(zip(selected, results, strict=True))


def start_processes(num_ranks: int, task: dict[str, Any]) -> list[int | None]:
    """Run `run_rank` in new processes and return their exit codes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    common = os.environ | dict(WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    code = f"import json; from ringspan.trainer.parity import run_rank; run_rank(json.loads({json.dumps(json.dumps(task))}))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=common | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            cwd=ROOT,
        )
        for rank in range(num_ranks)
    ]
    return [rank.wait() for rank in ranks]


def run_rank(task: dict[str, Any]) -> None:
    """Run every split of a task as one rank."""
    import torch
    import torch.distributed as dist

    from ringspan.trainer import network

    console.protect()
    torch.set_num_threads(1)
    network.init_process_group("gloo", timedelta(minutes=10))
    results: list[dict[str, Any]] = []
    expected = json.loads((Path(task["folder"]) / "expected.json").read_text())
    for number, split in enumerate(task["splits"]):
        options = [*TOY, *Split(**split).options, f"runs={task['folder']}", f"name=split-{number}", f"steps={task['steps']}"]
        with contextlib.redirect_stdout(io.StringIO()):
            results.append(_train(compose.load([*options, *task["extra"]])))
        if task["show"] and int(os.environ["RANK"]) == 0:
            row = compare(results[-1], expected or results[0])
            name = str(Split(**split))
            print(f"{name:44}  {row['loss']:9.1e}  {row['gradients']:9.1e}  {row['where']}", flush=True)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        (Path(task["folder"]) / "results.json").write_text(json.dumps(results))


def _train(composed: compose.Composed) -> dict[str, Any]:
    """Return the losses of all steps and the gradients of the first one."""
    from ringspan.trainer.loop import train
    from ringspan.trainer.run import Run

    losses: list[float] = []
    gradients: dict[str, list[float]] = {}
    run = Run(composed)

    def report(step: int, total: Any, *rest: Any) -> None:
        losses.append(total.loss)
        if step == 1:
            scale = 1 - composed.config.optim.betas[0]
            gradients.update({name: (run.engine.read(name)["exp_avg"] / scale).flatten().tolist() for name in run.engine.names})

    run.report = report  # type: ignore[method-assign, assignment]
    run.save = lambda: None  # type: ignore[method-assign]
    train(run)
    run.close()
    return dict(losses=losses, gradients=gradients)


if __name__ == "__main__":
    raise SystemExit(main())
