"""Signals between the GPUs of one host: stream memory operations that write and wait for flags in symmetric memory.

    rank a   signal(KV_WRITTEN, (b,))      a's stream sets a flag in b's memory after its earlier work has finished
    rank b   wait(KV_WRITTEN, (a,))        b's stream continues once the flag is set, and clears it

The GPU's front end executes both, as it starts kernels and copies. A wait therefore takes no SM and can be in flight
concurrently with a kernel that occupies all of them. Each rank has a flag of its own in the memory of every other rank, for
each kind of signal. It sets a flag again only after a signal in the other direction, which the waiting rank sends after the
clear. Nothing depends on the number of earlier calls, so a CUDA graph can be replayed.

Every wait is for a signal that all ranks enqueue earlier in the same program. So waits cannot form a cycle, even if streams
share a hardware queue (for CUDA graphs see `copy_engine`). A wait has no timeout of its own: `progress` watches it and ends a
process that has stalled. `release` ends the process's waits first, because the driver holds up the exit of a process whose
streams wait, for more than 50 s on an H100.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ringspan.parallel.coordination import progress

# Kinds of signals. Gradients have one of each per slot, because two slots may be in transfer.
SLOT_FREE = 0  # reader to owner: the reader's K/V slot may be overwritten
KV_WRITTEN = 1  # owner to reader: the owner's rows are in the reader's slot
GRADS_READY = 2, 3  # reader to owner: gradients of the owner's rows are in the reader's send buffer
GRADS_READ = 4, 5  # owner to reader: the owner has copied them
NUM_SIGNALS = 6

WAIT, WRITE = 1, 2  # CUstreamBatchMemOpType of the driver, for 32 bits
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED of the driver
RELEASE_STREAMS = 8  # a new stream may share a hardware queue with one that waits, so several write

Operation = tuple[int, int, int]  # type, address, value
Batches = dict[tuple[int, tuple[int, ...]], Any]  # arrays of operations, by kind of signal and ranks


class GpuSignals:
    """Signals of one group. Creating them is a collective of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device, self.rank = device, group.rank()
        _driver()  # a missing driver function raises here, on all ranks, before any rank signals
        shape = NUM_SIGNALS, group.size()
        flags = symmetric_memory.empty(shape, dtype=torch.int32, device=device).zero_()
        torch.cuda.synchronize(device)  # before other ranks write into it
        self.memory = flags, symmetric_memory.rendezvous(flags, group)  # kept alive: only its addresses are used
        bases = [self.memory[1].get_buffer(rank, shape, torch.int32).data_ptr() for rank in range(group.size())]
        self.signal_batches, self.wait_batches = Batches(), Batches()  # operations of earlier calls
        # Addresses by kind and rank: of this rank's flags in the memory of others, and of theirs in this rank's memory.
        size, kinds = len(bases), range(NUM_SIGNALS)
        self.remote_addresses = [[base + 4 * (kind * size + self.rank) for base in bases] for kind in kinds]
        self.local_addresses = [[bases[self.rank] + 4 * (kind * size + rank) for rank in range(size)] for kind in kinds]
        self.release_streams: list[torch.cuda.Stream] = []
        progress.before_end(self.release)

    def signal(self, kind: int, ranks: tuple[int, ...]) -> None:
        """Signal to these ranks, after all work enqueued on the current stream so far."""
        self._enqueue(self.signal_batches, kind, ranks, lambda rank: [(WRITE, self.remote_addresses[kind][rank], 1)])

    def wait(self, kind: int, ranks: tuple[int, ...]) -> None:
        """Make the current stream wait for a signal of each of these ranks."""
        address = self.local_addresses[kind]
        self._enqueue(self.wait_batches, kind, ranks, lambda rank: [(WAIT, address[rank], 1), (WRITE, address[rank], 0)])

    def _enqueue(
        self, batches: Batches, kind: int, ranks: tuple[int, ...], operations: Callable[[int], list[Operation]]
    ) -> None:
        """Enqueue the operations for these ranks in one driver call."""
        if not ranks:
            return
        if (kind, ranks) not in batches:
            batches[kind, ranks] = _batch([operation for rank in ranks for operation in operations(rank)])
        batch = batches[kind, ranks]
        status = _driver()(torch._C._cuda_getCurrentRawStream(self.device.index), len(batch), batch, 0)
        if status != 0:
            remedy = "use transport='p2p', which needs no signals"
            if status != NOT_SUPPORTED:
                remedy = "perhaps an earlier kernel's: run again with CUDA_LAUNCH_BLOCKING=1"
            raise RuntimeError(f"GPUs cannot signal each other: cuStreamBatchMemOp gave CUDA's error {status}, {remedy}")

    def release(self) -> None:
        """End the waits that are first on their streams. Later results are wrong: only for a process that exits."""
        batch = _batch([(WRITE, address, 1) for kind in self.local_addresses for address in kind])
        self.release_streams = self.release_streams or [torch.cuda.Stream(self.device) for _ in range(RELEASE_STREAMS)]
        for stream in self.release_streams:
            _driver()(stream.cuda_stream, len(batch), batch, 0)


def _batch(operations: list[Operation]) -> Any:
    """Return an array for the driver."""
    items = [_StreamMemoryOp(operation=operation, address=address, value=value) for operation, address, value in operations]
    return (_StreamMemoryOp * len(items))(*items)


class _StreamMemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams for one 32-bit number, with flags = 0.

    A wait then ends when the number in memory is at least `value`. A write comes after a memory fence: earlier writes have
    arrived, also those into another GPU's memory. The flag of waits that flushes remote writes is for writers without a fence.
    """

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


@functools.cache
def _driver() -> Any:
    """Return cuStreamBatchMemOp of the CUDA driver: (stream, number of operations, operations, flags)."""
    call = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    call.argtypes = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return call
