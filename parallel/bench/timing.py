"""Timing of one candidate of the ring benchmark: ranks start together at a barrier, and the slowest rank counts."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringspan.parallel.bench.baselines import BenchContext, Candidate, Setting, forward_and_backward


class Timing(NamedTuple):
    """Times of a candidate in one round, of the slowest rank."""

    forward: float  # ms
    both: float  # ms of a forward and its backward
    flops: float  # of a forward, per rank
    forward_mcycles: float | None = None
    both_mcycles: float | None = None
    both_host: float | None = None  # ms in which the host launches a forward and its backward


HOST_CALLS = 5  # so few that the GPU's queue of launches does not fill, which would make the host wait


def time_candidate(
    candidate: Candidate, setting: Setting, context: BenchContext, rep: float, cycles: bool, cuda_graph: bool = False
) -> Timing:
    """Time a candidate for about `rep` ms per direction, and count its clock cycles if asked.

    With `cuda_graph`, replays of a graph of each direction are timed.
    """
    with candidate.make(setting, context) as problem:

        def forward() -> None:
            with torch.no_grad():
                problem.run()

        calls: tuple[Callable[[], object], ...] = forward, lambda: forward_and_backward(problem)
        if cuda_graph:
            calls = tuple(_captured(call) for call in calls)
        forward_ms, both_ms = (_median_ms(call, context, rep) for call in calls)
        host_ms = _host_ms(calls[1], context) if context.device.type == "cuda" else None  # a CPU's host computes
        timing = Timing(forward_ms, both_ms, problem.flops, both_host=host_ms)
        if not cycles:
            return timing
        counts = (_mcycles(call, context, num_calls(ms, rep)) for call, ms in zip(calls, timing[:2], strict=True))
        return timing._replace(**dict(zip(("forward_mcycles", "both_mcycles"), counts, strict=True)))


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call that has run before; return the graph's replay."""
    graph = torch.cuda.CUDAGraph()
    call()
    # Other threads, such as NCCL's, may use CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _median_ms(call: Callable[[], object], context: BenchContext, rep: float) -> float:
    """Median ms of consecutive calls that fit into rep ms, of the slowest rank.

    One call runs first, because the GPUs are idle before it. For calls longer than rep one more is enough: rounds repeat it.
    """

    def times(calls: int) -> list[float]:
        dist.barrier(group=context.ring.context_group)
        return call_times(call, context.device, calls)

    first = _largest(times(1)[0], context)
    return _largest(statistics.median(times(num_calls(first, rep))), context)


def _host_ms(call: Callable[[], object], context: BenchContext) -> float:
    """ms in which the host launches a call, of the slowest rank."""
    dist.barrier(group=context.ring.context_group)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    host_ms = 1000 * (time.perf_counter() - start) / HOST_CALLS
    torch.cuda.synchronize()
    return _largest(host_ms, context)


def _mcycles(call: Callable[[], object], context: BenchContext, calls: int) -> float:
    """Million cycles of a call, of the rank with the most; RuntimeError on all ranks if one cannot count."""
    from ringspan.kernels.bench.clock_cycles import cycles_of  # imported here because it needs Triton

    dist.barrier(group=context.ring.context_group)
    cause = None
    try:
        mcycles = cycles_of(call, max(2, calls), context.device) / 1e6
    except RuntimeError as error:
        cause, mcycles = error, math.inf  # tells the peer ranks, which wait in the all-reduce
    largest = _largest(mcycles, context)
    if math.isinf(largest):
        raise RuntimeError("a rank could not count cycles: check that no other process uses its GPU") from cause
    return largest


def num_calls(ms: float, rep: float) -> int:
    """Return how many calls of `ms` each to make in `rep` ms: 1 if one is longer, else 3 to 50."""
    return 1 if ms > rep else max(3, min(50, int(rep / ms)))


def call_times(call: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Return the ms of each of some consecutive calls."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(calls):
            call()
            marks.append(time.perf_counter())
        return [1000 * (b - a) for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def _largest(value: float, context: BenchContext) -> float:
    """Maximum over the ranks."""
    largest = torch.tensor(value, device=context.device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=context.ring.context_group)
    return float(largest)


def speeds(timings: list[Timing], alone: list[Timing]) -> dict[str, float]:
    """Return TFLOP/s per rank and shares of the kernel alone, over rounds: median, minimum and maximum.

    Shares are ratios within a round, so `alone` must have the same rounds; without them a row has no shares.
    """
    row: dict[str, float] = {}
    pairs = list(zip(timings, alone, strict=True)) if len(alone) == len(timings) else []
    for part, factor in (("forward", 1.0), ("both", 3.5)):
        rates = [factor * timing.flops / getattr(timing, part) / 1e9 for timing in timings]
        row |= _spread(f"{part}_tflops", rates) | {f"{part}_ms": statistics.median(getattr(timing, part) for timing in timings)}
        if pairs:
            row |= _spread(f"{part}_share", [_share(timing, single, part) for timing, single in pairs])
        if timings[0].both_mcycles is not None:
            row[f"{part}_mcycles"] = statistics.median(getattr(timing, f"{part}_mcycles") for timing in timings)
            if pairs:
                shares = [_share(timing, single, f"{part}_mcycles") for timing, single in pairs]
                row |= _spread(f"{part}_cycles_share", shares)
    host = [timing.both_host for timing in timings if timing.both_host is not None]
    if host:
        row["both_host_ms"] = statistics.median(host)
        row["both_host_share"] = row["both_host_ms"] / row["both_ms"]
    return row


def _share(timing: Timing, alone: Timing, field: str) -> float:
    """FLOPs per ms or per cycle, as a share of the kernel alone."""
    return timing.flops / getattr(timing, field) / (alone.flops / getattr(alone, field))


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
