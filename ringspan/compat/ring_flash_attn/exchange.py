"""Exchange between shards of each document and a zigzag shard of the packed sequence, one all-to-all per direction.

    documents   |A A A A|B B B B B B B B|        rank 0 of 2 has A0 A3 B0 B1 B6 B7 (zigzag of each document)
    packed      |0 1 2|3 4 5|6 7 8|9 10 11|      rank 0 of 2 has rows 0 1 2 9 10 11 (zigzag of the whole)

A `Route` says which rows a rank sends to which rank, and where the received rows belong. It depends on the boundaries alone, so
layers share it, and the number of launches does not depend on the number of documents.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringspan.kernels.varlen import shortened
from ringspan.parallel.coordination import arrivals, progress
from ringspan.parallel.coordination.process_groups import timeout_of
from ringspan.parallel.layout import Layout

_host_copies = WeakTensorKeyDictionary()  # boundaries by tensor: all layers of a step get the same one


class Side(NamedTuple):
    """Rows of one kind of shard, in the order in which they are sent."""

    rows: Tensor  # (number of tokens,) row of each, peer by peer
    counts: list[int]  # tokens for each peer
    length: int  # rows of the shard, padding included


class Route(NamedTuple):
    """One rank's part of the exchange."""

    documents: Side  # shards of each document
    packed: Side  # zigzag shard of the packed sequence
    boundaries: tuple[int, ...]  # of the whole packed sequence
    layout: Layout

    def to(self, device: torch.device) -> "Route":
        documents, packed = (side._replace(rows=side.rows.to(device)) for side in (self.documents, self.packed))
        return self._replace(documents=documents, packed=packed)


def host_boundaries(cu_seqlens: Any) -> tuple[int, ...]:
    """Return boundaries as ints. Synchronises with a GPU, once for each tensor.

    Raises:
        ValueError: `cu_seqlens` is neither a tensor of ints of shape (documents + 1,) nor a list of ints.
    """
    if not isinstance(cu_seqlens, Tensor):
        if not isinstance(cu_seqlens, list | tuple) or not all(type(n) is int for n in cu_seqlens):
            raise ValueError(f"cu_seqlens={cu_seqlens!r} must be an int32 tensor of shape (documents + 1,), or a list of ints")
        return tuple(cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        shape, dtype = tuple(cu_seqlens.shape), cu_seqlens.dtype
        raise ValueError(f"cu_seqlens has shape {shape} and is {dtype}: it must be (documents + 1,), int32 or int64")
    if cu_seqlens.is_inference():  # it has no version, so it may have changed
        return tuple(cu_seqlens.tolist())
    version, numbers = _host_copies.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        numbers = tuple(cu_seqlens.tolist())
        _host_copies[cu_seqlens] = cu_seqlens._version, numbers
    return numbers


def document_lengths(kind: str, boundaries: tuple[int, ...], num_tokens: int, size: int) -> list[int]:
    """Return the lengths of whole documents.

    Args:
        kind: "zigzag" or "contiguous" parts of each document.
        boundaries: Of the shards of the documents, or of the whole documents.
        num_tokens: Tokens of this rank's shard.
        size: Number of ranks.

    Raises:
        ValueError: The boundaries are not valid.
    """
    lengths = [end - start for start, end in pairwise(boundaries)]
    if not boundaries or boundaries[0] != 0 or any(n < 0 for n in lengths):
        raise ValueError(f"cu_seqlens={shortened(boundaries)}: boundaries must begin with 0 and not decrease")
    if boundaries[-1] != num_tokens or size == 1:
        return lengths
    if kind == "zigzag" and any(n % 2 for n in lengths):
        index = next(i for i, n in enumerate(lengths) if n % 2)
        raise ValueError(
            f"cu_seqlens={shortened(boundaries)}: document {index} has {lengths[index]} tokens in this shard, and a zigzag "
            f"shard is two chunks of one length; pad each document to a multiple of {2 * size}, or pass the boundaries of the "
            "whole documents"
        )
    return [n * size for n in lengths]


def shard_positions(kind: str, lengths: list[int], size: int, rank: int) -> Tensor:
    """Return the positions in the packed sequence that a rank has of each document, in row order.

    A document of length L is cut as by torch.chunk: chunks of ⌈L / number of chunks⌉ tokens, of which the last may be shorter.
    """
    length = torch.tensor(lengths, dtype=torch.int64)[:, None]
    first = length.cumsum(0) - length
    chunks, numbers = (2 * size, [rank, 2 * size - 1 - rank]) if kind == "zigzag" else (size, [rank])
    number, step = torch.tensor(numbers), -(length // -chunks)
    start, end = torch.minimum(number * step, length), torch.minimum((number + 1) * step, length)
    counts = (end - start).flatten()
    offsets = (start + first).flatten() - (counts.cumsum(0) - counts)
    return torch.repeat_interleave(offsets, counts) + torch.arange(int(counts.sum()))


@lru_cache(maxsize=4)  # routes of a million tokens are 16 MB on the device
def make_route(kind: str, boundaries: tuple[int, ...], num_tokens: int, size: int, rank: int, device: torch.device) -> Route:
    """Return a rank's route. The arguments are those of `document_lengths`.

    Raises:
        ValueError: The boundaries are not valid, or do not describe this rank's tokens.
    """
    lengths = document_lengths(kind, boundaries, num_tokens, size)
    chunks = 2 * size if kind == "zigzag" else size
    positions = [shard_positions(kind, lengths, size, peer) for peer in range(size)]
    if len(positions[rank]) != num_tokens:
        raise ValueError(
            f"cu_seqlens={shortened(boundaries)}: q has {num_tokens} tokens, and rank {rank} of {size} has "
            f"{len(positions[rank])} of these whole documents; pass the boundaries of the shards, or cut documents as "
            f"torch.chunk(…, {chunks}) does"
        )
    layout = Layout("zigzag", sum(lengths), size)
    owners = torch.empty(layout.length, dtype=torch.int64)
    rows = torch.empty(layout.length, dtype=torch.int64)
    for peer in range(size):
        owned = layout.positions(peer)
        is_real = owned < layout.length
        owners[owned[is_real]], rows[owned[is_real]] = peer, torch.arange(layout.local_length)[is_real]
    targets = owners[positions[rank]]
    order = torch.argsort(targets * layout.local_length + rows[positions[rank]])
    sent = Side(order, torch.bincount(targets, minlength=size).tolist(), num_tokens)
    received = [rows[p[owners[p] == rank]].sort().values for p in positions]
    whole = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    route = Route(sent, Side(torch.cat(received), [len(r) for r in received], layout.local_length), whole, layout)
    return route.to(device)


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows (n, features) from one side of a route to the other; its backward goes in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Side, target: Side, ring: dist.ProcessGroup) -> Tensor:
        ctx.options = target, source, ring
        progress.enter("exchange of documents")
        send_buffer = x.index_select(0, source.rows)
        recv_buffer = x.new_empty((len(target.rows), x.shape[1]))
        timeout_s = timeout_of(ring, x.device).total_seconds()
        # On a GPU the host does not wait, so arrival of the host would say nothing about the device.
        missing = "all ranks of its group" if x.is_cuda else arrivals.announce_arrival(ring)
        counts = target.counts, source.counts
        progress.wait(lambda: dist.all_to_all_single(recv_buffer, send_buffer, *counts, group=ring), missing, timeout_s)
        if x.is_cuda:
            progress.expect("all ranks of its group", timeout_s)
        return x.new_zeros((target.length, x.shape[1])).index_copy_(0, target.rows, recv_buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ExchangeRows.apply(grad, *ctx.options), None, None, None
