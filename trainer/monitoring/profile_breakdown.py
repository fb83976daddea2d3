"""Breakdown of a profiled step's time, from torch.profiler's trace (`debug.profile=[6]`).

Every instant of the step belongs to one kind: attention or matmuls if one of them runs, else other compute, else exposed
communication, else idle. The kinds therefore add up to the step. A kernel has the kind of the operator that launched it,
whatever its name. Only transfers between GPUs are recognised by name (`is_transfer` of parallel/transport/base.py).
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ringspan.parallel.transport.base import is_transfer

ATTENTION, RING = "ringspan::attention_", "ringspan::ring_"
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation", "mkldnn::_linear_pointwise")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = ("attention", "products", "other", "communication")  # "products" are matmuls; files in docs/results use this key
Interval = tuple[float, float, str]


def breakdown(path: Path) -> dict[str, Any]:
    """Analyse one trace.

    Args:
        path: a Chrome trace of torch.profiler.

    Returns:
        seconds: by kind, and "idle". communication_with_hidden: all communication, overlapped or not, in seconds.
        most_of_other: the kernels of "other" with the most seconds.

    Raises:
        ValueError: the file is no such trace.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: no trace of torch.profiler ({type(error).__name__}): run the step again") from None
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    device = [event for event in events if event.get("cat") in DEVICE]
    if not ops and not device:
        raise ValueError(f"{path}: this trace has no operators: run the step again")
    if device:
        operator_of = _launching_operator(events, ops)
        events_by_kind = [(event, _kind(event["name"], operator_of(event))) for event in device]
        order = KINDS
    else:  # on a CPU operators are nested, and any of them may contain communication
        events_by_kind = [(event, _kind(event["name"], _operator(event["name"]))) for event in ops]
        order = ("attention", "products", "communication", "other")
    intervals = [_interval(event, kind) for event, kind in events_by_kind]
    begin = min(event["ts"] for event in [*ops, *device])
    seconds = split(intervals, order, begin)
    communication = [interval for interval in intervals if interval[2] == "communication"]
    communication_seconds = split(communication, order, begin)["communication"]
    most: Counter[str] = Counter()
    for event, kind in events_by_kind if device else []:
        if kind == "other":
            most[event["name"].partition("(")[0][:80]] += event["dur"] / 1e6
    return dict(seconds=seconds, communication_with_hidden=communication_seconds, most_of_other=dict(most.most_common(8)))


def split(intervals: list[Interval], order: Iterable[str], begin: float) -> dict[str, float]:
    """Return seconds by kind from `begin` on; each instant counts for the first kind of `order` that runs.

    Args:
        intervals: (start, end, kind) in microseconds.
        order: kinds by precedence.
        begin: start of the step in microseconds.
    """
    order = tuple(order)
    edges = sorted([(start, 1, kind) for start, _, kind in intervals] + [(end, -1, kind) for _, end, kind in intervals])
    seconds, active, last = dict.fromkeys([*order, "idle"], 0.0), Counter[str](), begin
    for time, change, kind in edges:
        seconds[next((name for name in order if active[name]), "idle")] += (time - last) / 1e6
        active[kind] += change
        last = time
    return seconds


def _launching_operator(events: list[Any], ops: list[Any]) -> Callable[[Any], str]:
    """Return a function from a kernel to the operator that launched it."""
    spans: dict[tuple[Any, str], list[tuple[float, float]]] = defaultdict(list)
    for event in ops:
        if (operator := _operator(event["name"])) != "other":
            spans[event["tid"], operator].append((event["ts"], event["ts"] + event["dur"]))
    for thread_spans in spans.values():
        thread_spans.sort()
    calls = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = event["tid"], event["ts"]

    def operator_of(kernel: Any) -> str:
        thread, time = calls.get(kernel.get("args", {}).get("correlation"), (None, 0.0))
        for operator in ("ring", "attention", "products"):
            thread_spans = spans.get((thread, operator), [])
            index = bisect_right(thread_spans, (time, float("inf"))) - 1
            if index >= 0 and time <= thread_spans[index][1]:
                return operator
        return "other"

    return operator_of


def _operator(name: str) -> str:
    if name.startswith((RING, ATTENTION)):
        return "ring" if name.startswith(RING) else "attention"
    return "products" if name in MATMULS else "other"


def _kind(name: str, operator: str) -> str:
    if is_transfer(name, in_ring=operator == "ring"):
        return "communication"
    if operator == "ring" or name.startswith("attention_"):  # streamed layers launch our kernels outside of an operator
        return "attention"
    return operator


def _interval(event: Any, kind: str) -> Interval:
    return event["ts"], event["ts"] + event["dur"], kind
