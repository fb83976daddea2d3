"""Ranks for the tests: a fork server imports everything once and forks each rank, which runs a job of this module."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOY = [
    "data=text", f"data.sources.text.paths=[{ROOT}/kernels/*.py]", "data.sources.recall.kind=recall",
    "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=4", "model.mlp_dim=48", "model.head_dim=16",
    "data.length=150", "data.batch=4", "data.micro_batch=2", "parallel.device=cpu", "parallel.timeout=60", "debug.watchdog=0",
    "evaluate.sample=0", "evaluate.batches=1", "tracking.log_every=1", "schedule.warmup=0", "optim.lr=3e-3",
]  # fmt: skip

# DeepSpeed reads it at import, which happens in the fork server before any test.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.trainer.warm"])


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no outgoing connection takes it before its use."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


output = ""  # stdout and stderr of the last call's ranks


def run_ranks(world: int, job: Callable[..., None], *args: Any, limit: float = 240) -> list[int | None]:
    """Run a job on all ranks and return their exit codes. As under torchrun, one failed rank ends the others."""
    global output
    with tempfile.NamedTemporaryFile("r") as file:
        codes = _run_ranks(world, file.name, job, args, limit)
        output = file.read()
        print(output)  # pytest shows it when a test fails
        return codes


def _run_ranks(world: int, path: str, job: Callable[..., None], args: tuple[Any, ...], limit: float) -> list[int | None]:
    port = free_port()
    ranks = [context.Process(target=_start, args=(rank, world, port, path, job, args)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + limit
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        if any(rank.exitcode for rank in ranks):
            time.sleep(0.2)  # lets the failing rank print its message
            break
        time.sleep(0.02)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _start(rank: int, world: int, port: int, path: str, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in names.items()})
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        job(*args)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may wait for a dead rank


def train(options: list[str], hook: Callable[..., None] | None = None, *args: Any) -> None:
    """Train the toy; `hook(run, …)` may change the run before it starts."""
    train_plain([*TOY, *options], hook, *args)


def train_plain(options: list[str], hook: Callable[..., None] | None = None, *args: Any) -> None:
    """Train without the toy's options."""
    from ringspan.trainer import loop
    from ringspan.trainer.config import compose
    from ringspan.trainer.run import Run

    run = Run(compose.load(options))
    if hook is not None:
        hook(run, *args)
    if loop.train(run):
        run.finish()
    run.close()


def run_train_command(options: list[str]) -> None:
    """Train the toy as `ringspan train` does, with its messages and exit code."""
    from ringspan.trainer import train
    from ringspan.trainer.config import compose

    raise SystemExit(train.run(compose.load([*TOY, *options])))


def kill_after(run: Any, step: int) -> None:
    """Kill every rank with SIGKILL after this step's line is written."""
    report = run.report

    def report_and_die(number: int, *rest: Any) -> None:
        report(number, *rest)
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    run.report = report_and_die


def poison(run: Any, steps: list[int]) -> None:
    """Make the last rank's loss NaN in these steps; the other ranks' losses stay finite."""
    backward = run.engine.backward

    def poisoned(loss: Any, labels: float) -> None:
        bad = run.position.step + 1 in steps and run.distributed.rank == run.distributed.world - 1
        backward(loss * float("nan") if bad else loss, labels)

    run.engine.backward = poisoned


def send_signal(run: Any, number: int, step: int) -> None:
    """Send a signal to the last rank during a step."""
    report = run.report

    def report_and_signal(current: int, *rest: Any) -> None:
        report(current, *rest)
        if current == step and run.distributed.rank == run.distributed.world - 1:
            os.kill(os.getpid(), number)

    run.report = report_and_signal


class FakeEngine:
    """A few weights with the engine methods that a save calls."""

    def __init__(self, value: float) -> None:
        import torch

        self.values = {f"w{i}": torch.full((40, 10 + i), value + i) for i in range(4)}
        self.names = list(self.values)
        self.applied = 1

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def moments(self, name: str) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def replicas(self) -> list[tuple[str, Any]]:
        return list(self.values.items())

    def read(self, name: str) -> dict[str, Any]:
        return {"weight": self.values[name], "exp_avg": self.values[name] / 2, "exp_avg_sq": self.values[name] ** 2}


def save_fake(folder: str, steps: list[int], keep_last: int = 5, die_at: str = "", die_rank: int = 0) -> None:
    """Save these steps; with `die_at`, kill `die_rank` at that point of the last save."""
    from ringspan.trainer.checkpoint import checkpoint, reader
    from ringspan.trainer.config import schema, validate
    from ringspan.trainer.distributed import DistributedContext

    options = schema.Config()
    options.parallel.device, options.parallel.timeout = "cpu", 30.0
    distributed = DistributedContext(options)
    assert validate.mesh_of(options, distributed.world)[1] == distributed.world
    for step in steps:
        if step == steps[-1] and die_at and distributed.rank == die_rank:
            kill_at_call(die_at)
        engine: Any = FakeEngine(float(step))
        keep = schema.Checkpoint(keep_last=keep_last)
        problem = checkpoint.save(Path(folder), engine, reader.Position(step=step), {}, distributed, keep)
        (Path(folder) / f"problem-{step}-{distributed.rank}").write_text(problem)
    distributed.close()


def kill_at_call(point: str) -> None:
    """Kill this process with SIGKILL at the n-th call of a function: "json.dumps:2"."""
    import importlib

    name, _, count = point.partition(":")
    owner_name, _, attribute = name.rpartition(".")
    module, _, inner = owner_name.partition("/")
    owner: Any = importlib.import_module(module)
    if inner:
        owner = getattr(owner, inner)
    original = getattr(owner, attribute)
    calls_left = [int(count or 1)]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls_left[0] -= 1
        if calls_left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, attribute, deadly)
