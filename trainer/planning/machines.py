"""Machines that a run is planned for: known GPUs by their datasheets, or this machine, measured."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringspan.trainer.config.schema import Config
from ringspan.trainer.planning.flops import PEAKS, head_dim, visible_pairs
from ringspan.trainer.planning.host_memory import host_memory
from ringspan.trainer.planning.memory import GIB, Footprint

MATMUL_EFFICIENCY = 0.7  # share of the peak that large bf16 matmuls reach
# Measured on H100s and H200s. GPU memory outside of torch's allocator, for the driver, kernels and NCCL: 3.0 to 3.4 GiB. What
# the allocator reserves above what it has allocated, where memory is nearly full: 1.3 to 1.7 %. A process's host memory besides
# the pinned one: 4.9 to 6.2 GiB.
OUTSIDE, FRAGMENTATION, PROCESS = 3.5 * GIB, 0.02, 6.5 * GIB
CPU_RESERVE = 0.08  # share of a CPU rank's memory that is left to the process


@dataclass
class Machine:
    """A device and its host."""

    name: str
    memory: float  # bytes of one GPU, or of a CPU rank
    peak: float  # dense bf16 FLOP/s; 0: unknown
    link: float  # bytes/s in each direction between GPUs of a host
    matmuls: float = 0.0  # FLOP/s of matmuls; 0: MATMUL_EFFICIENCY of the peak
    attention: tuple[float, float] | None = None  # FLOP/s of attention's forward and backward, if measured on this machine
    gpu: bool = True
    gpus: int = 8  # per host
    host: float = math.inf  # bytes of a host's memory, if known

    def __post_init__(self) -> None:
        self.matmuls = self.matmuls or MATMUL_EFFICIENCY * self.peak

    def fits(self, need: Footprint, world: int) -> bool:
        """Return whether a rank's memory and its share of the host's memory are sufficient."""
        return self.fits_device(need) and need.on_host <= self.usable_host(world)

    def fits_device(self, need: Footprint) -> bool:
        return need.peak <= self.usable

    @property
    def usable(self) -> float:
        """Bytes of a rank's device for tensors."""
        return (self.memory - OUTSIDE) / (1 + FRAGMENTATION) if self.gpu else (1 - CPU_RESERVE) * self.memory

    def usable_host(self, world: int) -> float:
        """Bytes of a rank's share of the host for offloaded tensors."""
        share = self.host_memory_per_rank(world)
        return max(0.0, share - PROCESS) if self.gpu else (1 - CPU_RESERVE) * share

    def host_memory_per_rank(self, world: int) -> float:
        return self.host / min(world, self.gpus)


# Datasheets: memory, dense bf16 FLOP/s, bytes/s in each direction between two GPUs of a host.
MACHINES = {
    "h200": Machine("NVIDIA H200", 139.8 * GIB, PEAKS["H200"], 450e9),
    "h100": Machine("NVIDIA H100", 79.1 * GIB, PEAKS["H100"], 450e9),
    "b200": Machine("NVIDIA B200", 178.3 * GIB, PEAKS["B200"], 900e9),
    "a100": Machine("NVIDIA A100", 79.1 * GIB, PEAKS["A100"], 300e9),
    "mi300x": Machine("AMD MI300X", 191.9 * GIB, PEAKS["MI300X"], 448e9),
}


def resolve_machine(config: Config) -> tuple[Machine, int]:
    """Return the machine that the options `hardware` select, and the number of ranks."""
    options = config.hardware
    if options.name in MACHINES:
        target, ranks = MACHINES[options.name], options.gpus or 1
    else:
        target, default_ranks = _measure_this_machine(config)
        ranks = options.gpus or default_ranks
    host = options.host_gib * GIB if options.host_gib else target.host
    return replace(target, memory=options.memory_gib * GIB if options.memory_gib else target.memory, host=host), ranks


def _measure_this_machine(config: Config) -> tuple[Machine, int]:
    import torch

    ranks = default_num_ranks(config.hardware.name == "cpu")
    if not torch.cuda.is_available() or config.hardware.name == "cpu":
        matmuls, attention = _measure_speeds(config, "cpu")
        return Machine("CPU rank", host_memory() / ranks, 0.0, 2e9, matmuls, attention, gpu=False), ranks
    properties = torch.cuda.get_device_properties(0)
    known = next((m for m in MACHINES.values() if m.name.split()[-1] in properties.name), None)
    peak, link = (known.peak, known.link) if known else (0.0, 50e9)
    matmuls, attention = _measure_speeds(config, "cuda")
    memory = properties.total_memory
    return Machine(properties.name, memory, peak, link, matmuls, attention, gpus=ranks, host=host_memory()), ranks


def machine_of_run(device_name: str, gpu: bool, memory: float, host: float, ranks_per_host: int) -> Machine:
    """Return the machine that a run plans for, without measuring its speeds.

    Args:
        device_name: name of the device.
        gpu: whether it is a GPU.
        memory: bytes of the smallest device of all ranks.
        host: bytes of host memory per rank, the least of all ranks.
        ranks_per_host: ranks on each host.
    """
    known = next((m for m in MACHINES.values() if m.name.split()[-1] in device_name), None)
    peak, link = (known.peak, known.link) if known else (0.0, 50e9)
    matmuls = 0.0 if peak else (100e12 if gpu else 50e9)
    return Machine(device_name, memory, peak, link, matmuls, gpu=gpu, gpus=ranks_per_host, host=host * ranks_per_host)


def default_num_ranks(cpu: bool) -> int:
    """Return the number of ranks that `ringspan launch` starts: one per GPU, or two without GPUs."""
    if cpu:
        return 2
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def _measure_speeds(config: Config, device: str) -> tuple[float, tuple[float, float]]:
    """Return FLOP/s of a matmul, and of attention's forward and backward."""
    import torch

    from ringspan.kernels.attention import attention
    from ringspan.kernels.mask import Mask

    gpu, model = device == "cuda", config.model
    size, length, dtype = (8192, 16384, torch.bfloat16) if gpu else (512, 1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmuls = 2 * size**3 / _seconds(lambda: a @ b, gpu)
    width = head_dim(model)
    q, k, v = (
        torch.randn(1, length, heads, width, device=device, dtype=dtype, requires_grad=True)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    out = attention(q, k, v, mask=Mask(causal=True))
    dout = torch.randn_like(out)
    forward = _seconds(lambda: attention(q, k, v, mask=Mask(causal=True)), gpu)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), gpu)
    flops = 4 * model.heads * width * visible_pairs([length])
    return matmuls, (flops / forward, 2.5 * flops / backward)


def _seconds(function: Callable[[], Any], gpu: bool) -> float:
    import torch

    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        function()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
