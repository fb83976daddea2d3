"""Signals between GPUs of one host: a stream says how far it is, and waits until others are as far.

Both are orders to a stream which the GPU's front end carries out, as it starts kernels and copies. So a wait takes no SM, and
may stand beside a kernel that has all of them. Signals are numbers that only grow, in memory that all ranks show each other:
each rank writes its own into the memory of those who wait for it.

Whoever waits, waits for what all ranks are told to do earlier in the same program: that cannot end in a circle, also where
streams share a queue of the device. A wait has no limit of its own: `progress` watches, and ends what has stalled.
"""

import ctypes
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

# What a signal counts: which of the steps, that all ranks count alike, a rank has …
SLOT_FREE, KV_WRITTEN, GRADS_READY, GRADS_READ = range(
    4
)  # a place free for K/V, brought its own; given gradients, taken those for its rows
WAIT, WRITE = 1, 2  # the driver's CUstreamBatchMemOpType for 32 bits
NOT_SUPPORTED = 801  # its CUDA_ERROR_NOT_SUPPORTED


class GpuSignals:
    """Those of one group, made by all ranks together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device, self.rank = device, group.rank()
        _driver()  # an error now, before anybody counts, and not later on one rank
        size = 4, group.size()
        memory = symmetric_memory.empty(size, dtype=torch.int32, device=device).zero_()
        torch.cuda.synchronize(device)  # before others write into it
        self.memory = memory, symmetric_memory.rendezvous(memory, group)  # kept, as addresses are all that is used of it
        begins = [self.memory[1].get_buffer(rank, size, torch.int32).data_ptr() for rank in range(group.size())]
        self.orders: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Any] = {}  # that were given before
        # where this rank's signals stand in the others' memory, and theirs in its own
        self.there = [[begin + 4 * (what * len(begins) + self.rank) for begin in begins] for what in range(4)]
        self.here = [[begins[self.rank] + 4 * (what * len(begins) + rank) for rank in range(len(begins))] for what in range(4)]

    def tell(self, what: int, count: int, ranks: tuple[int, ...]) -> None:
        """These ranks, once all is done that the current stream has been given so far."""
        self.meet(what, count, ranks, ())

    def wait(self, what: int, count: int, ranks: tuple[int, ...]) -> None:
        """Until these ranks have told as much: what the current stream is given next is done then."""
        self.meet(what, count, (), ranks)

    def meet(self, what: int, count: int, told: tuple[int, ...], awaited: tuple[int, ...]) -> None:
        """Tells the ones, then waits for the others, all in one order: the driver takes longer for a call than for what it
        says."""
        if not told and not awaited:
            return
        key = what, told, awaited
        if key not in self.orders:
            writes = [_Order(operation=WRITE, address=self.there[what][rank]) for rank in told]
            waits = [_Order(operation=WAIT, address=self.here[what][rank]) for rank in awaited]
            self.orders[key] = (_Order * (len(told) + len(awaited)))(*writes, *waits)
        orders = self.orders[key]
        for order in orders:
            order.count = count
        status = _driver()(torch._C._cuda_getCurrentRawStream(self.device.index), len(orders), orders, 0)
        if status != 0:
            remedy = "use transport='p2p', which needs no signals" if status == NOT_SUPPORTED else "perhaps an earlier kernel's"
            raise RuntimeError(f"GPUs cannot signal each other: cuStreamBatchMemOp gave CUDA's error {status}, {remedy}")


class _Order(ctypes.Structure):
    """CUstreamBatchMemOpParams for one number. Flags of 0: a wait until it is at least so large, a write behind a fence: what
    was written before it, into another GPU's memory too, has arrived. (A flush of remote writes, which is a flag of waits, is
    for writers without such a fence.)"""

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
    """cuStreamBatchMemOp of CUDA's driver: (stream, how many, which, flags)."""
    call = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    call.argtypes = ctypes.c_uint64, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return call
