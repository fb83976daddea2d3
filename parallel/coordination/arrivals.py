"""Arrivals: which ranks have not reached a collective. A collective that times out does not name them.

Each rank numbers the collectives of a group. Before it enters one, it writes the number into the job's store. If the collective
fails, the late ranks are those whose number is lower.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

LATE_S = 2.0  # between ranks that are only slow; a connection to a dead rank fails at once, before they arrive

_num_collectives: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def announce_arrival(group: ProcessGroup) -> Callable[[], str]:
    """Announce that this rank has reached the group's next collective.

    Returns:
        A function to call after an error. It names the ranks that have not reached the collective, all peer ranks if none is
        late. If several are, it first gives them time until LATE_S after this rank's arrival.
    """
    number = _num_collectives.get(group, 0) + 1
    _num_collectives[group] = number
    local_rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != local_rank]
    with suppress(RuntimeError):  # if the store is gone, the collective itself fails
        store.set(_key(group.group_name, local_rank), str(number))

    deadline = time.monotonic() + LATE_S

    def missing() -> str:
        while len(late := _late(group)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return rank_names(late or peers)

    return missing


def await_arrivals(group: ProcessGroup, timeout_s: float) -> None:
    """Wait on the host until all ranks have announced the collective that this rank announced last.

    A collective on a GPU returns no error to a host that waits for its result while a rank has stalled.

    Raises:
        RuntimeError: A rank has not arrived in time.
    """
    deadline = time.monotonic() + timeout_s
    while _late(group):
        if time.monotonic() > deadline:
            raise RuntimeError("no answer")
        time.sleep(0.001)


def _late(group: ProcessGroup) -> list[int]:
    """Return the ranks that have not announced this rank's last collective; none if the store is gone."""
    name, number = group.group_name, _num_collectives[group]
    store = dist.distributed_c10d._get_default_store()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    try:
        return [r for r in peers if not store.check([_key(name, r)]) or int(store.get(_key(name, r))) < number]
    except RuntimeError:
        return []


def rank_names(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _key(name: str, rank: int) -> str:
    return f"ringspan/{name}/{rank}"
