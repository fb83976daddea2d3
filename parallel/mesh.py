"""Mesh: the ranks of a job as a grid data × ring × ulysses, and its process groups.

    mesh = Mesh(data=2, ring=2, ulysses=2)     8 ranks: 2 data replicas, each with its sequence over 4 ranks
    rank = (data_rank · ring + ring_rank) · ulysses + ulysses_rank

Ulysses is the innermost axis, because no compute overlaps its all-to-alls; the ring is next. So the neighbours of both are on
one host as long as they fit. context_rank = ring_rank · ulysses + ulysses_rank numbers the ranks that share a sequence. Every
rank creates all groups in the same order, once. A job of one process needs no torch.distributed. `from_device_mesh` takes the
grid of a torch DeviceMesh instead, in any order.
"""

import math
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringspan.parallel.coordination import process_groups
from ringspan.parallel.layout import Layout


class Mesh:
    """Grid of the job's ranks: data replicas × ring × Ulysses. Creating one is a collective of all ranks.

    Args:
        data: Number of data replicas. Each replica processes its own sequences.
        ring: Number of ranks of a ring.
        ulysses: Number of ranks of a Ulysses group. data · ring · ulysses must equal the world size, which is 1 without
            torch.distributed.
        timeout: Limit of every wait in the mesh's groups, a timedelta or seconds. The default is the default group's.

    Attributes:
        data, ring, ulysses, world_size, context_size: Sizes; context_size = ring · ulysses ranks share a sequence.
        data_rank, ring_rank, ulysses_rank, context_rank: This process's rank along each axis.
        data_group, ring_group, ulysses_group, context_group: This process's groups; None without torch.distributed.
        context_ranks: Ranks in the job that share this process's sequences, in the order of `context_rank`.
        timeout: The limit as a timedelta; None without torch.distributed if none was passed.

    Raises:
        ValueError: A size is not a positive int, the sizes do not match the number of ranks, or the timeout is not positive.
    """

    def __init__(self, data: int = 1, ring: int = 1, ulysses: int = 1, timeout: timedelta | float | None = None) -> None:
        for name, size in (("data", data), ("ring", ring), ("ulysses", ulysses)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r} must be an int >= 1")
        self.data, self.ring, self.ulysses = data, ring, ulysses
        self.timeout = _as_timedelta(timeout)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if data * ring * ulysses != self.world_size:
            raise ValueError(self._size_error())
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.data_rank, self.context_rank = divmod(rank, self.context_size)
        self.ring_rank, self.ulysses_rank = divmod(self.context_rank, ulysses)
        self.context_ranks = list(range(rank - self.context_rank, rank - self.context_rank + self.context_size))
        self.data_group: ProcessGroup | None = None
        self.context_group: ProcessGroup | None = None
        self.ring_group: ProcessGroup | None = None
        self.ulysses_group: ProcessGroup | None = None
        if dist.is_initialized():
            self.timeout = self.timeout or process_groups.timeout_of(dist.distributed_c10d._get_default_group())
            self._build_groups()
            self._drop_groups_at_exit()

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        ring: str | None = None,
        ulysses: str | None = None,
        data: str | tuple[str, ...] | None = None,
    ) -> "Mesh":
        """Return the mesh with the axes of a torch DeviceMesh. A collective of all ranks of the job.

        It takes the DeviceMesh's groups, and creates those that the DeviceMesh does not have.

        Args:
            device_mesh: DeviceMesh over all ranks of the job, each dimension in ascending rank order.
            ring: Name of the ring's dimension; None: no ring, or the only dimension of a mesh that has one.
            ulysses: Name of the Ulysses dimension; None: no Ulysses.
            data: Names of the dimensions whose ranks have different sequences; None: all other dimensions. Ranks along any
                dimension without a name here, such as tensor parallelism, have the same tokens.

        Returns:
            A Mesh. Its timeout is that of the ring's group.

        Raises:
            ValueError: A name is unknown or used twice, or the DeviceMesh does not have all ranks in ascending order.

        Example:
            >>> device_mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))
            >>> mesh = Mesh.from_device_mesh(device_mesh, ring="cp")
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise ValueError(f"device_mesh={device_mesh!r} must be a torch DeviceMesh, from init_device_mesh")
        if device_mesh.size() != dist.get_world_size():
            raise ValueError(
                f"device_mesh has {device_mesh.size()} ranks, the job has {dist.get_world_size()}: pass the mesh of all ranks "
                "and name its dimensions (ring_attention takes a part of a mesh as its group)"
            )
        if ring is None and ulysses is None and device_mesh.ndim == 1:
            axes: dict[str, tuple[int, ...]] = {"ring": (0,), "ulysses": ()}
        elif ring is None and ulysses is None:
            raise ValueError(f"ring=None, ulysses=None: name the ring's dimension, one of {device_mesh.mesh_dim_names}")
        else:
            dims = (("ring", ring), ("ulysses", ulysses))
            axes = {a: () if dim is None else (process_groups.mesh_dim(device_mesh, dim, a),) for a, dim in dims}
        context = axes["ring"] + axes["ulysses"]
        if data is None:
            axes["data"] = tuple(dim for dim in range(device_mesh.ndim) if dim not in context)
        else:
            names = data if isinstance(data, tuple | list) else (data,)
            axes["data"] = tuple(process_groups.mesh_dim(device_mesh, dim, "data") for dim in names)
        if len(set(axes["data"] + context)) != len(axes["data"] + context):
            raise ValueError(f"data={data!r}, ring={ring!r}, ulysses={ulysses!r}: each dimension may be used once")
        mesh = cls.__new__(cls)
        mesh._take_axes(device_mesh, axes)
        mesh._drop_groups_at_exit()
        return mesh

    def _take_axes(self, device_mesh: DeviceMesh, axes: dict[str, tuple[int, ...]]) -> None:
        ranks = device_mesh.mesh
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None, "the mesh has all ranks of the job"

        def position(dims: tuple[int, ...]) -> tuple[int, int]:
            """Return the size of these dimensions together, and this rank's index."""
            size, index = 1, 0
            for dim in dims:
                size, index = size * ranks.shape[dim], index * ranks.shape[dim] + coordinate[dim]
            return size, index

        def group(dims: tuple[int, ...]) -> ProcessGroup | None:
            rank_lists = _rank_lists(ranks, dims)
            if len(dims) != 1:
                return self._new_groups(rank_lists)
            if any(each != sorted(each) for each in rank_lists):
                name = (device_mesh.mesh_dim_names or ("0",) * len(coordinate))[dims[0]]
                raise ValueError(
                    f"device_mesh: the ranks along {name!r} are not in ascending order; init_device_mesh sorts them"
                )
            return device_mesh.get_group(dims[0])

        self.world_size = dist.get_world_size()
        self.timeout = process_groups.timeout_of(dist.distributed_c10d._get_default_group())
        self.data, self.data_rank = position(axes["data"])
        self.ring, self.ring_rank = position(axes["ring"])
        self.ulysses, self.ulysses_rank = position(axes["ulysses"])
        self.context_rank = self.ring_rank * self.ulysses + self.ulysses_rank
        self.data_group, self.ring_group, self.ulysses_group = (group(axes[axis]) for axis in ("data", "ring", "ulysses"))
        assert self.ring_group is not None
        self.timeout = process_groups.timeout_of(self.ring_group)
        context = axes["ring"] + axes["ulysses"]
        self.context_group = self.ring_group if not axes["ulysses"] else self.ulysses_group
        if len(context) == 2:
            self.context_group = self._new_groups(_rank_lists(ranks, context))
        self.context_ranks = process_groups.ranks_along(device_mesh, context, "device_mesh")
        if self.ring > 1:
            self._add_gradient_group(_rank_lists(ranks, axes["ring"]))

    @property
    def context_size(self) -> int:
        """Number of ranks that share a sequence: ring · ulysses."""
        return self.ring * self.ulysses

    def layout(self, kind: str, length: int) -> Layout:
        """Return a layout over the ranks that share a sequence. This process owns the shard of `context_rank`.

        Args:
            kind: "contiguous", "zigzag" or "striped"; "striped" requires ulysses = 1.
            length: Number of tokens in the whole sequence.

        Returns:
            Layout with ranks = context_size and this mesh's `ulysses`.

        Raises:
            ValueError: An argument has an unsupported value.
        """
        return Layout(kind, length, self.context_size, self.ulysses)

    def _build_groups(self) -> None:
        c, u = self.context_size, self.ulysses
        ranks = range(self.world_size)
        self.data_group = self._new_groups([[d * c + i for d in range(self.data)] for i in range(c)])
        self.context_group = self._new_groups([list(ranks[i : i + c]) for i in range(0, len(ranks), c)])
        self.ulysses_group = self._new_groups([list(ranks[i : i + u]) for i in range(0, len(ranks), u)])
        rings = [[d * c + r * u + i for r in range(self.ring)] for d in range(self.data) for i in range(u)]
        self.ring_group = self._new_groups(rings)
        if self.ring > 1:
            self._add_gradient_group(rings)

    def _add_gradient_group(self, rings: list[list[int]]) -> None:
        gradient_group = self._new_groups(rings)
        assert self.ring_group is not None and gradient_group is not None
        process_groups.register_gradient_group(self.ring_group, gradient_group)

    def _drop_groups_at_exit(self) -> None:
        """Drop the groups before Python exits, when a thread of Gloo can abort the process. A script's mesh would keep them."""
        weakref.finalize(self, vars(self).clear)

    def _new_groups(self, rank_lists: list[list[int]]) -> ProcessGroup | None:
        """Create these groups and return the one of this process. Every rank must create every group, in the same order."""
        local_group = None
        for ranks in rank_lists:
            group = dist.new_group(ranks, timeout=self.timeout)
            if dist.get_rank() in ranks:
                local_group = group
        return local_group

    def _size_error(self) -> str:
        data, ring, ulysses, world = self.data, self.ring, self.ulysses, self.world_size
        product = data * ring * ulysses
        message = f"data={data} · ring={ring} · ulysses={ulysses} = {product}, but the job has {world} ranks: "
        context = ring * ulysses
        if not dist.is_initialized():
            return message + "start it with torchrun and call init_process_group first"
        if world % context == 0:
            return message + f"data={world // context} fits"
        if world % ulysses == 0:
            return message + f"ring · ulysses = {context} does not divide {world}; ring={world // ulysses} with data=1 fits"
        return message + f"ulysses={ulysses} does not divide {world}; ring={world} with ulysses=1 and data=1 fits"

    def __repr__(self) -> str:
        return f"Mesh(data={self.data}, ring={self.ring}, ulysses={self.ulysses}): rank {self.data_rank}.{self.context_rank}"


def _rank_lists(ranks: Tensor, dims: tuple[int, ...]) -> list[list[int]]:
    """Return the ranks along these dimensions of a mesh, the last varying fastest, for each index of the others."""
    others = [dim for dim in range(ranks.ndim) if dim not in dims]
    return ranks.permute(*others, *dims).reshape(-1, math.prod(ranks.shape[dim] for dim in dims)).tolist()


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise ValueError(f"timeout={timeout!r} must be a timedelta or seconds > 0")
    return timedelta(seconds=timeout)
