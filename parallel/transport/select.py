"""How a block moves: by messages between two ranks, or by copy engines, through memory that ranks show each other.

The ring tells a transport what its plan says, and the transport knows how:

    for index, step, k, v, used in travel(transport, k, v): …  each block; the next ones travel while this one is used
    transport.give(index, …, part, into)                      takes dK/dV of a step's keys to their owners (`homeward`)

- `p2p`: one grouped call a step, straight from each owner.
- `copy`: each rank shows symmetric memory, and copy engines bring there the rows that are used. One host only. A step takes
  several blocks where it can (`blocks_per_step`).
- `all_gather`, `copy_all`: the same two, but all other ranks' rows are one step: one kernel instead of P - 1 and fewer waits
  for short shards, at the price of memory for all the rows, and of transfers that only the own block hides.

dK and dV do not go round with their block. What a rank computes for others' rows goes straight to their owner, which adds
it in fp32 beside the next kernel, in an order that never changes. So no kernel waits for a hop, a late rank holds up nobody
in between, and only rows that somebody saw are sent; the price is one more addition in memory. Steps of many bytes go in
parts of some KV heads, up to four: three of them are there to go out and two to come in at most, little more than a step.
"""

import functools
import math
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.layout import Layout
from ringspan.parallel.plan import Plan
from ringspan.parallel.transport.base import Transport
from ringspan.parallel.transport.p2p import P2PTransport

TRANSPORTS = ("auto", "p2p", "all_gather", "copy", "copy_all")
AT_ONCE = ("all_gather", "copy_all")  # one step for all other ranks
COPIED = ("copy", "copy_all")
# What `auto` takes: the first whose limit the bytes of a rank's K and V do not pass; None is no limit. The forward's choice
# and the backward's, which moves three times as much. p2p runs everywhere; another takes its place where results of
# parallel.bench have it ahead. On one host copy engines are, for a forward and its backward on two GPUs, at 8k and 32k tokens a
# GPU, with and without GQA (docs/results/ring-2-h100.json).
AUTO: dict[str, tuple[tuple[int | None, str, str], ...]] = {
    "cpu": ((None, "p2p", "p2p"),),
    "one host": ((None, "copy", "copy"),),
    "many hosts": ((None, "p2p", "p2p"),),
    "AMD": ((None, "p2p", "p2p"),),  # where nobody has tried copy engines
}
# A step's dK/dV above this travel in up to four parts; of shards up to so many rows only above twice as much, as their kernels
# are so short that more of them are felt.
PART_BYTES, SHORT = 2**28, 2**15


def choose_transport(name: str, pair: RingGroups, device: torch.device, nbytes: int, backward: bool = False) -> str:
    """What moves blocks, or a ValueError that says why the named one cannot."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r}: choose one of {TRANSPORTS}")
    place = "cpu" if device.type != "cuda" else "one host" if pair.one_host else "many hosts"
    on_nvidia = place != "cpu" and not torch.version.hip
    if name in COPIED and not (on_nvidia and pair.one_host):
        needs = "needs all ranks on one host, and GPUs that reach each other's memory" if on_nvidia else "needs CUDA"
        raise ValueError(f"transport={name!r} {needs}: use 'p2p', 'all_gather' or 'auto'")
    if name == "auto":
        place = "AMD" if torch.version.hip and place != "cpu" else place
        name = next(kinds[backward] for limit, *kinds in AUTO[place] if limit is None or nbytes <= limit)
        if os.environ.get("RINGSPAN_LOG") == "1":
            _say_once("backward" if backward else "forward", nbytes, name, place)
    return name


@functools.cache
def _say_once(way: str, nbytes: int, name: str, place: str) -> None:
    print(f"ringspan: the ring's {way} moves {nbytes / 2**20:.1f} MiB a rank by {name} ({place})", file=sys.stderr)


def blocks_per_step(transport: str, layout: Layout, causal: bool, nbytes: int, heads: int, backward: bool) -> tuple[int, ...]:
    """How many others' blocks each step takes, if dK/dV of one are so many bytes and have so many heads.

    Each step of `copy` takes twice as many as the one before, whose kernel their transfer is beside: 1, 2, 4, … So there are
    fewer kernels, of which each has a last wave, and the host has less to give, which is late where blocks are short. In the
    backward it is the other way round, as gradients go home behind what follows. No more than travel in as many parts as one.
    """
    others = layout.ranks - 1
    if transport in AT_ONCE:
        return (others,)
    one_kernel = layout.kind == "contiguous" or (layout.kind == "zigzag" and causal)  # for the rows of several blocks
    if transport not in COPIED or not one_kernel:
        return (1,) * others
    most = max(1, PART_BYTES * _parts(nbytes, heads, layout.local_length) // max(1, nbytes))
    left, blocks = others, list[int]()
    while left:
        blocks.append(min(2 ** len(blocks), left, most))
        left -= blocks[-1]
    return tuple(reversed(blocks) if backward else blocks)


def make_transport(transport: str, pair: RingGroups, plan: Plan, device: torch.device) -> Transport:
    kind = _copy_engine_class() if transport in COPIED else P2PTransport
    return kind(pair, plan, device)


@functools.cache
def _copy_engine_class() -> Callable[[RingGroups, Plan, torch.device], Transport]:
    from ringspan.parallel.transport.copy_engine import CopyEngineTransport  # only there where CUDA is

    return CopyEngineTransport


def num_parts(plan: Plan, k: Tensor, v: Tensor) -> int:
    """How many parts, of some KV heads each, a step's dK/dV are sent in: more take more kernels, and less memory."""
    return _parts(bytes_of_gradients(plan.most_keys, k, v), k.shape[2], k.shape[1])


def bytes_of_gradients(rows: int, k: Tensor, v: Tensor) -> int:
    """Of dK/dV of so many rows, as they travel."""
    return rows * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * accumulation_dtype(k.dtype).itemsize


def _parts(nbytes: int, heads: int, rows: int) -> int:
    """`rows` are a shard's."""
    return math.gcd(heads, 4) if nbytes > PART_BYTES * (2 if rows <= SHORT else 1) else 1
