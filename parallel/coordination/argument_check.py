"""Argument check: ranks compare their arguments before the first hop, because a message of the wrong size hangs or corrupts.

The comparison is a small collective. It runs in the first three calls on a group, in the first three training steps of a
process, and in every call with RINGSPAN_CHECK=1, but not while a CUDA graph is captured. A rank that rejects its own arguments
reports that to its peers, which would otherwise wait for it.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.json_collectives import all_gather_json
from ringspan.parallel.coordination.process_groups import group_by_name, timeout_of
from ringspan.parallel.transport.streams import is_capturing

COMPARED_CALLS = 3
_calls: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()
Description = dict[str, str]


def check_same_on_all_ranks(
    group_name: str, device: torch.device, describe: Callable[[], dict[str, Any]], compared_calls: int = COMPARED_CALLS
) -> None:
    """Raise a ValueError on every rank if the description of any rank differs. Calls `describe` only if a comparison is due."""
    if not _is_due(group_name, device, compared_calls):
        return
    local_description = {key: str(value) for key, value in describe().items()}
    ranks, answers = _exchange(group_name, device, local_description, None)
    descriptions: list[Description] = []
    for rank, (description, rejection) in zip(ranks, answers, strict=True):
        if description is None:
            raise ValueError(f"rank {rank} rejected its arguments: {rejection}")
        descriptions.append(description)
    differing = [key for key in local_description if any(other[key] != local_description[key] for other in descriptions)]
    if differing:
        raise ValueError("; ".join(_difference(key, ranks, [other[key] for other in descriptions]) for key in differing))


def report_rejection(group_name: str, device: torch.device, error: ValueError, compared_calls: int = COMPARED_CALLS) -> None:
    """Send this rank's error to its peers if a comparison is due, in which they would wait. The caller raises the error."""
    if _is_due(group_name, device, compared_calls):
        _exchange(group_name, device, None, str(error))


def _is_due(group_name: str, device: torch.device, compared_calls: int) -> bool:
    if is_capturing(device):
        return False  # a comparison waits for its answer, which a CUDA graph cannot capture
    counts = _calls.setdefault(group_by_name(group_name), Counter())
    counts[compared_calls] += 1  # ring calls and Ulysses exchanges have different limits, and a count each
    steps = progress.steps_done()
    is_early = counts[compared_calls] <= compared_calls or (steps is not None and steps < COMPARED_CALLS)
    return is_early or os.environ.get("RINGSPAN_CHECK") == "1"


def _exchange(
    group_name: str, device: torch.device, description: Description | None, rejection: str | None
) -> tuple[list[int], list[tuple[Description | None, str | None]]]:
    """All-gather (description, rejection); return the ranks and their answers."""
    group = group_by_name(group_name)
    answers: list[tuple[Description | None, str | None]] = []
    missing, timeout_s = arrivals.announce_arrival(group), timeout_of(group, device).total_seconds()

    def exchange() -> None:
        if device.type == "cuda":
            arrivals.await_arrivals(group, timeout_s)
        answers.extend(all_gather_json((description, rejection), group, device))

    progress.wait(exchange, lambda: f"{missing()}, to compare shapes", timeout_s)
    return dist.get_process_group_ranks(group), answers


def _difference(key: str, ranks: list[int], values: list[str]) -> str:
    """Return "KEY must be the same on every rank, but ranks 0, 2: VALUE, rank 1: VALUE"."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_by_value.setdefault(value, []).append(rank)
    groups = ", ".join(f"{arrivals.rank_names(ranks)}: {value}" for value, ranks in ranks_by_value.items())
    return f"{key} must be the same on every rank, but {groups}"
