"""State of an emulated thread block: warps, mbarriers, and shared memory that matmuls and copies read asynchronously."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.backends.hopper.emulator.scheduler import Scheduler
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor


@dataclass(eq=False)
class Barrier:
    """An mbarrier: the phase completes when `pending` arrivals and `pending_bytes` are both 0."""

    name: str
    count: int = 0
    pending: int = 0
    pending_bytes: int = 0
    phase: int = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        assert self.pending >= 0, f"more than {self.count} arrive at {self.name}"
        self.complete_if_done()

    def invalidate(self) -> None:
        assert self.pending_bytes == 0, f"{self.name} is invalidated while a copy into it is in flight"
        self.pending = 0  # any further arrival is an error

    def complete_if_done(self) -> None:
        if self.pending == 0 and self.pending_bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


@dataclass(eq=False)
class ThreadBlock:
    """State that all warps of a thread block share."""

    number: int
    pending_copies: int = 0  # in flight into shared memory
    # address ranges that each warp wrote since its last fence
    unfenced: dict["Warp", list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(eq=False)
class PendingStore:
    """A TMA store in flight."""

    has_read: bool = False
    is_done: bool = False


@dataclass(eq=False)
class WarpSync:
    """Barrier of the warps of one role."""

    size: int
    arrived: int = 0
    generation: int = 0


@dataclass(eq=False)
class Warp:
    """One warp of a role. It multiplies and stores its share of a tensor's rows, equal for all warps of the role."""

    block: ThreadBlock
    index: int = 0
    sync: WarpSync = field(default_factory=lambda: WarpSync(1))
    threads: int = 32
    pending_matmuls: list[Callable[[], None]] = field(default_factory=list)
    pending_copies: list[PendingStore] = field(default_factory=list)
    last_poll: tuple[int, int] | None = None  # address of the last volatile load, and its value

    def rows(self, x: Any) -> slice:
        rows_per_warp, remainder = divmod(x.shape[0], self.sync.size)
        assert remainder == 0
        return slice(self.index * rows_per_warp, (self.index + 1) * rows_per_warp)


class SharedMemory:
    """A view of shared memory."""

    def __init__(self, scheduler: Scheduler, tensor: Tensor, odd_rows_swapped: bool = False) -> None:
        self.scheduler, self.tensor, self.odd_rows_swapped = scheduler, tensor, odd_rows_swapped
        self.dtype, self.shape = tensor.dtype, list(tensor.shape)

    def index(self, i: Any) -> "SharedMemory":
        assert 0 <= int(i) < self.shape[0]
        return SharedMemory(self.scheduler, self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "SharedMemory":
        return SharedMemory(self.scheduler, self.tensor.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "SharedMemory":
        return SharedMemory(self.scheduler, self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> "SharedMemory":
        return SharedMemory(self.scheduler, self.tensor.permute(order))

    def load(self, _layout: Any) -> EmulatedTensor:
        self.scheduler.pause()
        return EmulatedTensor(self.tensor.clone())

    def store(self, x: EmulatedTensor) -> None:
        self.scheduler.pause()
        value = x.tensor
        assert value.dtype == self.dtype and x.shape == self.shape
        if self.odd_rows_swapped:  # backward_dq.staggered_layout
            value = value.clone()
            value[1::2] = value[1::2].reshape(-1, self.shape[1] // 32, 2, 16).flip(2).flatten(1)
        warp: Warp = self.scheduler.context
        own_rows = self.slice(warp.rows(self).start, len(value[warp.rows(self)]))
        own_rows.tensor.copy_(value[warp.rows(self)])
        warp.block.unfenced.setdefault(warp, []).append(own_rows.addresses())

    def addresses(self) -> tuple[int, int]:
        """First address and end address."""
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        begin = self.tensor.data_ptr()
        return begin, begin + (last + 1) * self.tensor.itemsize

    def begin_read(self) -> Callable[[], Tensor]:
        """Start an asynchronous read, as by a matmul or a copy; return a function that ends it and returns the value.

        Elements that changed meanwhile, or that were written without a fence, are NaN.
        """
        begin, end = self.addresses()
        written = [span for spans in self.scheduler.context.block.unfenced.values() for span in spans]
        fenced = not any(write_begin < end and begin < write_end for write_begin, write_end in written)
        snapshot = self.tensor.clone()

        def finish() -> Tensor:
            if fenced and torch.equal(self.tensor, snapshot):
                return snapshot
            unchanged = (self.tensor == snapshot) | (self.tensor.isnan() & snapshot.isnan())
            return torch.where(unchanged & fenced, snapshot, float("nan"))

        return finish
