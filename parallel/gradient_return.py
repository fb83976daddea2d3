"""Gradient return: sends dK/dV of remote rows to their owner ranks, and adds what other ranks return for local rows.

    kernel stream    kernel i        kernel i+1      kernel i+2
    transfer                         dK/dV of i      dK/dV of i+1
    "sums" stream                                    local_sums += dK/dV of earlier kernels, several at once

The sums run on a side stream, so that none delays a kernel. Their priority is lower than the kernels': a sum is enqueued after
the running kernel and uses the SMs that its last wave leaves idle. At a higher priority it would interrupt that kernel.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.backends.triton.sum_gradients import MAX_SUMMANDS, Summand, sum_gradients
from ringspan.kernels.tensors import accumulation_dtype, num_sms
from ringspan.parallel.plan import Piece
from ringspan.parallel.row_ranges import bounding_range, contains, length, packed_position, relative_to
from ringspan.parallel.transport.base import Transport, received, split_by_piece
from ringspan.parallel.transport.buffers import split_gradients
from ringspan.parallel.transport.select import gradient_bytes, num_parts
from ringspan.parallel.transport.streams import SideStream, Wait

# Bytes of the local dK/dV between which gradients that arrive are kept and added together, KEPT_BYTES at most. A sum of fewer
# finds idle SMs; more would need gigabytes for a gain of at most 1 %.
SMALL_BYTES, LARGE_BYTES, KEPT_BYTES = 2**26, 2**29, 2**29
TILE_KEYS = 128  # of a thread block of Hopper's backward, or 64 at some head dims above 128, whose halves fill more SMs
MAX_HEAD_SPLITS = 4  # of a tile's thread blocks, which share its query heads where they are few; more were not measured
TILES_PER_SM = 1.9  # in each half of the local block; below, all other thread blocks wait for the longest one

Half = tuple[slice, slice]  # KV heads and rows of half of the local block


class Arrival(NamedTuple):
    """Gradients of local rows in transfer, and the buffers that must stay alive until they have been added."""

    wait: Wait
    pieces: list[Piece]  # local rows of the gradients
    kv_heads: slice
    recv_buffer: Tensor  # one piece after another
    send_buffer: Tensor  # of the transfer in the other direction, which runs concurrently


class Part(NamedTuple):
    """dK/dV of some KV heads and rows."""

    kv_heads: slice
    rows: slice
    gradients: Tensor  # (rows, B, heads, D + Dv)


class GradientReturn:
    """Gradient return of one backward.

    The local block waits for no transfer, so it overlaps them: its first half runs while the first K/V arrive, its last half
    while the last gradients are returned. If halves would not fill the SMs, the first half is the whole block and the last one
    has no rows. The ring writes `first_buffer` before the first `send`, and passes the last half's output to `finish`.

    Each sum reads and writes `local_sums`, and a later send waits for it. So up to `max_kept` parts are kept, then added
    together; `finish` adds the rest. Small and large parts are added one by one (see SMALL_BYTES).

    Args:
        transport: Transport of the call.
        q, k, v: This rank's shards, (B, n, Hq, D), (B, n, Hkv, D) and (B, n, Hkv, Dv).
        backend: Backend of the sums.
        row_ranges: Local rows that receive remote gradients; None means all.
        priority: Stream priority of the sums.
    """

    def __init__(
        self,
        transport: Transport,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        backend: str,
        row_ranges: list[slice] | None = None,
        priority: int = 0,
    ) -> None:
        self.transport, self.backend, self.width = transport, backend, k.shape[3]
        self.row_ranges = [slice(0, k.shape[1])] if row_ranges is None else row_ranges
        num_rows, heads = sum(map(length, self.row_ranges)), k.shape[2]
        num_keys = min(num_rows, transport.plan.steps[0].num_keys)  # the rows after them are padding
        shape = num_rows, k.shape[0], heads, k.shape[3] + v.shape[3]
        self.local_sums = k.new_empty(shape, dtype=accumulation_dtype(k.dtype))
        # A whole block is computed first: halves would not fill the SMs, or other local keys are computed apart and their
        # kernels are enough to overlap transfers with.
        halves = half_blocks if num_rows == k.shape[1] and halves_fill_sms(q, k, num_keys) else whole_block
        self.first_half, self.last_half = halves(heads, num_keys)
        self.summed = [self._part(*self.first_half)]  # parts of local_sums that contain gradients; they have different heads
        self.num_parts = num_parts(transport.plan, k, v)
        self.num_buffers = self.num_sent = 0  # parts so far; their parity is the slot
        part_bytes = gradient_bytes(transport.plan.max_keys, k, v) // self.num_parts
        is_kept = SMALL_BYTES < self.local_sums.nbytes < LARGE_BYTES
        self.max_kept = max(1, KEPT_BYTES // part_bytes) if is_kept else 1
        self.arrivals: list[Arrival] = []  # not added yet; the last one may be in transfer
        self.sum_stream = SideStream(k.device, "sums", priority)
        self.sums_completion: Wait = lambda: None
        self.being_summed: list[Arrival] = []  # read by sums that the caller's stream has not waited for

    def _part(self, kv_heads: slice, rows: slice) -> Part:
        return Part(kv_heads, rows, self.local_sums[rows, :, kv_heads])

    def first_buffer(self) -> Tensor:
        """Return the buffer that the local block's first half is written into: (rows, B, heads, D + Dv)."""
        return self._part(*self.first_half).gradients

    def last_buffer(self) -> Tensor:
        """Allocate the buffer that the local block's last half is written into."""
        return torch.empty_like(self._part(*self.last_half).gradients)

    def wait_for_caller(self) -> None:
        """Make the sums wait for all work enqueued on the caller's stream so far. Call it before launching a kernel."""
        self.sum_stream.wait_for_caller()

    def head_parts(self) -> list[slice]:
        """Return the KV heads of each part."""
        heads = self.local_sums.shape[2] // self.num_parts
        return [slice(i * heads, (i + 1) * heads) for i in range(self.num_parts)]

    def send_buffer(self, index: int, kv_heads: slice) -> Tensor:
        """Return the buffer for the gradients of one part of a step's keys: (rows, B, heads, D + Dv)."""
        self.num_buffers += 1
        num_keys = self.transport.plan.steps[index].num_keys
        return self.transport.send_buffer(self.num_buffers % 2, num_keys, self.local_sums[:0, :, kv_heads])

    def send(self, index: int, kv_heads: slice, send_buffer: Tensor) -> None:
        """Start the transfer of one part of a step; it overlaps the next kernel.

        Every rank calls this equally often, also for a part that is empty on this rank.
        """
        pieces = self.transport.plan.sends[index]
        if len(self.arrivals) == self.max_kept:
            self._add_arrivals()
        recv_buffer = self.local_sums.new_empty((sum(len(piece) for piece in pieces), *send_buffer.shape[1:]))
        self.num_sent += 1
        wait = self.transport.return_gradients(index, self.num_sent % 2, send_buffer, recv_buffer)
        self.arrivals.append(Arrival(wait, pieces, kv_heads, recv_buffer, send_buffer))

    def _add_arrivals(self) -> None:
        """Add what has arrived to local_sums, on the stream of sums."""
        self.wait_for_sums()
        with self.sum_stream.run():
            arrived, summed = self._arrived_parts(), list[Part]()
            for kv_heads in self._cut_heads([*self.summed, *arrived]):
                old, new = _summands(self.summed, kv_heads), _summands(arrived, kv_heads)
                if sums := [self._accumulate(kv_heads, old, new)] if new else old:
                    summed.append(self._part(kv_heads, sums[0].rows))
        self.summed = summed
        self.sums_completion, self.being_summed, self.arrivals = self.sum_stream.completion(), self.arrivals, []

    def wait_for_sums(self) -> None:
        """Make the current stream wait for the sums launched so far, and release the buffers that they read."""
        self.sums_completion()
        self.being_summed = []

    def finish(self, last_sums: Tensor, dk: Tensor, dv: Tensor, kernel_completion: Wait = lambda: None) -> None:
        """Add what is left and write dk and dv.

        Args:
            last_sums: The local block's last half, (rows, B, heads, D + Dv), written by a kernel. Gradients of other heads are
                written concurrently with that kernel.
            dk, dv: Outputs (B, rows, Hkv, D) and (B, rows, Hkv, Dv).
            kernel_completion: Wait for that kernel, if it is not on the current stream.
        """
        last = Part(*self.last_half, last_sums)
        with self.sum_stream.run():
            arrived, terms = self._arrived_parts(), list[tuple[slice, list[Summand], list[Summand]]]()
            for kv_heads in self._cut_heads([*self.summed, *arrived, last]):
                output = _summands([last], kv_heads)
                terms.append((kv_heads, self._limited_summands(kv_heads, arrived, MAX_SUMMANDS - len(output)), output))
            wait_for_remote = self.sum_stream.completion()
            for kv_heads, summands, output in terms:
                if not output:
                    self._write_gradients(kv_heads, summands, dk, dv)
        wait_for_remote()
        kernel_completion()
        for kv_heads, summands, output in terms:
            if output:
                self._write_gradients(kv_heads, [*summands, *output], dk, dv)
        self.sum_stream.join()
        self.transport.wait_returns()

    def _arrived_parts(self) -> list[Part]:
        """Make the current stream wait for all transfers; return their gradients."""
        parts = []
        for arrival in self.arrivals:
            arrival.wait()
            received["dkv"] += len(arrival.pieces)
            views = split_by_piece(arrival.pieces, (arrival.recv_buffer,))
            for piece, (gradients,) in zip(arrival.pieces, views, strict=True):
                parts.append(Part(arrival.kv_heads, packed_position(piece.rows, self.row_ranges), gradients))
        return parts

    def _cut_heads(self, parts: list[Part]) -> list[slice]:
        """Return all KV heads, cut where parts begin and end."""
        borders = {border for part in parts for border in (part.kv_heads.start, part.kv_heads.stop)}
        return [slice(*pair) for pair in pairwise(sorted({0, self.local_sums.shape[2], *borders}))]

    def _limited_summands(self, kv_heads: slice, arrived: list[Part], limit: int) -> list[Summand]:
        """Return at most `limit` summands of some heads: the sums so far and what arrived. The rest is added to the sums."""
        sums, new = _summands(self.summed, kv_heads), _summands(arrived, kv_heads)
        if len(sums) + len(new) > limit:
            surplus = len(new) + 1 - limit
            sums, new = [self._accumulate(kv_heads, sums, new[:surplus])], new[surplus:]
        return [*sums, *new]

    def _accumulate(self, kv_heads: slice, sums: list[Summand], new: list[Summand]) -> Summand:
        """Add new gradients to the sums so far, if there are any; return the sums. Rows without gradients become 0."""
        target = self.local_sums[:, :, kv_heads]
        while new:
            count = MAX_SUMMANDS - len(sums)
            batch, new = new[:count], new[count:]
            rows = slice(0, target.shape[0])
            if sums and sums[0].rows == rows:  # the other rows remain as they are
                rows = bounding_range([summand.rows for summand in batch])
                sums = [Summand(target[rows])]
            batch = [Summand(summand.grads, summand.row - rows.start) for summand in batch]
            sum_gradients([*sums, *batch], *split_gradients(target[rows], self.width), self.backend)
            sums = [Summand(target)]
        return sums[0]

    def _write_gradients(self, kv_heads: slice, summands: list[Summand], dk: Tensor, dv: Tensor) -> None:
        """Write the sum to these heads of dk and dv."""
        outputs = dk[:, :, kv_heads], dv[:, :, kv_heads]
        if summands:
            sum_gradients(summands, *outputs, self.backend)
        else:
            for x in outputs:
                x.zero_()


