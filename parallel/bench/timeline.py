"""A picture of one forward and backward: what each rank computes and what it moves, on one time axis.

The spans are the profiler's. On a GPU kernels of NCCL and copies are transfers, and all other kernels are compute; on a CPU
gloo's messages are transfers, and matrix products are compute. That a transfer hides shows as its bar below a kernel's.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ringspan.kernels.bench.plots import pyplot
from ringspan.parallel.bench.baselines import forward_and_backward
from ringspan.parallel.transport.base import is_transfer

Span = tuple[str, float, float]  # "compute" or "transfer", start and end in µs


def trace(make: Any, setting: Any, place: Any, path: Path, title: str) -> list[list[Span]]:
    """Writes the picture on rank 0; the spans of all ranks, in µs since the first."""
    cuda = place.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]

    def both(problem: Any) -> None:
        forward_and_backward(problem)
        if cuda:
            torch.cuda.synchronize()

    with make(setting, place) as problem:
        for _ in range(4):  # compiles; and ranks compare shapes in their first calls only
            both(problem)
        dist.barrier(group=place.ring.context_group)
        with profile(activities=activities, acc_events=True) as profiler:
            both(problem)
    spans = _spans(profiler, cuda)
    everyone: list[Any] = [None] * place.ranks
    dist.all_gather_object(everyone, spans, group=place.ring.context_group)
    # One host has one clock. Over several hosts each rank begins at its own zero, which a barrier has put close together.
    zero = min((start for its in everyone for _, start, _ in its), default=0.0)
    everyone = [[(what, start - zero, end - zero) for what, start, end in its] for its in everyone]
    if dist.get_rank() == 0:
        draw(everyone, path, title)
    return everyone


def _spans(profiler: profile, cuda: bool) -> list[Span]:
    found = []
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1000 if profiler.profiler else 0  # type: ignore[union-attr]
    for event in profiler.events() or []:
        on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        what = _kind(event.name, cuda) if on_gpu == cuda else None
        if what is not None:
            found.append((what, origin + event.time_range.start, origin + event.time_range.end))
    return found


def _kind(name: str, cuda: bool) -> str | None:
    if cuda:
        if is_transfer(name, in_ring=True):
            return None if name.startswith("nccl:") else "transfer"  # the former brackets the kernel that is there too
        return None if name.startswith(("Memset", "Memcpy")) else "compute"
    if name.startswith("gloo:"):
        return "transfer"
    return "compute" if name in ("aten::bmm", "aten::exp") else None


def draw(everyone: list[list[Span]], path: Path, title: str) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(14, 0.9 + 0.8 * len(everyone)), layout="constrained")
    colours = {"compute": "#3b6ea5", "transfer": "#d9822b"}
    for rank, spans in enumerate(everyone):
        for lane, what in enumerate(colours):
            bars = [(start / 1000, (end - start) / 1000) for kind, start, end in spans if kind == what]
            label = what if rank == 0 else None
            axis.broken_barh(bars, (-rank - 0.4 * lane, -0.36), facecolors=colours[what], label=label)
    axis.set_yticks([-rank - 0.4 for rank in range(len(everyone))], [f"rank {rank}" for rank in range(len(everyone))])
    axis.set_xlabel("ms")
    axis.set_title(title)
    axis.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
