"""Symmetric memory for ranks without GPUs: files that all of them map. Enough of its interface for `parallel.copy_engines`.

It shows what copy engines bring to whom, from where and after which signal; streams only a GPU can show. Memory is
filled with NaN, one rank may be slow to copy, and a wait for a signal waits here and now.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.parallel import ring_attention
from ringspan.parallel.transport import copy_engine

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


class SharedMemorySignals:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        counts = empty(4 * group.size() * 8, torch.uint8, device)
        self.mine = counts.zero_().view(torch.int64).view(4, -1)
        handle = rendezvous(counts, group)
        self.all = [handle.get_buffer(rank, tuple(self.mine.shape), torch.int64) for rank in range(group.size())]
        self.rank = group.rank()

    def tell(self, what: int, count: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            assert count > self.all[rank][what, self.rank], "a count only grows"
            self.all[rank][what, self.rank] = count

    def meet(self, what: int, count: int, told: Iterable[int], awaited: Iterable[int]) -> None:
        self.tell(what, count, told)
        self.wait(what, count, awaited)

    def wait(self, what: int, count: int, ranks: Iterable[int]) -> None:
        begun = time.monotonic()
        for rank in ranks:
            assert rank != self.rank
            while self.mine[what, rank] < count:
                assert time.monotonic() - begun < 60, f"signal {what} of rank {rank} never came to {count}"
                time.sleep(1e-4)


def copy(places: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    if dist.get_rank() == slow_rank:
        time.sleep(0.02)
    for place, source in zip(places, sources, strict=True):
        place.copy_(source)


@contextmanager
def installed(slow: int | None = None) -> Iterator[None]:
    global slow_rank
    slow_rank = slow
    fakes = [
        (copy_engine, "symmetric_memory", __import__(__name__, fromlist=["empty"])),
        (copy_engine, "GpuSignals", SharedMemorySignals),
    ]
    fakes += [(copy_engine, "copy", copy), (copy_engine, "settle", lambda device: None)]
    fakes += [(ring_attention, "choose_transport", lambda name, *_: name)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in fakes]
    for module, name, fake in fakes:
        setattr(module, name, fake)
    try:
        yield
    finally:
        for module, name, right in saved:
            setattr(module, name, right)
