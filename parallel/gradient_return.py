"""Gradient return: sends dK/dV of remote rows to their owner ranks, and adds what other ranks return for local rows.

    kernel stream    kernel i        kernel i+1      kernel i+2
    transfer                         dK/dV of i      dK/dV of i+1
    "sums" stream                                    local_sums += dK/dV of i

The sums run on a side stream, so that none delays a kernel. Their priority is lower than the kernels': a sum is enqueued after
the running kernel and uses the SMs that its last wave leaves idle. At a higher priority it would interrupt that kernel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.backends.triton.sum_gradients import MAX_SUMMANDS, Summand, sum_gradients
from ringspan.kernels.tensors import accumulation_dtype, num_sms
from ringspan.parallel.plan import Piece
from ringspan.parallel.row_ranges import bounding_range, length, packed_position, relative_to
from ringspan.parallel.transport.base import Transport, received, split_by_piece
from ringspan.parallel.transport.buffers import split_gradients
from ringspan.parallel.transport.select import num_parts
from ringspan.parallel.transport.streams import SideStream, Wait

TILE_KEYS = 128  # of a thread block of Hopper's backward up to head dim 128; others have fewer, so their halves fill more SMs
TILES_PER_SM = 1.9  # in each half of the local block; below, all other thread blocks wait for the longest one

Region = tuple[slice, slice]  # KV heads, rows
RowGradients = list[tuple[slice, Tensor]]  # rows of local_sums, gradients to add to them


class Arrival(NamedTuple):
    """Gradients of local rows in transfer, and the buffers that must stay alive until they have been added."""

    wait: Wait
    pieces: list[Piece]  # local rows of the gradients
    kv_heads: slice
    recv_buffer: Tensor  # one piece after another
    send_buffer: Tensor  # of the transfer in the other direction, which runs concurrently


class GradientReturn:
    """Gradient return of one backward.

    `local_sums` holds the local block's dK/dV and the sum of remote ones. The local block waits for no transfer, so it overlaps
    them: its first half runs while the first K/V arrive, its last half while the last gradients are returned. If halves would
    not fill the SMs, the first half is the whole block and the last one has no rows. The ring writes `local_sums[first_half]`
    before the first `send`, and passes the last half's output to `finish`.

    Args:
        transport: Transport of the call.
        k, v: This rank's shards, (B, n, Hkv, D) and (B, n, Hkv, Dv).
        backend: Backend of the sums.
        row_ranges: Local rows that receive remote gradients; None means all.
        priority: Stream priority of the sums.
    """

    def __init__(
        self,
        transport: Transport,
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
        halves = half_regions if num_rows == k.shape[1] and halves_fill_sms(k, num_keys) else whole_region
        self.first_half, self.last_half = halves(heads, num_keys, num_keys)
        self.first_region, self.last_region = halves(heads, num_keys, num_rows)  # the halves with padding
        self.last_region_end = self.last_region[0].start  # heads of the last region below this one contain sums
        if num_rows > num_keys:
            self.local_sums[num_keys:, :, self.first_region[0]] = 0
        self.num_parts = num_parts(transport.plan, k, v)
        self.num_buffers = self.num_sent = 0  # parts so far; their parity is the slot
        self.in_transfer: Arrival | None = None
        self.sum_stream = SideStream(k.device, "sums", priority)
        self.sums_completion: Wait = lambda: None
        self.being_summed: Arrival | None = None  # read by sums that the caller's stream has not waited for

    def first_buffer(self) -> Tensor:
        """Return the buffer that the local block's first half is written into: (rows, B, heads, D + Dv)."""
        heads, rows = self.first_half
        return self.local_sums[rows, :, heads]

    def last_buffer(self) -> Tensor:
        """Allocate the buffer that the local block's last half is written into."""
        heads, rows = self.last_half
        return torch.empty_like(self.local_sums[rows, :, heads])

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
        """Start the transfer of one part of a step; it overlaps the next kernel. Adds the part that arrived before.

        Every rank calls this equally often, also for a part that is empty on this rank.
        """
        self.wait_for_sums()
        with self.sum_stream.run():
            if self.in_transfer is not None:
                arrived = self._wait_for_arrival(self.in_transfer)
                for region in (self.first_region, self.last_region):
                    self._accumulate(region, self._summands_in(region, self.in_transfer.kv_heads, arrived))
        self.sums_completion, self.being_summed = self.sum_stream.completion(), self.in_transfer
        pieces = self.transport.plan.sends[index]
        recv_buffer = self.local_sums.new_empty((sum(len(piece) for piece in pieces), *send_buffer.shape[1:]))
        self.num_sent += 1
        wait = self.transport.return_gradients(index, self.num_sent % 2, send_buffer, recv_buffer)
        self.in_transfer = Arrival(wait, pieces, kv_heads, recv_buffer, send_buffer)

    def wait_for_sums(self) -> None:
        """Make the current stream wait for the sums launched so far, and release the buffers that they read."""
        self.sums_completion()
        self.being_summed = None

    def finish(self, last_sums: Tensor, dk: Tensor, dv: Tensor, kernel_completion: Wait = lambda: None) -> None:
        """Add the last part and write dk and dv.

        Args:
            last_sums: The local block's last half, (rows, B, heads, D + Dv), written by a kernel. The first region is written
                concurrently with that kernel.
            dk, dv: Outputs (B, rows, Hkv, D) and (B, rows, Hkv, Dv).
            kernel_completion: Wait for that kernel, if it is not on the current stream.
        """
        assert self.in_transfer is not None, "a ring of several steps sends something in each"
        kv_heads = self.in_transfer.kv_heads
        with self.sum_stream.run():
            arrived = self._wait_for_arrival(self.in_transfer)
            remote = self._limited_summands(self.last_region, kv_heads, arrived, MAX_SUMMANDS - 1)
            wait_for_remote = self.sum_stream.completion()
            first = self._limited_summands(self.first_region, kv_heads, arrived, MAX_SUMMANDS)
            self._write_gradients(self.first_region, first, dk, dv)
        wait_for_remote()
        kernel_completion()
        self._write_gradients(self.last_region, [*remote, Summand(last_sums)], dk, dv)
        self.sum_stream.join()
        self.transport.wait_returns()

    def _write_gradients(self, region: Region, summands: list[Summand], dk: Tensor, dv: Tensor) -> None:
        heads, rows = region
        if rows.start < rows.stop:
            sum_gradients(summands, dk[:, rows, heads], dv[:, rows, heads], self.backend)

    def _limited_summands(self, region: Region, kv_heads: slice, arrived: RowGradients, limit: int) -> list[Summand]:
        """Return at most `limit` summands of a region: its sums, if it has any, and what arrived. The rest is added first."""
        heads, rows = region
        summands = self._summands_in(region, kv_heads, arrived)
        if len(summands) + (self._end_of_sums(region) > heads.start) > limit:
            surplus = len(summands) - (limit - 1)
            self._accumulate(region, summands[:surplus])
            summands = summands[surplus:]
        summed = slice(heads.start, self._end_of_sums(region))
        return [Summand(self.local_sums[rows, :, summed]), *summands] if summed.start < summed.stop else summands

    def _end_of_sums(self, region: Region) -> int:
        """Return the head below which the region contains sums."""
        return self.last_region_end if region is self.last_region else region[0].stop

    def _accumulate(self, region: Region, summands: list[Summand]) -> None:
        """Add summands, all of the same heads, to the region's sums; overwrite heads that contain no sums yet."""
        heads, rows = region
        while summands:
            relative_heads = summands[0].extent[1]
            target_heads = slice(heads.start + relative_heads.start, heads.start + relative_heads.stop)
            is_new = target_heads.stop > self._end_of_sums(region)
            count = MAX_SUMMANDS if is_new else MAX_SUMMANDS - 1
            batch, summands = summands[:count], summands[count:]
            target_rows = slice(0, length(rows)) if is_new else bounding_range([summand.extent[0] for summand in batch])
            target = self.local_sums[rows.start + target_rows.start : rows.start + target_rows.stop, :, target_heads]
            terms = [
                Summand(summand.grads, summand.row - target_rows.start, summand.head - relative_heads.start)
                for summand in batch
            ]
            sum_gradients(terms if is_new else [Summand(target), *terms], *split_gradients(target, self.width), self.backend)
            if is_new:
                self.last_region_end = target_heads.stop

    def _summands_in(self, region: Region, kv_heads: slice, arrived: RowGradients) -> list[Summand]:
        """Return the parts of what arrived for `kv_heads` that lie in the region."""
        region_heads, region_rows = region
        heads, columns = _intersection(kv_heads, region_heads), _intersection_within(kv_heads, region_heads)
        summands = []
        for rows, gradients in arrived:
            target_rows = relative_to(_intersection(rows, region_rows), region_rows)
            if target_rows.start < target_rows.stop and heads.start < heads.stop:
                source = gradients[_intersection_within(rows, region_rows), :, columns]
                summands.append(Summand(source, target_rows.start, heads.start - region_heads.start))
        return summands

    def _wait_for_arrival(self, arrival: Arrival) -> RowGradients:
        """Make the current stream wait for the transfer; return its gradients."""
        arrival.wait()
        received["dkv"] += len(arrival.pieces)
        views = split_by_piece(arrival.pieces, (arrival.recv_buffer,))
        return [
            (packed_position(piece.rows, self.row_ranges), gradients)
            for piece, (gradients,) in zip(arrival.pieces, views, strict=True)
        ]


