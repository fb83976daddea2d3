"""Symmetric memory for ranks without GPUs: files that all of them map. Enough of its interface for `parallel.pull`.

It shows what the pull transport reads from whom, from where and after which barrier; streams only a GPU can show. Memory is
filled with NaN, and copies are made only when they are waited for, as late as a copy engine may make them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import op, pull
from parallel.beside import Beside

_paths: dict[int, str] = {}
slow_rank: int | None = None  # its copies come late


class Handle:
    def __init__(self, paths: list[str], group: dist.ProcessGroup) -> None:
        self.group = group
        self.memory = [torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8) for path in paths]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        count = torch.Size(sizes).numel()
        typed = self.memory[rank][: self.memory[rank].numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        assert storage_offset + count <= typed.numel()
        return typed[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0
        dist.barrier(group=self.group)


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    path = tempfile.NamedTemporaryFile(prefix="ringspan-", delete=False).name  # noqa: SIM115
    memory = torch.from_file(path, shared=True, size=size, dtype=dtype).fill_(255)  # NaN in every type of floats
    _paths[id(memory)] = path
    return memory


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> Handle:
    paths: list[Any] = [None] * group.size()
    dist.all_gather_object(paths, _paths[id(memory)], group=group)
    handle = Handle(paths, group)
    dist.barrier(group=group)
    Path(_paths.pop(id(memory))).unlink()  # mapped by all: it goes when they do
    return handle


def copy_late(places: list[Tensor], sources: list[Tensor], beside: Beside) -> Callable[[], object]:
    left = [None]

    def finish() -> None:
        if not left:
            return  # made once, however many wait for it
        left.clear()
        if dist.get_rank() == slow_rank:
            time.sleep(0.05)
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)

    return finish


@contextmanager
def installed(slow: int | None = None) -> Iterator[None]:
    global slow_rank
    slow_rank = slow
    saved = pull.symmetric_memory, pull.copy_beside, pull.settle, op.choose_transport
    pull.symmetric_memory = __import__(__name__, fromlist=["empty"])
    pull.copy_beside, pull.settle = copy_late, lambda device: None
    op.choose_transport = lambda name, *_: name
    try:
        yield
    finally:
        pull.symmetric_memory, pull.copy_beside, pull.settle, op.choose_transport = saved
