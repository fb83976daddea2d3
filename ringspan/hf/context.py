"""`context_parallel`: the ring of a transformers model, and its helpers of one call each.

    ring = context_parallel(mesh, layout="zigzag")
    with ring:                                        models of attn_implementation="ringspan" run on shards
        batch = ring.shard(batch)                     this rank's tokens, positions and labels, and the sequence's documents
        logits = model(**batch).logits
        loss = ring.loss(logits, batch["shift_labels"])
    loss.backward()                                   also after the `with`: each layer keeps its ring
    ring.reduce_gradients(model)

A sharded batch carries a `BatchShard` as one more keyword argument, which transformers passes down to every attention layer.
Attention raises if a batch has none inside the `with`, or has one outside.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.hf.batch import SHARD_KEY, BatchShard, WholeBatch
from ringspan.hf.loss import sum_gradients, token_loss
from ringspan.hf.loss_guard import install_guard, remove_guard
from ringspan.kernels.backends.choose import BACKENDS
from ringspan.parallel.coordination.argument_check import COMPARED_CALLS, check_same_on_all_ranks, report_rejection
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.transport.select import TRANSPORTS

COMPARED_BATCHES = COMPARED_CALLS + 2  # a count of its own in the argument check, next to ring calls and Ulysses exchanges
GRADIENTS = ("sum", "mean")
OVER = ("all", "ring")
_active: list["RingContext"] = []  # not thread-local: on a GPU the backward runs in other threads


def active_context() -> "RingContext | None":
    """Return the innermost context that is entered."""
    return _active[-1] if _active else None


class RingContext:
    """Ring of one model: a context manager with helpers. Made by `context_parallel`."""

    def __init__(
        self, mesh: Mesh, layout: str | Layout, backend: str = "auto", transport: str = "auto", deterministic: bool = False
    ) -> None:
        if isinstance(layout, Layout):
            if (layout.ranks, layout.ulysses) != (mesh.context_size, mesh.ulysses):
                raise ValueError(f"layout={layout} does not fit {mesh}: make it with mesh.layout(kind, length)")
        else:
            mesh.layout(layout, 0)  # raises for an unknown kind
        for name, value, known in (("backend", backend, ("auto", *BACKENDS)), ("transport", transport, TRANSPORTS)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: choose one of {known}")
        if mesh.world_size != mesh.data * mesh.context_size:
            raise ValueError(
                f"mesh={mesh} leaves out ranks of the job, which has {mesh.world_size}: loss and gradients are sums over "
                "all of them; use ring_attention in a model of your own, or a mesh without tensor parallelism"
            )
        self.mesh, self.layout = mesh, layout
        self.options: dict[str, Any] = dict(backend=backend, transport=transport, deterministic=deterministic)
        self.checked_positions = 0

    def __enter__(self) -> "RingContext":
        if not _active:
            install_guard()
        _active.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _active.pop()
        if not _active:
            remove_guard()

    def shard(self, batch: Any) -> dict[str, Any]:
        """Return this rank's shard of a batch that all ranks of the ring have.

        Args:
            batch: Mapping with `input_ids` (B, S), or `inputs_embeds` (B, S, D). Optional: `attention_mask` (B, S) of 0 and 1;
                `position_ids` (B or 1, S), which separate documents where they restart and no attention_mask is given;
                `cu_seq_lens_q` (N + 1,), or `document_ids` or `seq_idx` (B, S), which separate documents too; `labels` (B, S),
                which are shifted here, or `shift_labels` (B, S), which are not. Other entries pass unless they are tensors.

        Returns:
            A dict for `model(**batch)`: `input_ids` (B, n), `position_ids`, and one entry for attention, where n is the
            layout's `local_length`. With labels also `shift_labels` (B, n), filled with −100. Padding and documents are in
            the entry for attention, so there is no attention_mask.

        Raises:
            ValueError: An entry cannot be honoured, is missing, or differs between the ranks of a ring; or the batch is
                sharded already.
        """
        mesh = self.mesh
        group = mesh.context_group.group_name if mesh.context_group is not None and mesh.context_size > 1 else ""
        try:
            whole = WholeBatch(batch)
            if isinstance(self.layout, Layout) and self.layout.length != whole.length:
                raise ValueError(f"input_ids have {whole.length} tokens, layout has length={self.layout.length}")
        except ValueError as error:
            if group:
                report_rejection(group, _device(mesh), error, COMPARED_BATCHES)
            raise
        if group:
            check_same_on_all_ranks(group, _device(mesh), whole.describe, COMPARED_BATCHES)
        layout = self.layout if isinstance(self.layout, Layout) else mesh.layout(self.layout, whole.length)
        return whole.shard(layout, mesh)

    def loss(
        self,
        logits: Tensor,
        shift_labels: Tensor,
        num_items: Tensor | int | None = None,
        gradients: str = "sum",
        over: str = "all",
        ignore_index: int = -100,
    ) -> Tensor:
        """Return the cross-entropy per label over all ranks, the loss that one rank would compute.

        Its value is the same on all ranks. Its gradient is this rank's part.

        Args:
            logits: (B, n, V) of a shard.
            shift_labels: (B, n) labels of the same shard, already shifted.
            num_items: Number of labels to divide by, all ranks together, for gradient accumulation: see `num_items`. The
                default is the number of valid labels in the shards of all ranks, and 1 if there is none.
            gradients: How the caller reduces gradients over ranks: "sum" (`reduce_gradients`), or "mean" (DDP and FSDP), for
                which the gradient is multiplied by the number of ranks.
            over: Ranks whose labels count: "all", or those of one "ring", as an evaluation does for each batch.
            ignore_index: Label that does not count.

        Returns:
            Scalar in float32, or float64 for float64 logits.

        Raises:
            ValueError: Shapes differ, or `gradients` or `over` is unknown.
        """
        for name, value, choices in (("gradients", gradients, GRADIENTS), ("over", over, OVER)):
            if value not in choices:
                raise ValueError(f"{name}={value!r}: choose one of {choices}")
        factor = self.mesh.world_size if gradients == "mean" else 1
        group = _world(self.mesh) if over == "all" else self.mesh.context_group
        return token_loss(logits, shift_labels, num_items, factor, ignore_index, group)

    def num_items(self, *batches: dict[str, Any], ignore_index: int = -100) -> Tensor:
        """Return the number of valid labels of these sharded batches on all ranks, counted once per ring: () int64."""
        counts = [(batch["shift_labels"] != ignore_index).sum() for batch in batches]
        total = torch.stack(counts).sum()
        if _world(self.mesh) is not None:
            dist.all_reduce(total, group=_world(self.mesh))
        return total

    def reduce_gradients(self, model: nn.Module | Iterable[nn.Parameter]) -> None:
        """Sum the gradients of all ranks in place, of the data replicas too. A collective of all ranks.

        Args:
            model: A model, or its parameters. Frozen parameters are skipped.

        Raises:
            ValueError: The model is wrapped in DDP or FSDP, which reduce gradients themselves.
        """
        sum_gradients(model, _world(self.mesh))

    def gather(self, x: Tensor, batch: dict[str, Any], dim: int = 1) -> Tensor:
        """Return a tensor of the whole sequence from the shards of all ranks of the ring. Without gradient.

        Args:
            x: This rank's shard, for instance logits (B, n, V).
            batch: The sharded batch that the model received.
            dim: Sequence dimension of x.

        Returns:
            The tensor with S entries in `dim`, in natural order, on every rank.
        """
        shard: BatchShard = batch[SHARD_KEY]
        shards = [x.detach().contiguous()]
        if self.mesh.context_size > 1:
            shards = [torch.empty_like(shards[0]) for _ in range(self.mesh.context_size)]
            dist.all_gather(shards, x.detach().contiguous(), group=self.mesh.context_group)
        return shard.layout.unshard(shards, dim)

    def check_positions(self, position_ids: Tensor | None, shard: BatchShard, layer: str) -> None:
        """Raise a ValueError if a layer runs with other positions than the shard's.

        On a GPU the comparison needs a host sync, so only the first forwards are compared; RINGSPAN_CHECK=1 compares all.
        """
        if position_ids is None or torch.compiler.is_compiling():
            return
        if position_ids.is_cuda and self.checked_positions >= COMPARED_CALLS and os.environ.get("RINGSPAN_CHECK") != "1":
            return
        if shard.is_checked(position_ids):
            return
        self.checked_positions += 1
        if not shard.has_positions(position_ids):
            raise ValueError(
                f"position_ids of {layer} are not those of the shard: pass all entries of the sharded batch, model(**batch), "
                "and call ring.shard once for each batch"
            )


def context_parallel(
    mesh: Any = None,
    layout: str | Layout = "zigzag",
    *,
    backend: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> RingContext:
    """Return the ring of a model: enter it with `with`, and call its helpers.

    Args:
        mesh: A `ringspan.Mesh`; a DeviceMesh of one dimension, which is the ring; or (DeviceMesh, name of the ring's
            dimension), whose other dimensions are data replicas. None: one ring of all ranks.
        layout: "zigzag", "contiguous" or "striped", for batches of any length; or a Layout, for one length.
        backend: Backend of attention, as in `attention`.
        transport: Transport of the ring, as in `ring_attention`.
        deterministic: Make gradients equal bit for bit in every run.

    Returns:
        A context manager. Inside, models of attn_implementation="ringspan" take sharded batches only.

    Raises:
        ValueError: An argument has an unsupported value.

    Example:
        >>> ring = context_parallel(Mesh(data=2, ring=4))
        >>> with ring:
        ...     batch = ring.shard(batch)
    """
    if mesh is None:
        mesh = Mesh(ring=dist.get_world_size() if dist.is_initialized() else 1)
    elif not isinstance(mesh, Mesh):
        device_mesh, ring = mesh if isinstance(mesh, tuple) and len(mesh) == 2 else (mesh, None)
        if not isinstance(device_mesh, DeviceMesh):
            kind = type(mesh).__name__
            raise ValueError(f"mesh must be a ringspan.Mesh or a DeviceMesh, not {kind}: Mesh(data, ring, ulysses)")
        mesh = Mesh.from_device_mesh(device_mesh, ring=ring)
    return RingContext(mesh, layout, backend, transport, deterministic)


def _world(mesh: Mesh) -> Any:
    """Return the group of all ranks; None if there is one."""
    return dist.group.WORLD if mesh.world_size > 1 else None


def _device(mesh: Mesh) -> torch.device:
    """Return the device of collectives of objects."""
    assert mesh.context_group is not None
    is_cuda = any(device.type == "cuda" for device in mesh.context_group._device_types)
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda and torch.cuda.is_available() else torch.device("cpu")
