"""What parties share and wait for: shared memory, which products and copies read late, and barriers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.backends.hopper.emulator.parties import Parties
from tests.kernels.backends.hopper.emulator.values import EmulatedTensor


@dataclass(eq=False)
class Barrier:
    name: str
    count: int = 0
    to_come: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int) -> None:
        self.to_come -= count
        assert self.to_come >= 0, f"more than {self.count} arrive at {self.name}"
        self.settle()

    def forget(self) -> None:
        assert self.bytes == 0, f"a copy is still to arrive at {self.name}, which is given up"
        self.to_come = 0  # nobody may arrive any more

    def settle(self) -> None:
        if self.to_come == 0 and self.bytes == 0:
            self.phase, self.to_come = self.phase ^ 1, self.count


@dataclass(eq=False)
class Program:
    """What its parties share."""

    number: int
    copies: int = 0  # on their way into shared memory
    unfenced: dict["Warp", list[tuple[int, int]]] = field(default_factory=dict)  # addresses that a warp wrote


@dataclass(eq=False)
class CopyOut:
    has_read: bool = False
    is_done: bool = False


@dataclass(eq=False)
class Meeting:
    """Of a party's warps."""

    size: int
    here: int = 0
    times: int = 0


@dataclass(eq=False)
class Warp:
    """One warp of a party, and what is its own. Of a tensor it multiplies and stores as many rows as the others."""

    program: Program
    index: int = 0
    meeting: Meeting = field(default_factory=lambda: Meeting(1))
    threads: int = 32
    products: list[Callable[[], None]] = field(default_factory=list)
    copies: list[CopyOut] = field(default_factory=list)
    last_look: tuple[int, int] | None = None  # at which place in memory, and what was there

    def rows(self, x: Any) -> slice:
        each, rest = divmod(x.shape[0], self.meeting.size)
        assert rest == 0
        return slice(self.index * each, (self.index + 1) * each)


class Memory:
    """Shared memory, or a part of it."""

    def __init__(self, parties: Parties, tensor: Tensor, odd_rows_apart: bool = False) -> None:
        self.parties, self.tensor, self.odd_rows_apart = parties, tensor, odd_rows_apart
        self.dtype, self.shape = tensor.dtype, list(tensor.shape)

    def index(self, i: Any) -> "Memory":
        assert 0 <= int(i) < self.shape[0]
        return Memory(self.parties, self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        return Memory(self.parties, self.tensor.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "Memory":
        return Memory(self.parties, self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return Memory(self.parties, self.tensor.permute(order))

    def load(self, _layout: Any) -> EmulatedTensor:
        self.parties.pause()
        return EmulatedTensor(self.tensor.clone())

    def store(self, numbers: EmulatedTensor) -> None:
        self.parties.pause()
        value = numbers.tensor
        assert value.dtype == self.dtype and numbers.shape == self.shape
        if self.odd_rows_apart:  # see hopper_dq.apart
            value = value.clone()
            value[1::2] = value[1::2].reshape(-1, self.shape[1] // 32, 2, 16).flip(2).flatten(1)
        me: Warp = self.parties.about
        mine = self.slice(me.rows(self).start, len(value[me.rows(self)]))
        mine.tensor.copy_(value[me.rows(self)])
        me.program.unfenced.setdefault(me, []).append(mine.addresses())

    def addresses(self) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        begin = self.tensor.data_ptr()
        return begin, begin + (last + 1) * self.tensor.itemsize

    def read_late(self) -> Callable[[], Tensor]:
        """Begins to read as products and copies do, past the threads; what it read is known when they end."""
        begin, end = self.addresses()
        written = [span for spans in self.parties.about.program.unfenced.values() for span in spans]
        fenced = not any(first < end and begin < last for first, last in written)
        was = self.tensor.clone()

        def ends() -> Tensor:
            if fenced and torch.equal(self.tensor, was):
                return was
            same = (self.tensor == was) | (self.tensor.isnan() & was.isnan())
            return torch.where(same & fenced, was, float("nan"))

        return ends
