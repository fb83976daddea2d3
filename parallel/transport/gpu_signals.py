"""Signals between the GPUs of one host: stream memory operations that write and wait for counters in symmetric memory.

    rank a   signal(KV_WRITTEN, n, (b,))      a's stream writes n into b's memory after its earlier work has finished
    rank b   wait(KV_WRITTEN, n, (a,))        b's stream continues once the counter is >= n

The GPU's front end executes both, as it starts kernels and copies. A wait therefore takes no SM and can be in flight
concurrently with a kernel that occupies all of them. Counters only grow. Each rank writes its own counter into the memory of
the ranks that wait for it.

Every wait is for a signal that all ranks enqueue earlier in the same program. So waits cannot form a cycle, even if streams
share a hardware queue. A wait has no timeout of its own: `progress` watches it and ends a process that has stalled. `release`
ends the waits first, because the driver holds up the exit of a process whose streams wait, for more than 50 s on an H100.
"""

import ctypes
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ringspan.parallel.coordination import progress

# Kinds of signals. Each counts fetches or gradient returns, which all ranks number alike.
SLOT_FREE = 0  # reader to owner: the reader's K/V slot may be overwritten
KV_WRITTEN = 1  # owner to reader: the owner's rows are in the reader's slot
GRADS_READY = 2  # reader to owner: gradients of the owner's rows are in the reader's send buffer
GRADS_READ = 3  # owner to reader: the owner has copied them
NUM_SIGNALS = 4

WAIT, WRITE = 1, 2  # CUstreamBatchMemOpType of the driver, for 32 bits
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED of the driver
RELEASED = 2**31 - 1  # a count that ends every wait
RELEASE_STREAMS = 8  # a new stream may share a hardware queue with one that waits, so several write


class GpuSignals:
    """Signals of one group. Creating them is a collective of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device, self.rank = device, group.rank()
        _driver()  # a missing driver function raises here, on all ranks, before any rank counts
        shape = NUM_SIGNALS, group.size()
        counters = symmetric_memory.empty(shape, dtype=torch.int32, device=device).zero_()
        torch.cuda.synchronize(device)  # before other ranks write into it
        self.memory = counters, symmetric_memory.rendezvous(counters, group)  # kept alive: only its addresses are used
        bases = [self.memory[1].get_buffer(rank, shape, torch.int32).data_ptr() for rank in range(group.size())]
        self.batches: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Any] = {}  # operations of earlier calls, by target
        # Addresses by kind and rank: of this rank's counters in the memory of others, and of theirs in this rank's memory.
        size, kinds = len(bases), range(NUM_SIGNALS)
        self.remote_addresses = [[base + 4 * (kind * size + self.rank) for base in bases] for kind in kinds]
        self.local_addresses = [[bases[self.rank] + 4 * (kind * size + rank) for rank in range(size)] for kind in kinds]
        progress.before_end(self.release)

    def signal(self, kind: int, count: int, ranks: tuple[int, ...]) -> None:
        """Signal `count` to these ranks, after all work enqueued on the current stream so far."""
        self.signal_and_wait(kind, count, ranks, ())

    def wait(self, kind: int, count: int, ranks: tuple[int, ...]) -> None:
        """Make the current stream wait until each of these ranks has signalled at least `count`."""
        self.signal_and_wait(kind, count, (), ranks)

    def signal_and_wait(self, kind: int, count: int, targets: tuple[int, ...], sources: tuple[int, ...]) -> None:
        """Signal `count` to the targets, then wait for the sources, in one driver call: the call itself is the main cost."""
        if not targets and not sources:
            return
        key = kind, targets, sources
        if key not in self.batches:
            writes = [_StreamMemoryOp(operation=WRITE, address=self.remote_addresses[kind][rank]) for rank in targets]
            waits = [_StreamMemoryOp(operation=WAIT, address=self.local_addresses[kind][rank]) for rank in sources]
            self.batches[key] = (_StreamMemoryOp * (len(targets) + len(sources)))(*writes, *waits)
        batch = self.batches[key]
        for operation in batch:
            operation.count = count
        status = _driver()(torch._C._cuda_getCurrentRawStream(self.device.index), len(batch), batch, 0)
        if status != 0:
            remedy = "use transport='p2p', which needs no signals" if status == NOT_SUPPORTED else "perhaps an earlier kernel's"
            raise RuntimeError(f"GPUs cannot signal each other: cuStreamBatchMemOp gave CUDA's error {status}, {remedy}")

    def release(self) -> None:
        """End all waits for this rank's counters. Later results are wrong: only for a process that exits."""
        addresses = [address for kind in self.local_addresses for address in kind]
        writes = [_StreamMemoryOp(operation=WRITE, address=address, count=RELEASED) for address in addresses]
        batch = (_StreamMemoryOp * len(writes))(*writes)
        for _ in range(RELEASE_STREAMS):
            _driver()(torch.cuda.Stream(self.device).cuda_stream, len(batch), batch, 0)


class _StreamMemoryOp(ctypes.Structure):
    """CUstreamBatchMemOpParams for one 32-bit number, with flags = 0.

    A wait then ends when the counter is at least `count`. A write comes after a memory fence: earlier writes have arrived, also
    those into another GPU's memory. The waits' flag that flushes remote writes is for writers without such a fence.
    """

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
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