def _summands(parts: list[Part], kv_heads: slice) -> list[Summand]:
    """Return the parts that contain these heads, cut to them."""
    return [
        Summand(part.gradients[:, :, relative_to(kv_heads, part.kv_heads)], part.rows.start)
        for part in parts
        if contains(part.kv_heads, kv_heads) and part.rows.start < part.rows.stop
    ]


def halves_fill_sms(q: Tensor, k: Tensor, num_keys: int) -> bool:
    """Return whether kernels of half of the local block fill the SMs.

    Under a causal mask the longest thread block takes twice as long as the average, so an SM needs about two of them. The rule
    does not look at the mask.
    """
    batch, _, kv_heads, _ = k.shape
    num_tiles = batch * kv_heads * math.gcd(q.shape[2] // kv_heads, MAX_HEAD_SPLITS) * num_keys / TILE_KEYS
    return num_tiles / 2 >= TILES_PER_SM * num_sms(k.device)


def whole_block(heads: int, keys: int) -> list[Half]:
    """Return the whole block, and a last half without rows."""
    return [(slice(0, heads), slice(0, keys)), (slice(0, heads), slice(keys, keys))]


def half_blocks(heads: int, keys: int) -> list[Half]:
    """Return the two halves of a block: half of the heads each, or half of the keys if there is one head."""
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, keys)), (slice(heads // 2, heads), slice(0, keys))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, keys))]
