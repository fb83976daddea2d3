"""Token-weighted loss over ranks, and the sum of gradients over ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

BUCKET_BYTES = 64 * 2**20


class WithValue(torch.autograd.Function):
    """Returns `value`, and passes the gradient to `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def token_loss(
    logits: Tensor, labels: Tensor, num_items: Tensor | int | None, factor: float, ignore_index: int, group: Any
) -> Tensor:
    """Return the sum of cross-entropies of all ranks of a group, divided by the number of labels.

    Args:
        logits: (B, n, V).
        labels: (B, n), shifted.
        num_items: Number of labels; None: those of the group, at least 1.
        factor: Factor of the gradient.
        ignore_index: Label that does not count.
        group: Process group; None is one rank.

    Raises:
        ValueError: The shapes of logits and labels differ.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and shift_labels {tuple(labels.shape)} are not of one shard: pass its own"
        )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")
    sums = torch.stack([total.detach().double(), (labels != ignore_index).sum().double()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count = sums[1].clamp(min=1) if num_items is None else num_items
    return WithValue.apply(total * factor / count, sums[0] / count)


def sum_gradients(model: nn.Module | Iterable[nn.Parameter], group: Any) -> None:
    """Sum the gradients of all ranks of a group, in buckets of one dtype."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model=DistributedDataParallel reduces gradients itself, to their mean: use ring.loss(…, gradients='mean')"
        )
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
    parameters = [p for p in parameters if p.requires_grad]
    if any(hasattr(p, "placements") for p in parameters):
        raise ValueError("model has DTensors: FSDP reduces gradients itself, to their mean: use ring.loss(…, gradients='mean')")
    if group is None or not parameters:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(has_gradient, group=group)  # a parameter may be unused on one rank and used on another
    gradients = []
    for parameter, used in zip(parameters, has_gradient.tolist(), strict=True):
        if used:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one dtype and device, in order, up to BUCKET_BYTES."""
    by_kind: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        bucket = by_kind.setdefault((gradient.dtype, gradient.device), [])
        if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(gradient)
    yield from by_kind.values()
