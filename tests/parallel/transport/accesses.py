"""Accesses of operations to memory: two that conflict must be ordered, whatever order they run in.

Two operations conflict if they access the same address and not both of them read it, nor both of them add to it atomically.
One is ordered before the other if the other's vector clock counts it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy
from torch import Tensor

UNIT = 2  # bytes per address: the smallest element


def addresses(x: Tensor) -> numpy.ndarray:
    """Return the addresses of a tensor's elements within its storage, in units."""
    offsets = numpy.full((1,), x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = (offsets[:, None] + stride * numpy.arange(size)).ravel()
    units = x.itemsize // UNIT
    return (offsets[:, None] * units + numpy.arange(units)).ravel()


class Accesses:
    """The last accesses to each address by each stream, as that stream's count of operations."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.storages: list[Any] = []  # kept, so that no address is used again
        self.last: dict[tuple[int, str, Hashable], numpy.ndarray] = {}
        self.streams: dict[int, dict[str, set[Hashable]]] = {}

    def check(
        self,
        name: str,
        stream: Hashable,
        clock: Mapping[Any, int],
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        adds: Iterable[Tensor],
    ) -> None:
        """Add the races of an operation with earlier ones to `races`, and record it."""
        for kind, tensors in (("reads", reads), ("adds to", adds), ("writes", writes)):
            for x in tensors:
                if x.itemsize >= UNIT and x.numel():
                    self._check(name, stream, clock, kind, x)

    def _check(self, name: str, stream: Hashable, clock: Mapping[Any, int], kind: str, x: Tensor) -> None:
        base, where = x.untyped_storage().data_ptr(), addresses(x)
        if base not in self.streams:
            self.storages.append(x.untyped_storage())
            self.streams[base] = defaultdict(set)
        for other_kind, streams in self.streams[base].items():
            if kind == other_kind != "writes":
                continue
            for other in streams:
                if other != stream and (self.last[base, other_kind, other][where] > clock[other]).any():
                    self.races.append(f"{name} {kind} memory that {other} {other_kind}")
        if stream not in self.streams[base][kind]:
            self.streams[base][kind].add(stream)
            self.last[base, kind, stream] = numpy.zeros(x.untyped_storage().nbytes() // UNIT + 1, dtype=numpy.int64)
        self.last[base, kind, stream][where] = clock[stream]
