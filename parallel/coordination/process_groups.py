"""Process groups of a ring: its group, a second one for gradients, their timeout, and whether all ranks are on one host.

dK and dV have a communicator of their own, because messages of one communicator run in order. A gradient queued before the next
K/V would delay the next kernel by its whole transfer.
"""

import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # operators receive a group by its name

from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.json_collectives import all_gather_json

GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str]  # a mesh of one dimension, or a mesh and a dimension's name


class RingGroups(NamedTuple):
    """The group of a ring, and a second group of the same ranks for gradients."""

    group: ProcessGroup
    gradient_group: ProcessGroup
    one_host: bool  # all ranks are on one host, with GPUs that reach each other's memory
    ranks: list[int]  # global ranks
    timeout_s: float
    peers: str = ""  # names of the peer ranks, such as "ranks 0, 2, 3"


# Without references to their keys: a destroyed group has to end its threads. One of Gloo's that releases a tensor while Python
# exits aborts the process. A connection is the fields of RingGroups after its two groups.
_gradient_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_connections: WeakKeyDictionary[ProcessGroup, tuple[bool, list[int], float, str]] = WeakKeyDictionary()


def as_process_group(group: GroupLike | None, name: str = "group") -> ProcessGroup | None:
    """Return the process group that an argument means; for None the default group, or None without torch.distributed.

    Raises:
        ValueError: `group` is of another type, or a mesh whose dimension is not clear, unknown or not in rank order.
    """
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, ProcessGroup):
        check_group_exists(group, name)
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: rank {dist.get_rank()} is no member of this process group; only its ranks may call")
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, DeviceMesh) or not isinstance(dim, str | None):
        raise ValueError(
            f"{name}={group!r}: it must be a ProcessGroup, a DeviceMesh of one dimension, or (DeviceMesh, name of a dimension)"
        )
    if dim is None and mesh.ndim != 1:
        names: Any = mesh.mesh_dim_names or mesh.ndim
        raise ValueError(
            f"{name} is a DeviceMesh with dimensions {names}: a group has one; pass ({name}, 'name of a dimension')"
        )
    index = 0 if dim is None else mesh_dim(mesh, dim, name)
    if not torch.compiler.is_compiling():
        ranks = ranks_along(mesh, (index,), name)
        if ranks != sorted(ranks):
            raise ValueError(f"{name}: the mesh has ranks {ranks} in this order; a process group has them in ascending order")
    return mesh.get_group(index)


def check_group_exists(group: ProcessGroup, name: str) -> None:
    """Raise a ValueError if a group has been destroyed. Another group may have its name, by which operators find it."""
    if torch.compiler.is_compiling():
        return
    try:
        exists = _resolve_process_group(group.group_name) is group
    except (LookupError, RuntimeError):
        exists = False
    if not exists:
        raise ValueError(f"{name} has been destroyed (destroy_process_group): make it again after init_process_group")


def mesh_dim(mesh: DeviceMesh, dim: str, name: str) -> int:
    """Return the index of a dimension of a mesh."""
    if dim not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"{name}={dim!r}: the DeviceMesh has the dimensions {mesh.mesh_dim_names}; take one of them")
    return (mesh.mesh_dim_names or ()).index(dim)


def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...], name: str) -> list[int]:
    """Return the global ranks along some dimensions of a mesh, through this rank; the last of `dims` varies fastest."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in {mesh}; only its ranks may call")
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))]
    return ranks.permute([sorted(dims).index(dim) for dim in dims]).flatten().tolist()


def group_by_name(name: str) -> ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


def register_gradient_group(group: ProcessGroup, gradient_group: ProcessGroup) -> None:
    """Set the gradient group of a group. A Mesh creates both on all ranks, which every backend supports."""
    _gradient_groups[group] = gradient_group
    _connections.pop(group, None)  # of a ring call before the Mesh, with another gradient group


def ring_groups(group: ProcessGroup, device: torch.device) -> RingGroups:
    """Return both groups, ready for messages between any two ranks. The first call is a collective of the group."""
    if group not in _connections:
        if group not in _gradient_groups:
            _create_gradient_group(group, device)
        hosts: list[str] = []
        ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
        missing = arrivals.announce_arrival(group)

        def connect() -> None:
            hosts.extend(all_gather_json(_host_id(device), group, device))
            # NCCL creates a communicator in its first collective, which needs all ranks; later messages involve two ranks.
            for each in (group, _gradient_groups.get(group, group)):
                dist.all_reduce(torch.zeros(1, device=device), group=each)

        progress.wait(connect, lambda: f"{missing()}, to connect", timeout.total_seconds())
        peers = arrivals.rank_names([rank for rank in ranks if rank != dist.get_rank()])
        _connections[group] = len(set(hosts)) == 1, ranks, timeout.total_seconds(), peers
    return RingGroups(group, _gradient_groups.get(group, group), *_connections[group])


def timeout_of(group: ProcessGroup, device: torch.device | None = None) -> timedelta:
    """Return the timeout of a group's backend for a device; 10 minutes if the backend has none."""
    device = group._device_types[0] if device is None else device
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", timedelta(minutes=10))


def _create_gradient_group(group: ProcessGroup, device: torch.device) -> None:
    ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
    if len(ranks) == dist.get_world_size():
        _gradient_groups[group] = dist.new_group(ranks, timeout=timeout)
    elif dist.distributed_c10d._get_default_group().bound_device_id is None:
        _gradient_groups[group] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    # Else gradients use the ring's group: a communicator bound to its device is split off its parent, which needs ranks outside
    # the group. That is correct but slower, since gradients queue with K/V. A Mesh creates the second group in advance.


def _host_id(device: torch.device) -> str:
    """Return an id that is equal on ranks that can share memory: boot id and PID namespace, since containers share host names.

    A rank whose GPU cannot reach the memory of all other visible GPUs, or that sees no other GPU, gets an id of its own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        host = socket.gethostname()
    if device.type == "cuda":
        local_gpu = torch.cuda.current_device() if device.index is None else device.index
        other_gpus = [gpu for gpu in range(torch.cuda.device_count()) if gpu != local_gpu]
        if not other_gpus or not all(torch.cuda.can_device_access_peer(local_gpu, gpu) for gpu in other_gpus):
            return f"{host}, GPU of process {os.getpid()}"
    return host
