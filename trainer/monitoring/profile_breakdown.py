"""What the time of a profiled step went to, from torch.profiler's trace (`debug.profile=[6]`).

Every instant of the step belongs to one kind: to attention or matrix products if they run, else to what else computes, else
to communication, which then is not hidden behind anything, else nothing runs. So the kinds add up to the step. A kernel is
of the kind of the operator that launched it, whatever its name; only what moves data between GPUs is known by its name, to
`parallel.trace`.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringspan.parallel.transport.base import is_transfer

ATTENTION, RING = "ringspan::attention_", "ringspan::ring_"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation", "mkldnn::_linear_pointwise")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = ("attention", "products", "other", "communication")
Interval = tuple[float, float, str]


def breakdown(path: Path) -> dict[str, Any]:
    """Seconds of the step by kind and `idle`; all communication, hidden or not; and what `other` was most of."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: this is no trace of torch.profiler ({type(error).__name__}): run the step again") from None
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    device = [event for event in events if event.get("cat") in DEVICE]
    if not ops and not device:
        raise ValueError(f"{path}: this trace has no operators: run the step again")
    if device:
        launched = _launchers(events, ops)
        named = [(event, _kind(event["name"], launched(event))) for event in device]
        order = KINDS
    else:  # on a CPU operators stand inside each other, and what is called by any may be communication
        named = [(event, _kind(event["name"], _operator(event["name"]))) for event in ops]
        order = ("attention", "products", "communication", "other")
    intervals = [_interval(event, kind) for event, kind in named]
    begin = min(event["ts"] for event in [*ops, *device])
    seconds = split(intervals, order, begin)
    moving = split([interval for interval in intervals if interval[2] == "communication"], order, begin)["communication"]
    most: Counter[str] = Counter()
    for event, kind in named if device else []:
        if kind == "other":
            most[event["name"].partition("(")[0][:80]] += event["dur"] / 1e6
    return dict(seconds=seconds, communication_with_hidden=moving, most_of_other=dict(most.most_common(8)))


def split(intervals: list[Interval], order: Iterable[str], begin: float) -> dict[str, float]:
    """Seconds (of microseconds) from `begin` on, each instant given to the first kind of `order` that runs then."""
    order = tuple(order)
    edges = sorted([(start, 1, kind) for start, _, kind in intervals] + [(end, -1, kind) for _, end, kind in intervals])
    found, active, last = dict.fromkeys([*order, "idle"], 0.0), Counter[str](), begin
    for at, change, kind in edges:
        found[next((name for name in order if active[name]), "idle")] += (at - last) / 1e6
        active[kind] += change
        last = at
    return found


def _launchers(events: list[Any], ops: list[Any]) -> Any:
    """From a kernel to the operator inside which it was launched."""
    spans: dict[tuple[Any, str], list[tuple[float, float]]] = defaultdict(list)
    for event in ops:
        if (operator := _operator(event["name"])) != "other":
            spans[event["tid"], operator].append((event["ts"], event["ts"] + event["dur"]))
    for its in spans.values():
        its.sort()
    calls = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = event["tid"], event["ts"]

    def operator_of(kernel: Any) -> str:
        thread, at = calls.get(kernel.get("args", {}).get("correlation"), (None, 0.0))
        for operator in ("ring", "attention", "products"):
            its = spans.get((thread, operator), [])
            index = bisect_right(its, (at, float("inf"))) - 1
            if index >= 0 and at <= its[index][1]:
                return operator
        return "other"

    return operator_of


def _operator(name: str) -> str:
    if name.startswith((RING, ATTENTION)):
        return "ring" if name.startswith(RING) else "attention"
    return "products" if name in PRODUCTS else "other"


def _kind(name: str, operator: str) -> str:
    if is_transfer(name, in_ring=operator == "ring"):
        return "communication"
    return "attention" if operator == "ring" else operator


def _interval(event: Any, kind: str) -> Interval:
    return event["ts"], event["ts"] + event["dur"], kind
