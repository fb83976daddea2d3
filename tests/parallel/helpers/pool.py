"""Pool: rank processes that start once per world size and then run one function after another.

pool = Pool(4)
results = pool(work.compare, case)      # on every rank; raises Failed with the errors of the ranks that failed
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# A fork server imports torch once for all ranks, and has no threads, which a fork would not copy.
context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
if not torch.cuda.is_available():
    context.set_forkserver_preload(["torch", "tests.parallel.helpers.work"])


class Failed(AssertionError):
    """Some ranks raised; `errors` has the error text of each rank, None where it succeeded."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error))


class Pool:
    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        timeout: float = 60,
        environment: dict[str, str] | None = None,
        on_gpus: bool = False,  # one GPU per rank; ranks share GPUs if there are fewer
    ) -> None:
        self.size, self.timeout = size, timeout
        self.folder = tempfile.TemporaryDirectory(prefix="ringspan-")
        store = os.path.join(self.folder.name, "store")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            arguments = rank, size, backend, store, timeout, environment or {}, on_gpus, child_end
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self.connections.append(parent_end)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, patience: float = 120) -> list[Any]:
        """Run function(*args) on every rank; return the results in rank order."""
        for connection in self.connections:
            connection.send((function, args))
        answers: dict[Connection, tuple[Any, str | None]] = {}
        deadline = time.monotonic() + patience
        while len(answers) < self.size:
            pending = [c for c in self.connections if c not in answers]
            ready = wait(pending, max(0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {[self.connections.index(c) for c in pending]} did not answer in {patience} s")
            for connection in ready:
                try:
                    answers[connection] = connection.recv()  # type: ignore[union-attr, index]
                except EOFError:
                    answers[connection] = None, "it died"  # type: ignore[index]
        errors = [answers[c][1] for c in self.connections]
        if any(errors):
            raise Failed(errors)
        return [answers[c][0] for c in self.connections]

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.folder.cleanup()


def _serve(
    rank: int,
    size: int,
    backend: str,
    store: str,
    timeout: float,
    environment: dict[str, str],
    on_gpus: bool,
    pipe: Connection,
) -> None:
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if on_gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank) if backend == "nccl" else None,
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = function(*args), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        sys.stdout.flush()
        pipe.send(answer)
