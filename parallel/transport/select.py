"""Choice of transport, and of the number of remote blocks per step and of gradient parts.

    name         transfers                              steps
    p2p          send/recv between two ranks            one remote block each; one grouped call per step
    copy         copy engines, symmetric memory         several blocks each where possible (`blocks_per_step`); one host
    all_gather   as p2p                                 all remote blocks are one step
    copy_all     as copy                                all remote blocks are one step

One step instead of P − 1 means one kernel and fewer waits, which helps short shards. Its price is memory for all remote rows,
and only the local block overlaps the transfers.

dK/dV are sent directly to the owner rank (`gradient_return`), in up to four parts of some KV heads if a step has many bytes.
Parts that arrive stay in receive buffers until they are added; p2p's send buffers exist as long.
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
SINGLE_STEP_TRANSPORTS = ("all_gather", "copy_all")  # all remote blocks in one step
COPY_TRANSPORTS = ("copy", "copy_all")
# Choices of `auto`: (limit on the bytes of a rank's K and V or None, transport of the forward, of the backward). The first row
# whose limit is not exceeded counts. The backward moves three times as many bytes. p2p runs everywhere; a faster transport of
# `ringspan bench ring` replaces it. On one host copy engines are faster: forward and backward on two GPUs, at 8k and 32k tokens
# per GPU, with and without GQA (docs/results/ring-2-h100.json).
AUTO_TRANSPORTS: dict[str, tuple[tuple[int | None, str, str], ...]] = {
    "cpu": ((None, "p2p", "p2p"),),
    "one host": ((None, "copy", "copy"),),
    "many hosts": ((None, "p2p", "p2p"),),
    "AMD": ((None, "p2p", "p2p"),),  # copy engines are untested there
}
# A step's dK/dV of more bytes are sent in up to four parts. For shards of at most SHORT_SHARD rows the limit is twice as high:
# their kernels are so short that the cost of more kernels shows.
PART_BYTES, SHORT_SHARD = 2**28, 2**15


def choose_transport(name: str, groups: RingGroups, device: torch.device, nbytes: int, backward: bool = False) -> str:
    """Return the transport for `name`, which may be "auto"; nbytes are those of a rank's K and V.

    Raises:
        ValueError: The transport is unknown or cannot run on this device and host.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r}: choose one of {TRANSPORTS}")
    place = "cpu" if device.type != "cuda" else "one host" if groups.one_host else "many hosts"
    on_nvidia = place != "cpu" and not torch.version.hip
    if name in COPY_TRANSPORTS and not (on_nvidia and groups.one_host):
        needs = "needs all ranks on one host, and GPUs that reach each other's memory" if on_nvidia else "needs CUDA"
        raise ValueError(f"transport={name!r} {needs}: use 'p2p', 'all_gather' or 'auto'")
    if name == "auto":
        place = "AMD" if torch.version.hip and place != "cpu" else place
        choices = AUTO_TRANSPORTS[place]
        name = next(transports[backward] for limit, *transports in choices if limit is None or nbytes <= limit)
        if os.environ.get("RINGSPAN_LOG") == "1":
            _log_once("backward" if backward else "forward", nbytes, name, place)
    return name


@functools.cache
def _log_once(direction: str, nbytes: int, name: str, place: str) -> None:
    print(f"ringspan: the ring's {direction} moves {nbytes / 2**20:.1f} MiB a rank by {name} ({place})", file=sys.stderr)


def blocks_per_step(transport: str, layout: Layout, causal: bool, nbytes: int, heads: int) -> tuple[int, ...]:
    """Return the number of remote blocks of each step; nbytes and heads are those of one block's dK/dV.

    The last step of `copy` has one block, and each other step at most twice as many as the next: …, 4, 2, 1. This makes fewer
    kernels, each of which has a last wave, and fewer launches, which delay short blocks. The last step is the smallest: its
    kernel's last wave is short, and its gradients are returned last. A step has no more blocks than go in as many parts as one.
    """
    num_blocks = layout.ranks - 1
    if transport in SINGLE_STEP_TRANSPORTS:
        return (num_blocks,)
    # One kernel can then take the rows of several blocks.
    is_one_kernel = layout.kind == "contiguous" or (layout.kind == "zigzag" and causal)
    if transport not in COPY_TRANSPORTS or not is_one_kernel:
        return (1,) * num_blocks
    max_blocks = max(1, PART_BYTES * _num_parts(nbytes, heads, layout.local_length) // max(1, nbytes))
    remaining, blocks = num_blocks, list[int]()
    while remaining:
        blocks.append(min(2 ** len(blocks), remaining, max_blocks))
        remaining -= blocks[-1]
    return tuple(reversed(blocks))


def make_transport(transport: str, groups: RingGroups, plan: Plan, device: torch.device) -> Transport:
    transport_class = _copy_engine_class() if transport in COPY_TRANSPORTS else P2PTransport
    return transport_class(groups, plan, device)


@functools.cache
def _copy_engine_class() -> Callable[[RingGroups, Plan, torch.device], Transport]:
    from ringspan.parallel.transport.copy_engine import CopyEngineTransport  # its imports exist only with CUDA

    return CopyEngineTransport


def num_parts(plan: Plan, k: Tensor, v: Tensor) -> int:
    """Return how many parts, of some KV heads each, a step's dK/dV are sent in. More parts need more kernels, less memory."""
    return _num_parts(gradient_bytes(plan.max_keys, k, v), k.shape[2], k.shape[1])


def gradient_bytes(rows: int, k: Tensor, v: Tensor) -> int:
    """Return the bytes of dK/dV of `rows` rows in the accumulation dtype, in which they are sent."""
    return rows * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * accumulation_dtype(k.dtype).itemsize


def _num_parts(nbytes: int, heads: int, shard_rows: int) -> int:
    return math.gcd(heads, 4) if nbytes > PART_BYTES * (2 if shard_rows <= SHORT_SHARD else 1) else 1
