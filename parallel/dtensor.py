"""DTensor inputs: local shards for a ring, and DTensors of its results.

    q, k, v    DTensor, Shard(sequence dim) on the ring's mesh dimension       → local shards, the rank's rows of the layout
    out, lse   local results                                                   → DTensor with the placements of q

Along other mesh dimensions tensors may be replicated, or sharded on the batch. DTensor does not know layouts: with "zigzag" and
"striped" its rows are in the layout's order, shard after shard. A contiguous layout has DTensor's own order, and shards of
uneven sequences are padded here.
"""

from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ringspan.parallel.coordination.process_groups import GroupLike, as_process_group, ranks_along
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh


def has_dtensors(*tensors: Any) -> bool:
    """Return whether an argument is a DTensor."""
    if all(type(x) in (Tensor, Parameter) or not isinstance(x, Tensor) for x in tensors):  # importing DTensor takes a second
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(x, DTensor) for x in tensors)


class DTensorShards:
    """Local shards of q, k, v and sinks, and the way back for results.

    Args:
        q: DTensor, (B, S, Hq, D), or packed (T, Hq, D), sharded on `sequence_dim` on at least one mesh dimension.
        k: DTensor with the mesh and placements of q.
        v: DTensor with the mesh and placements of q.
        sinks: (Hq,), None, a tensor, or a DTensor that is replicated on q's mesh.
        plain: Other arguments by name, which may not be DTensors.
        sequence_dim: 1, or 0 for packed tensors.
        layout: Layout of the call.
        place: The ring's group, or the mesh of the call. None: the mesh dimension on which q is sharded.

    Attributes:
        q, k, v, sinks: Local tensors, attached to the DTensors' graph.
        group: The ring's group.

    Raises:
        ValueError: Some inputs are no DTensors, or have other placements, another mesh or other ranks.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        sinks: Any,
        plain: dict[str, Any],
        sequence_dim: int,
        layout: Layout | None,
        place: GroupLike | Mesh | None,
    ) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, DTensor):
                raise ValueError(
                    f"{name} is no DTensor, but other inputs are: pass q, k and v as DTensors, or all as local shards"
                )
            if x.device_mesh != q.device_mesh or x.placements != q.placements:
                raise ValueError(f"{name} has placements={x.placements} on {x.device_mesh}: they must be those of q")
        for name, x in plain.items():
            if isinstance(x, DTensor):
                raise ValueError(f"{name} is a DTensor: pass a plain tensor, the same on every rank")
        self.like: Any = q
        self.sequence_dim = sequence_dim
        mesh, placements = q.device_mesh, q.placements
        is_sequence = [type(p) is Shard and p.dim % q.ndim == sequence_dim for p in placements]
        for p, is_sharded in zip(placements, is_sequence, strict=True):
            is_batch = sequence_dim > 0 and type(p) is Shard and p.dim % q.ndim == 0
            if not (is_sharded or is_batch or isinstance(p, Replicate)):
                works = f"Shard({sequence_dim}), the sequence, on the ring's dimension, and Replicate() elsewhere"
                raise ValueError(
                    f"q has placements={placements}: {p} does not work; {works}{' or Shard(0)' * (sequence_dim > 0)}"
                )
        self.dims = tuple(dim for dim, is_sharded in enumerate(is_sequence) if is_sharded)
        if isinstance(place, Mesh):
            self.group, ranks = place.ring_group, place.context_ranks
        else:
            derived = mesh.get_group(self.dims[0]) if place is None and len(self.dims) == 1 else None
            self.group = derived or as_process_group(place)
            ranks = [0] if self.group is None else dist.get_process_group_ranks(self.group)
        sharded_over = ranks_along(mesh, self.dims, "q")
        if sharded_over != ranks:
            raise ValueError(
                f"q has placements={placements}, which shard the sequence over ranks {sharded_over}, but the ring has ranks "
                f"{ranks}: pass the group of the mesh dimension on which q is sharded"
            )
        self.q, self.k, self.v = (self._local(x, layout) for x in (q, k, v))
        self.sinks = sinks
        if isinstance(sinks, DTensor):
            if sinks.device_mesh != mesh or not all(isinstance(p, Replicate) for p in sinks.placements):
                raise ValueError(
                    f"sinks have placements={sinks.placements} on {sinks.device_mesh}: Replicate() on q's mesh works"
                )
            # each rank has a part of the gradient, except where its rows are replicated
            self.sinks = sinks.to_local(grad_placements=[p if isinstance(p, Replicate) else Partial() for p in placements])

    def _local(self, x: Any, layout: Layout | None) -> Tensor:
        """Return the local shard. A short shard of an uneven contiguous sequence is padded."""
        local: Tensor = x.to_local()
        dim = self.sequence_dim
        if (
            not isinstance(layout, Layout)
            or len(self.dims) != 1
            or layout.kind != "contiguous"
            or x.shape[dim] != layout.length
        ):
            return local
        missing = layout.local_length - local.shape[dim]
        if missing <= 0 or layout.local_length != -(
            -layout.length // layout.ranks
        ):  # shards begin at other rows than DTensor's
            return local
        return F.pad(local, [0, 0] * (local.ndim - 1 - dim) + [0, missing])

    @overload
    def wrap(self, result: Tensor) -> Tensor: ...
    @overload
    def wrap(self, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]: ...
    @overload
    def wrap(self, result: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]: ...
    def wrap(self, result: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Return out, or (out, lse), as DTensors."""
        if isinstance(result, tuple):
            return self._wrapped(result[0], self.sequence_dim), self._wrapped(result[1], self.sequence_dim + 1)
        return self._wrapped(result, self.sequence_dim)

    def _wrapped(self, local: Tensor, dim: int) -> Tensor:
        """Return the DTensor of a local result, whose sequence dimension is `dim`."""
        from torch.distributed.tensor import DTensor, Shard

        rows = self.like.to_local().shape[self.sequence_dim]
        placements = [Shard(dim) if i in self.dims else p for i, p in enumerate(self.like.placements)]
        shape = list(local.shape)
        shape[dim] = self.like.shape[self.sequence_dim]
        if self.sequence_dim > 0:
            shape[0] = self.like.shape[0]
        stride = torch.empty(shape, device="meta").stride()
        local = local.narrow(dim, 0, rows).contiguous()
        return DTensor.from_local(
            local, self.like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
