"""Mesh: the ranks of a job as a grid data × ring × ulysses, and its process groups.

    mesh = Mesh(data=2, ring=2, ulysses=2)     8 ranks: 2 data replicas, each with its sequence over 4 ranks
    rank = (data_rank · ring + ring_rank) · ulysses + ulysses_rank

Ulysses is the innermost axis, because no compute overlaps its all-to-alls; the ring is next. So the neighbours of both are on
one host as long as they fit. context_rank = ring_rank · ulysses + ulysses_rank numbers the ranks that share a sequence. Every
rank creates all groups in the same order, once. A job of one process needs no torch.distributed.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

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
        self.data_group: ProcessGroup | None = None
        self.context_group: ProcessGroup | None = None
        self.ring_group: ProcessGroup | None = None
        self.ulysses_group: ProcessGroup | None = None
        if dist.is_initialized():
            self.timeout = self.timeout or process_groups.timeout_of(dist.distributed_c10d._get_default_group())
            self._build_groups()

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
            gradient_group = self._new_groups(rings)
            assert self.ring_group is not None and gradient_group is not None
            process_groups.register_gradient_group(self.ring_group, gradient_group)

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


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise ValueError(f"timeout={timeout!r} must be a timedelta or seconds > 0")
    return timedelta(seconds=timeout)
