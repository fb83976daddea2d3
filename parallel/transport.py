"""How a block moves: by messages between two ranks, or pulled by copy engines out of the owner's memory.

The ring tells a mover what its plan says, and the mover knows how:

    for index, step, k, v in travel(mover, k, v): …       each block; the next one travels while this one is used
    home = Homeward(mover, mine)                          takes dK/dV of a block back to its owner, who adds them up

- `p2p`: one grouped call a step, straight from each owner. K and V of a row lie side by side, so a block is one message.
- `all_gather`: the same, but all other ranks' rows are one step: one kernel instead of P - 1, for short shards.
- `pull`: each rank shows its K/V in symmetric memory, and copy engines take the rows that are used. One host only.

dK and dV do not go round with their block. What a rank computes for others' rows goes straight to their owner, which adds
it in fp32 while the next kernel runs, in an order that never changes. So no kernel waits for a hop, a late rank holds up
nobody in between, and only rows that somebody saw are sent; the price is one more addition in memory. Blocks of many bytes
go in parts of some KV heads, so that two parts going out and one coming in are less than one block.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from . import progress
from .groups import Pair
from .messages import Messages
from .mover import Mover, Transfer
from .packed import new_packed, unpack
from .plan import Plan, Step

TRANSPORTS = ("auto", "p2p", "all_gather", "pull")
# What `auto` takes: the first whose limit the bytes of a rank's K and V do not pass; None is no limit. p2p runs everywhere;
# another takes its place where a result of parallel.bench has it ahead.
AUTO: dict[str, tuple[tuple[int | None, str], ...]] = {
    "cpu": ((None, "p2p"),),
    "one host": ((None, "p2p"),),
    "many hosts": ((None, "p2p"),),
}
PART_BYTES = 2**28  # a block's dK/dV above this travel in up to four parts
moved: Counter[str] = Counter()  # messages that came to this rank: blocks of K/V ("kv"), parts of gradients ("dkv")


def choose_transport(name: str, pair: Pair, device: torch.device, nbytes: int) -> str:
    """What moves blocks, or a ValueError that says why the named one cannot."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r}: choose one of {TRANSPORTS}")
    place = "cpu" if device.type != "cuda" else "one host" if pair.one_host else "many hosts"
    if name == "pull" and place != "one host":
        needs = "needs CUDA" if place == "cpu" else "needs all ranks on one host"
        raise ValueError(f"transport='pull' {needs}: use 'p2p', 'all_gather' or 'auto'")
    if name == "auto":
        name = next(kind for limit, kind in AUTO[place] if limit is None or nbytes <= limit)
        if os.environ.get("RINGSPAN_LOG") == "1":
            print(f"ringspan: the ring moves {nbytes / 2**20:.1f} MiB a rank by {name} ({place})", file=sys.stderr)
    return name


def make_mover(transport: str, pair: Pair, plan: Plan, device: torch.device) -> Mover:
    if transport == "pull":
        from .pull import Pull  # only there where CUDA is

        return Pull(pair, plan, device)
    return Messages(pair, plan, device)


def travel(mover: Mover, k: Tensor, v: Tensor) -> Iterator[tuple[int, Step, Tensor, Tensor]]:
    """Each step of the plan with its keys and values. What the next step needs is on its way while this one computes."""
    steps, width = mover.plan.steps, k.shape[-1]
    own = steps[0].pieces[0].rows
    block = k[:, own], v[:, own]
    if len(steps) > 1:
        mover.publish(k, v)
        most = max(step.num_keys for step in steps[1:])
        buffers = [new_packed(most, k, v) for _ in range(min(2, len(steps) - 1))]
    for index, step in enumerate(steps):
        coming = None
        if index + 1 < len(steps):
            following = steps[index + 1]
            buffer = buffers[index % len(buffers)][: following.num_keys]
            coming = mover.fetch(index + 1, buffer)
        yield index, step, *block
        if coming is not None:
            progress.hop(index + 1, len(steps) - 1)
            coming.wait()
            moved["kv"] += bool(following.pieces)
            block = unpack(buffer, width)


class Homeward:
    """Gradients of others' keys on their way to their owners, and what others return, added to `mine`."""

    def __init__(self, mover: Mover, mine: Tensor) -> None:
        self.mover, self.mine = mover, mine  # mine: (rows, B, Hkv, D + Dv), in the accumulation dtype
        self.turn = 0
        self.coming: tuple[Transfer, int, slice, Tensor, Tensor] | None = None

    def head_parts(self) -> list[slice]:
        """KV heads whose gradients go together."""
        heads = self.mine.shape[2]
        row_bytes = self.mine[0].numel() * self.mine.element_size() if len(self.mine) else 0
        wanted = 4 if row_bytes * self.mover.plan.most_keys > PART_BYTES else 1
        parts = max(n for n in (1, 2, 4) if heads % n == 0 and n <= wanted)
        return [slice(i * heads // parts, (i + 1) * heads // parts) for i in range(parts)]

    def part(self, index: int, heads: slice) -> Tensor:
        """Where the gradients of a step's keys are to be written: (rows, B, heads, D + Dv)."""
        return self.mover.part(self.turn, self.mover.plan.steps[index].num_keys, self.mine[:0, :, heads])

    def send(self, index: int, heads: slice, part: Tensor) -> None:
        """On its way while the next kernel runs. Every rank calls this as often, also where it has nothing to give."""
        self.collect()
        rows = sum(len(piece) for piece in self.mover.plan.gives[index])
        into = self.mine.new_empty((rows, *part.shape[1:]))
        self.coming = self.mover.give(index, self.turn, part, into), index, heads, part, into
        self.turn = 1 - self.turn

    def collect(self) -> None:
        """Adds what has come in."""
        if self.coming is None:
            return
        transfer, index, heads, _, into = self.coming
        transfer.wait()
        self.coming = None
        row = 0
        for piece in self.mover.plan.gives[index]:
            self.mine[piece.rows, :, heads] += into[row : row + len(piece)]
            row += len(piece)
            moved["dkv"] += 1
