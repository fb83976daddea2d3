"""Ranks compare what they were given before the first hop, because a message of the wrong size hangs or corrupts.

It costs a small collective, so it is done for the first three calls on a group, in the first three steps of a trainer's
process, and with RINGSPAN_CHECK=1 always. A rank that refuses its own arguments tells the others, which would otherwise wait
for it.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.process_groups import by_name, timeout_of

FIRST = 3
_calls: dict[str, tuple[dist.ProcessGroup, Counter[int]]] = {}  # with the group: a new one may have an old one's name
Description = dict[str, Any]


def check_same_on_all_ranks(name: str, device: torch.device, describe: Callable[[], Description], first: int = FIRST) -> None:
    """A ValueError on every rank if any rank's description differs. It is made only when it is to be compared."""
    if not _due(name, first):
        return
    mine = describe()
    ranks, answers = _exchange(name, device, mine, None)
    given: list[Description] = []
    for rank, (answer, trouble) in zip(ranks, answers, strict=True):
        if answer is None:
            raise ValueError(f"rank {rank} refused its arguments: {trouble}")
        given.append(answer)
    differing = [key for key in mine if any(answer[key] != mine[key] for answer in given)]
    if differing:
        raise ValueError("; ".join(_sentence(key, ranks, [answer[key] for answer in given]) for key in differing))


def report_rejection(name: str, device: torch.device, error: ValueError, first: int = FIRST) -> None:
    """Tells the others why this rank will not call, if they are listening. The caller raises."""
    if _due(name, first):
        _exchange(name, device, None, str(error))


def _due(name: str, first: int) -> bool:
    group = by_name(name)
    if name not in _calls or _calls[name][0] is not group:
        _calls[name] = group, Counter()
    count = _calls[name][1]
    count[first] += 1  # each kind of call has its own count
    steps = progress.steps_done()
    early = count[first] <= first or (steps is not None and steps < FIRST)
    return early or os.environ.get("RINGSPAN_CHECK") == "1"


def _exchange(
    name: str, device: torch.device, mine: Description | None, trouble: str | None
) -> tuple[list[int], list[tuple[Description | None, str | None]]]:
    group = by_name(name)
    answers: list[Any] = [None] * group.size()
    missing = arrivals.announce_arrival(group)
    progress.wait(
        lambda: dist.all_gather_object(answers, (mine, trouble), group=group),
        lambda: f"{missing()}, to compare shapes",
        timeout_of(group, device).total_seconds(),
    )
    return dist.get_process_group_ranks(group), answers


def _sentence(key: str, ranks: list[int], values: list[Any]) -> str:
    have: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        have.setdefault(str(value), []).append(rank)
    who = ", ".join(f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {value}" for value, r in have.items())
    return f"{key} must be the same on every rank, but {who}"
