"""Compares the weights that all ranks hold in full, at each save: a flipped bit on one rank is found and the rank is named.

Each rank reduces a weight on its device to two integers, Σ bits and Σ position · bits modulo 2⁶⁴, which do not depend on the
order of the sum. Under ZeRO 3 no rank holds whole weights, so there is nothing to compare.
"""

from collections import Counter

import torch
from torch import Tensor

from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine

CHUNK = 2**22  # elements that are widened to int64 at a time


class ReplicasDifferError(RuntimeError):
    """Ranks hold different weights; the message names ranks and weight."""


def require_equal(engine: Engine, distributed: DistributedContext) -> None:
    """Raise a ReplicasDifferError on all ranks if a weight is not equal on all. All ranks call this together."""
    replicas = engine.replicas()
    if not replicas or distributed.world == 1:
        return
    sums = torch.stack([checksum(weight) for _, weight in replicas]).tolist()
    each = distributed.gather(sums)
    for index, (name, _) in enumerate(replicas):
        found = [tuple(table[index]) for table in each]
        if len(set(found)) == 1:
            continue
        (common, count), *_ = Counter(found).most_common()
        others = [str(rank) for rank, value in enumerate(found) if value != common]
        if 2 * count > len(found):
            who = f"rank {', '.join(others)} has another {name} than the other ranks"
        else:
            who = f"the ranks have different values of {name}, and no majority agrees"
        raise ReplicasDifferError(f"{who}, so that memory or a device of a rank is faulty")


def checksum(weight: Tensor) -> Tensor:
    """Return (2,) int64 on the CPU: equal for equal bits of `weight`, and different after the change of one element."""
    bits = (
        weight.detach().contiguous().reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
    )
    total = torch.zeros(2, dtype=torch.int64, device=weight.device)
    for number, chunk in enumerate(bits.split(CHUNK)):
        wide = chunk.long()
        positions = torch.arange(number * CHUNK + 1, number * CHUNK + 1 + len(wide), device=weight.device)
        total += torch.stack([wide.sum(), (wide * positions).sum()])
    return total.cpu()
