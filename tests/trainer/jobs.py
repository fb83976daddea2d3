"""What forked ranks run for the tests, and how they are started: one process imports everything once and forks them all."""

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

# DeepSpeed reads it when it is imported, which the forkserver does before any test.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.trainer.warm"])


def free_port() -> int:
    """Below the range from which outgoing connections take theirs, so that none takes it in between."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


said = ""  # by the ranks of the last call, on stdout and stderr


def run_ranks(world: int, job: Callable[..., None], *args: Any, limit: float = 240) -> list[int | None]:
    """The exit codes. As under torchrun, the others are ended as soon as one has failed."""
    global said
    with tempfile.NamedTemporaryFile("r") as output:
        codes = _run_ranks(world, output.name, job, args, limit)
        said = output.read()
        print(said)  # pytest shows it when a test fails
        return codes


def _run_ranks(world: int, output: str, job: Callable[..., None], args: tuple[Any, ...], limit: float) -> list[int | None]:
    port = free_port()
    ranks = [context.Process(target=_start, args=(rank, world, port, output, job, args)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + limit
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        if any(rank.exitcode for rank in ranks):
            time.sleep(0.2)  # the failing rank's message first
            break
        time.sleep(0.02)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _start(rank: int, world: int, port: int, output: str, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in names.items()})
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
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
    os._exit(code)  # threads that wait for a dead rank would keep it


def train(options: list[str], hook: Callable[..., None] | None = None, *args: Any) -> None:
    """A whole run; `hook(run, …)` may change it before it starts."""
    train_plain([*TOY, *options], hook, *args)


def train_plain(options: list[str], hook: Callable[..., None] | None = None, *args: Any) -> None:
    from ringspan.trainer import loop
    from ringspan.trainer.config import compose
    from ringspan.trainer.run import Run

    run = Run(compose.load(options))
    if hook is not None:
        hook(run, *args)
    if loop.train(run):
        run.finish()
    run.close()


def train_in_a_mebibyte(options: list[str]) -> None:
    from ringspan.trainer.monitoring import profiling

    profiling.memory_of_a_rank = lambda device: 2**20
    train(options)


def kill_after(run: Any, step: int) -> None:
    """kill -9 of every rank once this step's line is written."""
    report = run.report

    def then_die(number: int, *rest: Any) -> None:
        report(number, *rest)
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    run.report = then_die


def poison(run: Any, steps: list[int]) -> None:
    """The last rank's loss is NaN in these steps; the others' are healthy."""
    backward = run.engine.backward

    def poisoned(loss: Any, labels: float) -> None:
        bad = run.position.step + 1 in steps and run.distributed.rank == run.distributed.world - 1
        backward(loss * float("nan") if bad else loss, labels)

    run.engine.backward = poisoned


def send(run: Any, number: int, step: int) -> None:
    """One rank gets a signal in the middle of a step."""
    report = run.report

    def then_signal(at: int, *rest: Any) -> None:
        report(at, *rest)
        if at == step and run.distributed.rank == run.distributed.world - 1:
            os.kill(os.getpid(), number)

    run.report = then_signal


def local_attention(run: Any) -> None:
    """The ring broken on purpose: each rank sees only the keys that it has itself."""
    from ringspan import Mask, attention

    def alone(q: Any, k: Any, v: Any, mask: Mask, **options: Any) -> Any:
        return attention(q, k, v, mask=Mask(causal=True))

    run.model.attention = alone


class FakeEngine:
    """A few weights that only know how to be saved."""

    def __init__(self, value: float) -> None:
        import torch

        self.values = {f"w{i}": torch.full((40, 10 + i), value + i) for i in range(4)}
        self.names = list(self.values)
        self.applied = 1

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def moments(self, name: str) -> tuple[str, ...]:
        return ("exp_avg",)

    def read(self, name: str) -> dict[str, Any]:
        return {"weight": self.values[name], "exp_avg": self.values[name] / 2}


def save_fake(folder: str, steps: list[int], keep_last: int = 5, die_at: str = "", die_rank: int = 0) -> None:
    """Saves these steps; with `die_at`, this rank is killed at that point of the last save."""
    from ringspan.trainer.checkpoint import checkpoint
    from ringspan.trainer.config import schema, validate
    from ringspan.trainer.distributed import DistributedContext

    options = schema.Config()
    options.parallel.device, options.parallel.timeout = "cpu", 30.0
    ranks = DistributedContext(options)
    assert validate.mesh_of(options, ranks.world)[1] == ranks.world
    for step in steps:
        if step == steps[-1] and die_at and ranks.rank == die_rank:
            plant_death(die_at)
        engine: Any = FakeEngine(float(step))
        keep = schema.Checkpoint(keep_last=keep_last)
        problem = checkpoint.save(Path(folder), engine, checkpoint.Position(step=step), {}, ranks, keep)
        (Path(folder) / f"problem-{step}-{ranks.rank}").write_text(problem)
    ranks.close()


def plant_death(point: str) -> None:
    """kill -9 before the n-th call of a function of the save: "json.dumps:2"."""
    import importlib

    name, _, count = point.partition(":")
    owner, _, attribute = name.rpartition(".")
    module, _, inner = owner.partition("/")
    place: Any = importlib.import_module(module)
    if inner:
        place = getattr(place, inner)
    original = getattr(place, attribute)
    left = [int(count or 1)]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(place, attribute, deadly)
