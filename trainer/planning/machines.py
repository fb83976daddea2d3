"""The machines that a run is planned for: known GPUs by their datasheets, or this one, measured."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ringspan.trainer.config.schema import Config
from ringspan.trainer.planning.flops import PEAKS, head_dim, visible_pairs
from ringspan.trainer.planning.memory import GIB, Footprint, fits, memory_of_machine

PRODUCTS = 0.7  # of the peak: what large bf16 products reach


@dataclass
class Machine:
    name: str
    memory: float  # bytes of one GPU, or of a CPU rank
    peak: float  # dense bf16 operations a second; 0: not known
    link: float  # bytes a second, each way, between GPUs of a host
    products: float = 0.0  # operations a second
    attention: tuple[float, float] | None = None  # the same, forward and backward, if measured here
    gpu: bool = True
    gpus: int = 8  # of one host
    host: float = math.inf  # bytes of a host's own memory, if known

    def fits(self, found: Footprint, world: int) -> bool:
        return fits(found.peak, self.memory) and fits(found.on_host, self.host_of_a_rank(world))

    def host_of_a_rank(self, world: int) -> float:
        return self.host / min(world, self.gpus)


# Datasheets: GiB, dense bf16 operations a second, GB/s each way between two GPUs' hosts of one node.
MACHINES = {
    "h200": Machine("NVIDIA H200", 139.8 * GIB, PEAKS["H200"], 450e9),
    "h100": Machine("NVIDIA H100", 79.1 * GIB, PEAKS["H100"], 450e9),
    "b200": Machine("NVIDIA B200", 178.3 * GIB, PEAKS["B200"], 900e9),
    "a100": Machine("NVIDIA A100", 79.1 * GIB, PEAKS["A100"], 300e9),
    "mi300x": Machine("AMD MI300X", 191.9 * GIB, PEAKS["MI300X"], 448e9),
}


def machine(config: Config) -> tuple[Machine, int]:
    """What is planned for, and how many of it."""
    name, given = config.hardware.name, config.hardware
    if name in MACHINES:
        found, num = MACHINES[name], given.gpus or 1
        found = replace(found, products=PRODUCTS * found.peak)
    else:
        found, here = _here(config)
        num = given.gpus or here
    host = given.host_gib * GIB if given.host_gib else found.host
    return replace(found, memory=given.memory_gib * GIB if given.memory_gib else found.memory, host=host), num


def _here(config: Config) -> tuple[Machine, int]:
    """This machine, its speeds measured now."""
    import torch

    num = ranks_here(config.hardware.name == "cpu")
    if not torch.cuda.is_available() or config.hardware.name == "cpu":
        return Machine("CPU rank", memory_of_machine() / num, 0.0, 2e9, *_measured(config, "cpu"), gpu=False), num
    properties = torch.cuda.get_device_properties(0)
    known = next((m for m in MACHINES.values() if m.name.split()[-1] in properties.name), None)
    peak, link = (known.peak, known.link) if known else (0.0, 50e9)
    here = dict(gpus=num, host=memory_of_machine())
    return Machine(properties.name, properties.total_memory, peak, link, *_measured(config, "cuda"), **here), num


def ranks_here(cpu: bool) -> int:
    """What `ringspan launch` starts: one for each GPU, two without any."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() and not cpu else 2


def _measured(config: Config, device: str) -> tuple[float, tuple[float, float]]:
    """Operations a second of a product, and of attention forward and backward."""
    import torch

    from ringspan.kernels.attention import attention
    from ringspan.kernels.mask import Mask

    gpu, model = device == "cuda", config.model
    size, length, dtype = (8192, 16384, torch.bfloat16) if gpu else (512, 1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = 2 * size**3 / _seconds(lambda: a @ b, gpu)
    width = head_dim(model)
    q, k, v = (
        torch.randn(1, length, heads, width, device=device, dtype=dtype, requires_grad=True)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    out = attention(q, k, v, mask=Mask(causal=True))
    dout = torch.randn_like(out)
    forward = _seconds(lambda: attention(q, k, v, mask=Mask(causal=True)), gpu)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), gpu)
    once = 4 * model.heads * width * visible_pairs([length])
    return products, (once / forward, 2.5 * once / backward)


def _seconds(work: Callable[[], Any], gpu: bool) -> float:
    import torch

    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
