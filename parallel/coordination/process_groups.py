"""What the ring needs of a process group besides its name: a second one for gradients, its time limit, who is on which host.

dK and dV travel on a communicator of their own, because messages of one communicator wait for each other: a gradient
queued before the next K/V would put its whole journey between two kernels.
"""

import os
import socket
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # ops take a group by its name

from ringspan.parallel.coordination import arrivals, progress


class RingGroups(NamedTuple):
    """A group, and another of the same ranks for gradients."""

    group: ProcessGroup
    gradients: ProcessGroup
    one_host: bool  # with GPUs that reach each other's memory
    ranks: list[int]  # in the whole job
    seconds: float  # the time limit
    others: str = ""  # "ranks 0, 2, 3": all but this one


# By name, and with the group: after all groups were destroyed, new ones have old names.
_siblings: dict[str, tuple[ProcessGroup, ProcessGroup]] = {}
_pairs: dict[str, RingGroups] = {}


def by_name(name: str) -> ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def register_sibling(group: ProcessGroup, sibling: ProcessGroup) -> None:
    """Mesh makes both with all ranks present, which every backend can do."""
    _siblings[group.group_name] = group, sibling


def ring_groups(group: ProcessGroup, device: torch.device) -> RingGroups:
    """Both groups, ready for messages between any two ranks. The first call is a collective of the group."""
    name = group.group_name
    if name not in _pairs or _pairs[name].group is not group:
        owner, sibling = _siblings.get(name, (None, None))
        if owner is not group or sibling is None:
            sibling = _new_sibling(group, device)
        hosts: list[str | None] = [None] * group.size()
        ranks, limit, both = dist.get_process_group_ranks(group), timeout_of(group, device), (group, sibling)
        missing = arrivals.announce_arrival(group)

        def meet() -> None:
            dist.all_gather_object(hosts, _host(device), group=group)
            # NCCL makes a communicator in its first collective, where all ranks have to be; later messages are between two.
            for each in both:
                dist.all_reduce(torch.zeros(1, device=device), group=each)

        progress.wait(meet, lambda: f"{missing()}, to meet for the first time", limit.total_seconds())
        others = arrivals.ranks([rank for rank in ranks if rank != dist.get_rank()])
        _pairs[name] = RingGroups(group, sibling, len(set(hosts)) == 1, ranks, limit.total_seconds(), others)
    return _pairs[name]


def timeout_of(group: ProcessGroup, device: torch.device | None = None) -> timedelta:
    device = group._device_types[0] if device is None else device
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", timedelta(minutes=10))


def _new_sibling(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    ranks, limit = dist.get_process_group_ranks(group), timeout_of(group, device)
    if len(ranks) == dist.get_world_size():
        return dist.new_group(ranks, timeout=limit)
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        # A communicator bound to its device is split off its parent, where ranks outside the group would have to help.
        return group  # right, only slower: gradients queue with K/V. A Mesh makes the second group beforehand.
    return dist.new_group(ranks, timeout=limit, use_local_synchronization=True)


def _host(device: torch.device) -> str:
    """Where memory can be shared: the machine, by its boot id even where containers share a name, and its processes.

    A GPU that cannot reach the memory of all others that it sees, or sees no others, is on its own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        host = socket.gethostname()
    if device.type == "cuda":
        mine = torch.cuda.current_device() if device.index is None else device.index
        others = [other for other in range(torch.cuda.device_count()) if other != mine]
        if not others or not all(torch.cuda.can_device_access_peer(mine, other) for other in others):
            return f"{host}, GPU of process {os.getpid()}"
    return host
