"""Common parts of the tests of hosts: weights, data, and the comparison of one step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, LENGTH = 64, 64
DOCUMENTS = [7, 24, 1, 32]


def set_weights(model: nn.Module) -> None:
    """Give a model weights that depend only on its shapes."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1, generator=generator)


def tokens(rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Token ids and labels (rows, length), some of which do not count."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, length), generator=generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, -100)


def step_results(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss and all gradients after a backward, summed over ranks."""
    loss.backward()
    results = {"loss": loss.detach().clone()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if dist.is_initialized() and dist.get_world_size() > 1:
        for x in results.values():
            dist.all_reduce(x)
    return results


def largest_difference(expected: dict[str, Tensor], results: dict[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry of its tensor."""
    assert expected.keys() == results.keys()
    gaps: dict[str, Any] = {
        n: float((results[n] - x).abs().max() / x.abs().max().clamp(min=1e-30)) for n, x in expected.items()
    }
    return max(gaps.values())
