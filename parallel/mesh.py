"""How the ranks of a job are arranged: data × ring × ulysses.

    mesh = Mesh(data=2, ring=2, ulysses=2)            # 8 ranks; data replicas, each spanning a sequence over 4 of them
    rank = (data_rank · ring + ring_rank) · ulysses + ulysses_rank

Ulysses is innermost, because its all-to-alls are in nobody's shadow, then the ring: neighbours of both stand on one host
as long as they fit. `context_rank` = ring_rank · ulysses + ulysses_rank counts the ranks that share a sequence. All groups
are built once, by every rank in the same order. A job of one process needs no torch.distributed.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ringspan.parallel.coordination import process_groups
from ringspan.parallel.layout import Layout


class Mesh:
    """Sizes, this process's rank along each, and the groups: `data_group`, `ring_group`, `ulysses_group`, `context_group`.

    `timeout` limits every wait in these groups; without one it is that of the job's own group. Without
    torch.distributed all sizes are 1 and the groups are None.
    """

    def __init__(self, data: int = 1, ring: int = 1, ulysses: int = 1, timeout: timedelta | float | None = None) -> None:
        for name, size in (("data", data), ("ring", ring), ("ulysses", ulysses)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r} must be an int >= 1")
        self.data, self.ring, self.ulysses = data, ring, ulysses
        self.timeout = _limit(timeout)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if data * ring * ulysses != self.world_size:
            raise ValueError(self._misfit())
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
        """How many ranks share a sequence."""
        return self.ring * self.ulysses

    def layout(self, kind: str, length: int) -> Layout:
        """A layout over the ranks that share a sequence; this process's shard is that of `context_rank`."""
        return Layout(kind, length, self.context_size, self.ulysses)

    def _build_groups(self) -> None:
        c, u = self.context_size, self.ulysses
        ranks = range(self.world_size)
        self.data_group = self._group([[d * c + i for d in range(self.data)] for i in range(c)])
        self.context_group = self._group([list(ranks[i : i + c]) for i in range(0, len(ranks), c)])
        self.ulysses_group = self._group([list(ranks[i : i + u]) for i in range(0, len(ranks), u)])
        rings = [[d * c + r * u + i for r in range(self.ring)] for d in range(self.data) for i in range(u)]
        self.ring_group = self._group(rings)
        if self.ring > 1:
            sibling = self._group(rings)
            assert self.ring_group is not None and sibling is not None
            process_groups.register_sibling(self.ring_group, sibling)

    def _group(self, all_ranks: list[list[int]]) -> ProcessGroup | None:
        """This process's of these groups. Every process makes every group, in this order."""
        mine = None
        for ranks in all_ranks:
            group = dist.new_group(ranks, timeout=self.timeout)
            if dist.get_rank() in ranks:
                mine = group
        return mine

    def _misfit(self) -> str:
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


def _limit(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise ValueError(f"timeout={timeout!r} must be a timedelta or seconds > 0")
    return timedelta(seconds=timeout)
