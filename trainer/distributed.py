"""This process among the others: its device, its place in the mesh, and small messages between all ranks.

Small messages (names, problems, stop flags) go over a gloo group of their own, so that they need no GPU and cannot stand
behind a collective of the training. Alone, everything works without torchrun.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.parallel.mesh import Mesh
from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import mesh_of


class DistributedContext:
    def __init__(self, config: Config) -> None:
        for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(_free_port())
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = choose_device(config.parallel.device, self.local_rank)
        self.timeout = timedelta(seconds=config.parallel.timeout)
        if config.debug.deterministic:
            set_deterministic()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # else what ZeRO moves stands behind a backward's large kernels until they have given out all their programs
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        self.owner = not dist.is_initialized()  # several runs in one process share the groups, which DeepSpeed remembers
        if self.owner and self.device.type == "cuda":
            dist.init_process_group("nccl", timeout=self.timeout, device_id=self.device)
        elif self.owner:
            dist.init_process_group("gloo", timeout=self.timeout)
        self.control = dist.new_group(backend="gloo", timeout=self.timeout)
        data, ring, ulysses = mesh_of(config, self.world)
        self.mesh = Mesh(data, ring, ulysses, timeout=self.timeout)

    def first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks."""
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=self.control)
        return box

    def alike(self, make: Callable[[], Any]) -> Any:
        """What every rank makes by itself; a ValueError, or a file's error, is told to all, so that it is said once."""
        made, problem = None, ""
        try:
            made = make()
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        told = self.gather(problem)
        if len(set(told)) > 1:
            told = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if any(told):
            raise ConfigError("\n".join(dict.fromkeys(told)))
        return made

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, group=self.control)
        return bool(found.item())

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def close(self) -> None:
        if self.owner:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("parallel.device=cuda: torch finds no GPU; take cpu, or a torch that is built for this GPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {local_rank} of this machine has no GPU of its own, for there are {torch.cuda.device_count()}: "
            "start fewer ranks (--nproc-per-node), or parallel.device=cpu"
        )
    return torch.device("cuda", local_rank)


def set_deterministic() -> None:
    """Bit-equal reruns; before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    torch.backends.cudnn.benchmark = False


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
