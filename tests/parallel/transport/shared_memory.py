"""Symmetric memory and signals for ranks without GPUs: files that all ranks map, with the interface that `copy_engine` uses.

This tests source and target of each copy, and the signal before it. Streams need a GPU or the stream simulator: here a wait
for a signal blocks the rank. Memory is filled with NaN, and the copies of one rank may be slow.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.parallel import ring_attention
from ringspan.parallel.transport import copy_engine
from ringspan.parallel.transport.gpu_signals import NUM_SIGNALS

_paths: dict[int, str] = {}  # by id of a tensor that waits for its rendezvous
slow_rank: int | None = None


class Handle:
    """The buffers of all ranks."""

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
    memory = torch.from_file(path, shared=True, size=size, dtype=dtype).fill_(255)  # NaN in every floating-point type
    _paths[id(memory)] = path
    return memory


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> Handle:
    paths: list[Any] = [None] * group.size()
    dist.all_gather_object(paths, _paths[id(memory)], group=group)
    handle = Handle(paths, group)
    dist.barrier(group=group)
    Path(_paths.pop(id(memory))).unlink()  # all ranks have mapped it, so it lives until they unmap it
    return handle


class SharedMemorySignals:
    """Implementation of GpuSignals that sets and polls flags in shared memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        flags = empty(NUM_SIGNALS * group.size(), torch.uint8, device)
        self.local_flags = flags.zero_().view(NUM_SIGNALS, -1)
        handle = rendezvous(flags, group)
        shape = tuple(self.local_flags.shape)
        self.flags = [handle.get_buffer(rank, shape, torch.uint8) for rank in range(group.size())]
        self.rank = group.rank()

    def signal(self, kind: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            assert not self.flags[rank][kind, self.rank], f"rank {rank} has not cleared the previous signal {kind}"
            self.flags[rank][kind, self.rank] = 1

    def wait(self, kind: int, ranks: Iterable[int]) -> None:
        start = time.monotonic()
        for rank in ranks:
            assert rank != self.rank
            while not self.local_flags[kind, rank]:
                assert time.monotonic() - start < 60, f"signal {kind} of rank {rank} is missing"
                time.sleep(1e-4)
            self.local_flags[kind, rank] = 0


def copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    if dist.get_rank() == slow_rank:
        time.sleep(0.02)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@contextmanager
def patched_copy_engine(slow: int | None = None) -> Iterator[None]:
    """Make the copy engine transport use this module; the copies of rank `slow` are slow."""
    global slow_rank
    slow_rank = slow
    replacements = [
        (copy_engine, "symmetric_memory", sys.modules[__name__]),
        (copy_engine, "GpuSignals", SharedMemorySignals),
        (copy_engine, "copy", copy),
        (copy_engine, "synchronize", lambda device: None),
        (ring_attention, "choose_transport", lambda name, *_: name),
    ]
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement))
        yield
