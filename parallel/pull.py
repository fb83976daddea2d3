"""The mover for GPUs of one host: copy engines pull rows out of the owner's symmetric memory.

No SM works for a transfer, and no rank has to send: a copy waits for nothing but the owner's data. That they are there, and
that nobody overwrites what another still reads, is what barriers are for. All of them stand on the stream of the kernels,
between two kernels, where a zigzag ring is even anyway: a barrier on a stream of its own would need an SM to wait on, which
a persistent kernel leaves to nobody. Copies then run on a side stream, beside the next kernel.

    publish      barrier (all have pulled what was there) · copy K/V in · barrier (all are published)
    fetch        pull the rows of a step
    give         barrier (all parts of this step are written) · pull those of my rows, while the next kernel runs

Barriers end with an error of the device at the group's time limit. No multicast (multimem) is used anywhere.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from . import progress
from .groups import Pair, timeout_of
from .mover import Mover, Transfer, slots
from .packed import new_packed, pack
from .plan import Piece, Plan

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

# (group, use) → this rank's symmetric memory, its handle, and the group: a new one may have an old one's name
_pools: dict[tuple[str, str], tuple[Tensor, Any, Any]] = {}
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Pull(Mover):
    def __init__(self, pair: Pair, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        self.pair, self.device = pair, device
        self.seconds = timeout_of(pair.group, device).total_seconds()

    def publish(self, k: Tensor, v: Tensor) -> None:
        mine = self._symmetric("kv", k.shape[1], new_packed(0, k, v))
        self._barrier("kv")
        pack(k, v, mine)
        self._barrier("kv")

    def fetch(self, index: int, into: Tensor) -> Transfer:
        pieces = self.plan.steps[index].pieces
        sources = [self._theirs("kv", piece.rank, piece.rows.start, len(piece), into) for piece in pieces]
        return self._pull(pieces, sources, into, "K/V")

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        return self._symmetric(f"part {which}", self.plan.most_keys, like)[:rows]

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        # nothing is sent: each owner takes its rows out of its readers' parts
        self._barrier(f"part {which}")
        pieces = self.plan.gives[index]
        sources = [self._theirs(f"part {which}", piece.rank, piece.at, len(piece), into) for piece in pieces]
        return self._pull(pieces, sources, into, "dK/dV")

    def _pull(self, pieces: list[Piece], sources: list[Tensor], into: Tensor, name: str) -> Transfer:
        places = [place for _, place in slots(pieces, into)]
        ranks = dist.get_process_group_ranks(self.pair.group)
        what = ", ".join(f"{name} from rank {ranks[piece.rank]}" for piece in pieces)
        return Transfer(copy_beside(places, sources, self.device), what, self.seconds, into.is_cuda and bool(pieces))

    def _symmetric(self, use: str, rows: int, like: Tensor) -> Tensor:
        """This rank's memory of that use, with rows as those of `like`; made by all ranks together when it has to grow."""
        shape = (rows, *like.shape[1:])
        nbytes = math.prod(shape) * like.element_size()
        key = self.pair.group.group_name, use
        group = self.pair.group
        if key not in _pools or _pools[key][2] is not group or _pools[key][0].numel() < nbytes:
            settle(self.device)  # the old one may still be read here; the rendezvous waits until it is nowhere
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
            _pools[key] = memory, symmetric_memory.rendezvous(memory, group), group
        return _pools[key][0][:nbytes].view(like.dtype).view(shape)

    def _theirs(self, use: str, rank: int, first: int, rows: int, like: Tensor) -> Tensor:
        """Rows of another rank's memory of that use."""
        row = math.prod(like.shape[1:])
        return _pools[self.pair.group.group_name, use][1].get_buffer(rank, (rows, *like.shape[1:]), like.dtype, first * row)

    def _barrier(self, use: str) -> None:
        _pools[self.pair.group.group_name, use][1].barrier(channel=0, timeout_ms=int(self.seconds * 1000))
        if self.device.type == "cuda":
            progress.expect(f"all ranks in a barrier over {use}", self.seconds)


def copy_beside(places: list[Tensor], sources: list[Tensor], device: torch.device) -> Callable[[], object]:
    """Copies on a side stream after what the current one has been given so far; the result makes the latter wait for them."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    side, main = _streams[device], torch.cuda.current_stream(device)
    side.wait_stream(main)  # what the places held is used up, and the barrier has passed
    with torch.cuda.stream(side):
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)  # both contiguous, so a plain copy: no kernel
        done = side.record_event()
    return lambda: main.wait_event(done)


def settle(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def pooled_bytes() -> int:
    """Symmetric memory of this process, which torch's allocator does not count."""
    return sum(memory.nbytes for memory, *_ in _pools.values())