def _intersection(first: slice, second: slice) -> slice:
    """Return the common range of two ranges; if there is none, an empty range inside the second."""
    start = min(max(first.start, second.start), second.stop)
    return slice(start, max(start, min(first.stop, second.stop)))


def _intersection_within(first: slice, second: slice) -> slice:
    """Return the common range of two ranges, counted from the first row of `first`."""
    common = _intersection(first, second)
    return slice(max(0, common.start - first.start), max(0, common.stop - first.start))


def halves_fill_sms(k: Tensor, num_keys: int) -> bool:
    """Return whether kernels of half of the local block fill the SMs.

    Under a causal mask the longest thread block takes twice as long as the average, so an SM needs about two of them. The rule
    does not look at the mask.
    """
    num_tiles = k.shape[0] * k.shape[2] * num_keys / TILE_KEYS
    return num_tiles / 2 >= TILES_PER_SM * num_sms(k.device)


def whole_region(heads: int, keys: int, end: int) -> list[Region]:
    """Return (KV heads, rows) of a whole block, and of a last half without rows."""
    return [(slice(0, heads), slice(0, end)), (slice(0, heads), slice(end, end))]


def half_regions(heads: int, keys: int, end: int) -> list[Region]:
    """Return (KV heads, rows) of the two halves of a block: half of the heads each, or half of the keys if there is one head.

    Rows end at `end`: at the last key, or after the padding.
    """
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, end)), (slice(heads // 2, heads), slice(0, end))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, end))]
