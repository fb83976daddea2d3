"""Timeline of one forward and backward: when each rank computes and when it transfers data, on one time axis.

The spans come from the profiler. On a GPU, NCCL kernels and copies are transfers and all other kernels are compute. On a CPU,
gloo's messages are transfers and matmuls are compute. A transfer overlaps compute if its bar lies below a kernel's.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ringspan.kernels.bench.plots import pyplot
from ringspan.parallel.bench.baselines import BenchContext, Make, Problem, Setting, forward_and_backward
from ringspan.parallel.coordination.json_collectives import all_gather_json
from ringspan.parallel.transport.base import is_transfer

Span = tuple[str, float, float]  # "compute" or "transfer", start and end in µs


def trace(make: Make, setting: Setting, context: BenchContext, path: Path, title: str) -> list[list[Span]]:
    """Profile one forward and backward, draw the timeline on rank 0, and return the spans of all ranks.

    Args:
        make: makes the problem of a candidate.
        path: the PNG that rank 0 writes.

    Returns:
        A list of spans per rank, in µs since the first span of all ranks.
    """
    cuda = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]

    def run(problem: Problem) -> None:
        forward_and_backward(problem)
        if cuda:
            torch.cuda.synchronize()

    with make(setting, context) as problem:
        for _ in range(4):  # warm-up: the first calls compile and compare arguments across ranks
            run(problem)
        dist.barrier(group=context.ring.context_group)
        with profile(activities=activities, acc_events=True) as profiler:
            run(problem)
    local_spans = _spans(profiler, cuda)
    all_spans: list[Any] = all_gather_json(local_spans, context.ring.context_group, context.device)
    # One host has one clock. Each rank of several hosts has its own zero, which the barrier has aligned closely.
    zero = min((start for spans in all_spans for _, start, _ in spans), default=0.0)
    all_spans = [[(kind, start - zero, end - zero) for kind, start, end in spans] for spans in all_spans]
    if dist.get_rank() == 0:
        draw(all_spans, path, title)
    return all_spans


def _spans(profiler: profile, cuda: bool) -> list[Span]:
    spans = []
    origin = profiler.profiler.kineto_results.trace_start_ns() / 1000 if profiler.profiler else 0  # type: ignore[union-attr]
    for event in profiler.events() or []:
        on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        kind = _kind(event.name, cuda) if on_gpu == cuda else None
        if kind is not None:
            spans.append((kind, origin + event.time_range.start, origin + event.time_range.end))
    return spans


def _kind(name: str, cuda: bool) -> str | None:
    """Kind of a profiled event; None if it is neither compute nor a transfer."""
    if cuda:
        if is_transfer(name, in_ring=True):
            return None if name.startswith("nccl:") else "transfer"  # "nccl:" is a range around a kernel that has its own event
        return None if name.startswith(("Memset", "Memcpy")) else "compute"
    if name.startswith("gloo:"):
        return "transfer"
    return "compute" if name in ("aten::bmm", "aten::exp") else None


def draw(all_spans: list[list[Span]], path: Path, title: str) -> None:
    """Draw a compute lane and a transfer lane for each rank into a file."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(14, 0.9 + 0.8 * len(all_spans)), layout="constrained")
    colours = {"compute": "#3b6ea5", "transfer": "#d9822b"}
    for rank, spans in enumerate(all_spans):
        for lane, (lane_kind, colour) in enumerate(colours.items()):
            bars = [(start / 1000, (end - start) / 1000) for kind, start, end in spans if kind == lane_kind]
            label = lane_kind if rank == 0 else None
            axis.broken_barh(bars, (-rank - 0.4 * lane, -0.36), facecolors=colour, label=label)
    axis.set_yticks([-rank - 0.4 for rank in range(len(all_spans))], [f"rank {rank}" for rank in range(len(all_spans))])
    axis.set_xlabel("ms")
    axis.set_title(title)
    figure.legend(loc="outside lower right", ncols=2)  # below the axis, where it covers no bar
    figure.savefig(path, dpi=120)
    plt.close(figure)
