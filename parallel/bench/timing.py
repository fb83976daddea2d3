"""What a contestant of `parallel.bench` takes in its turn: ranks begin together, and the slowest counts."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringspan.parallel.bench.baselines import BenchContext, Contestant, Setting, forward_and_backward


class Timing(NamedTuple):
    """What a contestant took in a round, on the slowest rank."""

    forward: float  # ms
    both: float  # ms of a forward with its backward
    flops: float  # of a forward
    forward_mcycles: float | None = None
    both_mcycles: float | None = None


def time_baseline(contestant: Contestant, setting: Setting, place: BenchContext, rep: float, cycles: bool) -> Timing:
    with contestant.make(setting, place) as problem:

        def forward() -> None:
            with torch.no_grad():
                problem.run()

        calls = forward, lambda: forward_and_backward(problem)
        forward_ms, both_ms = (_median_ms(call, place, rep) for call in calls)
        turn = Timing(forward_ms, both_ms, problem.flops)
        if not cycles:
            return turn
        counts = (_mcycles(call, place, how_often(ms, rep)) for call, ms in zip(calls, turn[:2], strict=True))
        return turn._replace(**dict(zip(("forward_mcycles", "both_mcycles"), counts, strict=True)))


def _median_ms(call: Callable[[], object], place: BenchContext, rep: float) -> float:
    """The median of as many calls as fit into rep ms, of the slowest rank; calls follow each other without a pause.

    One goes before, for which GPUs were idle. Of calls that are longer than that one more is enough: the rounds repeat it.
    """

    def together(calls: int) -> list[float]:
        dist.barrier(group=place.ring.context_group)
        return spans(call, place.device, calls)

    first = _largest(together(1)[0], place)
    return _largest(statistics.median(together(how_often(first, rep))), place)


def _mcycles(call: Callable[[], object], place: BenchContext, calls: int) -> float:
    """Millions a call, of the rank that counts most; an error on all ranks if one could not count."""
    from ringspan.kernels.bench.clock_cycles import cycles_of  # only here: it needs Triton

    dist.barrier(group=place.ring.context_group)
    error = None
    try:
        mine = cycles_of(call, max(2, calls), place.device) / 1e6
    except RuntimeError as failed:
        error, mine = failed, math.inf  # by which the others, who would wait for this rank, hear of it
    most = _largest(mine, place)
    if math.isinf(most):
        raise RuntimeError("a rank could not count cycles: is another process at work on its GPU?") from error
    return most


def how_often(ms: float, rep: float) -> int:
    """Calls that take so many ms, in a turn of `rep` ms."""
    return 1 if ms > rep else max(3, min(50, int(rep / ms)))


def spans(call: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """ms of each."""
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


def _largest(value: float, place: BenchContext) -> float:
    worst = torch.tensor(value, device=place.device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=place.ring.context_group)
    return float(worst)


def speeds(turns: list[Timing], alone: list[Timing]) -> dict[str, float]:
    """TFLOP/s per rank, and shares of the kernel alone, over rounds: median, least and most."""
    row: dict[str, float] = {}
    pairs = list(zip(turns, alone, strict=True)) if len(alone) == len(turns) else []
    for way, factor in (("forward", 1.0), ("both", 3.5)):
        rates = [factor * turn.flops / getattr(turn, way) / 1e9 for turn in turns]
        row |= _spread(f"{way}_tflops", rates) | {f"{way}_ms": statistics.median(getattr(turn, way) for turn in turns)}
        if pairs:
            row |= _spread(f"{way}_share", [_share(turn, other, way) for turn, other in pairs])
        if turns[0].both_mcycles is not None:
            row[f"{way}_mcycles"] = statistics.median(getattr(turn, f"{way}_mcycles") for turn in turns)
            if pairs:
                row |= _spread(f"{way}_cycles_share", [_share(turn, other, f"{way}_mcycles") for turn, other in pairs])
    return row


def _share(turn: Timing, alone: Timing, what: str) -> float:
    """Of the work that the kernel alone does in a ms, or in a cycle."""
    return turn.flops / getattr(turn, what) / (alone.flops / getattr(alone, what))


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
