"""Messages between ranks: JSON values as tensors. torch's object collectives would unpickle what a socket delivers."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return the values of all ranks of a group, in rank order. A collective of the group.

    Args:
        value: what JSON can express; a tuple arrives as a list.
        group: process group; None: the default one.
        device: device of the tensors, which the group's backend must support.

    Returns:
        One value per rank; this rank's own has passed through JSON as well.
    """
    data = _encode(value, device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    texts = [data.new_zeros(longest) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(data, (0, longest - len(data))), group=group)
    return [_decode(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return global rank 0's value on all ranks of a group. A collective of the group.

    Args:
        value: what JSON can express; read on rank 0 only.
        group: process group that has global rank 0; None: the default one.
        device: device of the tensors.
    """
    data = _encode(value if dist.get_rank() == 0 else None, device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, src=0, group=group)
    if dist.get_rank() != 0:
        data = data.new_zeros(int(size))
    dist.broadcast(data, src=0, group=group)
    return _decode(data)


def _encode(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())
