"""Tensors that layers keep for their backward, on the device or in one pinned region of host memory.

The region has the exact size of the plan (torch rounds each pinned block up to a power of two) and is taken before the first
step. Copies run on two side streams, one per direction:

    keep     write stream: waits for the tensors, copies them to their slots. At most one write is outstanding: the next
             `keep` makes the main stream wait for the previous write, after which its tensors' device memory is free.
    prefetch read stream: waits for the main stream (so that the memory it writes is free), copies back
    take     the main stream waits for the read
"""

import ctypes
import mmap
import sys
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel.transport.streams import SideStream, Wait
from ringspan.trainer.config.schema import Model
from ringspan.trainer.memory.plan import MemoryPlan
from ringspan.trainer.planning.flops import head_dim
from ringspan.trainer.planning.host_memory import available_host_memory
from ringspan.trainer.planning.memory import GIB

REPORT_SECONDS = 5.0  # pinning reports its progress as often


class HostRegion:
    """Page-locked host memory of exactly `nbytes`, on a CPU ordinary memory.

    Several threads touch the pages first, because one thread takes three times as long (docs/results/memory-m0-h100.json).

    Raises:
        MemoryError: the memory cannot be allocated or locked; the message names the remedy.
    """

    def __init__(self, nbytes: int, device: torch.device, threads: int = 8) -> None:
        self.nbytes, self.device = nbytes, device
        remedy = "take another plan with engine.memory, or raise the container's memory limit and `ulimit -l`"
        if nbytes > (available := available_host_memory()):  # the kernel would kill the process that touches the pages
            raise MemoryError(f"{nbytes / GIB:.1f} GiB of host memory are planned, {available / GIB:.1f} are free: {remedy}")
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"{nbytes / GIB:.1f} GiB of host memory cannot be mapped ({error}): {remedy}") from None
        self._map.madvise(mmap.MADV_DONTFORK)  # a fork would copy page-locked memory for the child
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if device.type != "cuda":
            return
        self._touch(threads)
        code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), nbytes, 0)
        if int(code) != 0:
            raise MemoryError(f"{nbytes / GIB:.1f} GiB of host memory cannot be page-locked ({code}): {remedy}")
        # before the memory is unmapped: the driver would keep a mapping of addresses that others get
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._bytes.data_ptr()).atexit = False

    def slot(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize * int(torch.Size(shape).numel())
        assert offset % 16 == 0 and offset + size <= self.nbytes, (offset, size, self.nbytes)
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def _touch(self, threads: int) -> None:
        """Write to every page, in pieces, so that progress can be shown."""
        piece, base = 2**28, self._bytes.data_ptr()
        pieces = iter(range(0, self.nbytes, piece))
        lock, begin, touched = threading.Lock(), time.monotonic(), [0]

        def work() -> None:
            while True:
                with lock:
                    start = next(pieces, None)
                if start is None:
                    return
                size = min(piece, self.nbytes - start)
                ctypes.memset(base + start, 0, size)
                touched[0] += size

        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        shown = begin
        for worker in workers:
            while worker.is_alive():
                worker.join(0.2)
                if time.monotonic() - shown > REPORT_SECONDS:
                    shown = time.monotonic()
                    text = f"host memory: {touched[0] / 2**30:.0f} of {self.nbytes / 2**30:.0f} GiB are prepared"
                    print(text, file=sys.stderr, flush=True)


class KeptTensors:
    """Tensors of one forward, kept under keys until the backward takes them.

    Args:
        device: the device of the tensors.
        on_host: bytes of each key that is kept in host memory; all others stay on the device.
    """

    def __init__(self, device: torch.device, on_host: dict[Any, int]) -> None:
        self.device = device
        self._offsets: dict[Any, int] = {}
        offset = 0
        for key, nbytes in on_host.items():
            self._offsets[key] = offset
            offset += -(-nbytes // 256) * 256
        self.region = HostRegion(offset, device) if on_host else None
        self._sizes = on_host
        self._kept: dict[Any, Tensor | _OnHost] = {}
        self._writing: tuple[Wait, list[Tensor]] | None = None  # the outstanding write, and its tensors

    def keep(self, tensors: dict[Any, Tensor]) -> None:
        """Keep tensors that the current stream has written. Those for the host are copied in one write."""
        self.finish_writes()
        on_host = []
        for key, tensor in tensors.items():
            assert key not in self._kept, f"{key} is kept already: a backward must follow each forward"
            if key not in self._offsets:
                self._kept[key] = tensor
                continue
            assert tensor.nbytes <= self._sizes[key] and self.region is not None, (key, tensor.shape, self._sizes[key])
            slot = self.region.slot(self._offsets[key], tuple(tensor.shape), tensor.dtype)
            self._kept[key] = _OnHost(slot)
            on_host.append((slot, tensor))
        if not on_host:
            return
        side = SideStream(self.device, "host write")
        side.wait_for_caller()
        with side.run():
            for slot, tensor in on_host:
                slot.copy_(tensor, non_blocking=True)
        self._writing = side.completion(), [tensor for _, tensor in on_host]

    def finish_writes(self) -> None:
        """Make the current stream wait for the outstanding write, so that its tensors' memory may be reused."""
        if self._writing is not None:
            self._writing[0]()
            self._writing = None

    def prefetch(self, key: Any) -> None:
        """Start the copy of a tensor from the host; nothing for one that is on the device or was prefetched."""
        kept = self._kept.get(key)
        if not isinstance(kept, _OnHost) or kept.fetched is not None:
            return
        self.finish_writes()
        kept.fetched = torch.empty(kept.slot.shape, dtype=kept.slot.dtype, device=self.device)
        side = SideStream(self.device, "host read")
        side.wait_for_caller()
        with side.run():
            kept.fetched.copy_(kept.slot, non_blocking=True)
        kept.arrived = side.completion()

    def take(self, key: Any) -> Tensor:
        """Return a kept tensor on the device; it is no longer kept."""
        self.prefetch(key)
        kept = self._kept.pop(key)
        if not isinstance(kept, _OnHost):
            return kept
        assert kept.fetched is not None and kept.arrived is not None
        kept.arrived()
        return kept.fetched

    @property
    def host_bytes(self) -> int:
        """Bytes of the host region."""
        return self.region.nbytes if self.region is not None else 0

    def __contains__(self, key: Any) -> bool:
        return key in self._kept

    def clear(self) -> None:
        """Drop what is kept, after an error or where no backward follows."""
        self.finish_writes()
        for kept in self._kept.values():
            if isinstance(kept, _OnHost) and kept.arrived is not None:
                kept.arrived()
        self._kept.clear()


def host_sizes(
    plan: MemoryPlan, model: Model, batch: int, rows: int, hidden: torch.dtype, attention: torch.dtype | None = None
) -> dict[tuple[str, int], int]:
    """Return the bytes of each tensor that a plan keeps on the host.

    Args:
        plan: the plan.
        model: shape of the model.
        batch: sequences of a micro-batch.
        rows: tokens of each sequence on this rank.
        hidden: dtype of the hidden states.
        attention: dtype of attention's out, if it is another one.
    """
    sizes, layers = dict[tuple[str, int], int](), model.layers
    attention = attention or hidden
    for segment in plan.segments(layers)[: plan.inputs_on_host]:
        sizes["x", segment[0]] = batch * rows * model.dim * hidden.itemsize
    for layer in range(layers):
        if plan.out_on_host(layer, layers):
            sizes["out", layer] = batch * rows * model.heads * head_dim(model) * attention.itemsize
            sizes["lse", layer] = batch * rows * model.heads * accumulation_dtype(attention).itemsize
    return sizes


class _OnHost:
    def __init__(self, slot: Tensor) -> None:
        self.slot = slot
        self.fetched: Tensor | None = None
        self.arrived: Wait | None = None
