"""torch.distributed of a run: process group, device, mesh, and small control messages between all ranks.

Control messages (names, errors, stop flags) are JSON over a gloo group of their own. They need no GPU, and they never queue
after a collective of the training. A single process works without a launcher.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor

from ringspan.parallel.coordination.json_collectives import all_gather_json, broadcast_json
from ringspan.parallel.mesh import Mesh
from ringspan.trainer import network
from ringspan.trainer.config import rank_variables
from ringspan.trainer.config.compose import ConfigError
from ringspan.trainer.config.schema import Config
from ringspan.trainer.config.validate import mesh_of
from ringspan.trainer.planning.host_memory import num_cores

CPU = torch.device("cpu")


class DistributedContext:
    """Rank, device and mesh of this process, and its control messages.

    Args:
        config: a valid config; `parallel` and `debug.deterministic` are read.

    Raises:
        ConfigError: the variables of the launcher are wrong.
        ValueError: this rank has no device.
    """

    def __init__(self, config: Config) -> None:
        if problem := rank_variables.problem(joins=True):
            raise ConfigError(problem)
        for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
            os.environ.setdefault(name, value)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = choose_device(config.parallel.device, self.local_rank)
        self.timeout = timedelta(seconds=config.parallel.timeout)
        if config.debug.deterministic:
            set_deterministic()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # An operation on the CPU ends with its slowest thread; where other threads and processes run, one of as many
            # threads as cores waits a time slice for its core.
            cores = num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
            torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // 2)))
            # Otherwise ZeRO's transfers wait until a large backward kernel has started its last thread block.
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        # Several runs in one process share the default group, because DeepSpeed remembers it.
        self.owns_group = not dist.is_initialized()
        if self.owns_group and self.device.type == "cuda":
            network.init_process_group("nccl", self.timeout, device_id=self.device)
        elif self.owns_group:
            network.init_process_group("gloo", self.timeout)
        self.control = dist.new_group(backend="gloo", timeout=self.timeout)
        data, ring, ulysses = mesh_of(config, self.world)
        self.mesh = Mesh(data, ring, ulysses, timeout=self.timeout)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, which JSON can express, on all ranks."""
        return broadcast_json(value, self.control, CPU)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which JSON can express, on all ranks."""
        return all_gather_json(value, self.control, CPU)

    def call_on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """Call `function` on every rank and return this rank's result.

        Raises:
            ConfigError: on all ranks, if any rank's call raised ValueError or OSError; the text names the ranks if they differ.
        """
        result, problem = None, ""
        try:
            result = function()
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        problems = self.gather(problem)
        if len(set(problems)) > 1:
            problems = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if any(problems):
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        return result

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on some rank."""
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, group=self.control)
        return bool(value.item())

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place over the default group."""
        dist.all_reduce(values)
        return values

    def close(self) -> None:
        if self.owns_group:
            dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank; `name` is the option parallel.device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("parallel.device=cuda: torch finds no GPU; take cpu, or a torch that is built for this GPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {local_rank} of this machine has no GPU of its own, because there are {torch.cuda.device_count()}: "
            "start fewer ranks (--nproc-per-node), or take parallel.device=cpu"
        )
    return torch.device("cuda", local_rank)


def set_deterministic() -> None:
    """Make reruns bit-equal. Must precede the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # The code reads no memory that it has not written, so that filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
    torch.backends.cudnn.benchmark = False
