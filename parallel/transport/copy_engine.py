"""Copy engine transport: the GPUs' copy engines move rows into and out of symmetric memory. One host only; no SM is used.

Each rank has two slots for a step's keys and two for gradients. The owner rank of the rows does both copies, and nothing is
copied to be sent. Signals (`gpu_signals`) order the copies:

    call              role              stream operations, in order
    fetch             reader            signal SLOT_FREE to the owners; wait for their KV_WRITTEN
                      owner             wait for the readers' SLOT_FREE; copy rows into their slots; signal KV_WRITTEN
    send_buffer       reader            wait for GRADS_READ of all owners of the slot's previous contents
    return_gradients  every rank        signal GRADS_READY to the owners; wait for GRADS_READY of the readers of its rows;
                                        copy their gradients; signal GRADS_READ to them
    wait_returns      reader            wait for the GRADS_READ that are left

A call leaves no signal behind, so a CUDA graph of it can be replayed, between other calls as well. A graph does not keep the
order in which the host enqueued its branches, and may run one at a time. So in a capture a wait for a signal also depends, by
events, on all signals that this rank has enqueued before.

No multicast (multimem) is used.
"""

import math
import os
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.arrivals import rank_names
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Piece, Plan
from ringspan.parallel.transport.base import Transport, split_by_piece
from ringspan.parallel.transport.buffers import Rows
from ringspan.parallel.transport.gpu_signals import GRADS_READ, GRADS_READY, KV_WRITTEN, SLOT_FREE, GpuSignals
from ringspan.parallel.transport.streams import SideStream, Wait, is_capturing

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
MAX_CACHED_VIEWS = 1024  # views of symmetric memory; with documents every training step needs other ones


class SymmetricBuffers:
    """Named buffers in the symmetric memory of a group: one per name and rank, mapped by all ranks. Also their signals."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.signals = GpuSignals(group, device)
        self.memory: dict[str, tuple[Tensor, Any]] = {}  # this rank's buffer, and the handle to all ranks' buffers
        self.views: dict[Any, Tensor] = {}  # cache: a ring needs the same views in each call
        self.last_caller: torch.cuda.Stream | None = None  # caller's stream of the last call
        self.is_captured = False  # whether a CUDA graph uses the buffers
        self.outgrown: list[tuple[Tensor, Any]] = []  # buffers of a CUDA graph that larger ones have replaced

    def allocate(self, name: str, nbytes: int, device: torch.device) -> None:
        """Make the buffer at least `nbytes` large, on every rank. Growing it is a collective of the group."""
        if name not in self.memory or self.memory[name][0].numel() < nbytes:
            check_not_capturing(device)
            if self.is_captured and name in self.memory:
                self.outgrown.append(self.memory[name])
            synchronize(device)  # copies may still read the old buffer; the rendezvous waits until this holds on all ranks
            torch.cuda.empty_cache()  # symmetric memory is not the caching allocator's, which may hold the rest of the GPU
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            self.memory[name] = memory, symmetric_memory.rendezvous(memory, self.group)
            self.views.clear()

    def view(self, name: str, rank: int, first: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return rows first … of a rank's buffer, as a tensor that starts at element `offset` of the buffer."""
        key = name, rank, first, shape, dtype, offset
        if key not in self.views:
            if len(self.views) >= MAX_CACHED_VIEWS:
                self.views.clear()
            with torch.inference_mode(False):  # a view made in inference mode could not be written outside of it
                self.views[key] = self.memory[name][1].get_buffer(rank, shape, dtype, offset + first * math.prod(shape[1:]))
        return self.views[key]


_buffers: dict[str, SymmetricBuffers] = {}  # by group name
_retired: list[SymmetricBuffers] = []  # of calls that ended with an error: other ranks may still access them


def symmetric_buffers(group: dist.ProcessGroup, device: torch.device) -> SymmetricBuffers:
    """Return the buffers of a group. The first call is a collective of the group."""
    name = group.group_name
    if name not in _buffers or _buffers[name].group is not group:  # a new group can have the name of a destroyed one
        check_not_capturing(device)
        _buffers[name] = SymmetricBuffers(group, device)
        if _retired:  # all ranks have reached this collective, so none starts another access
            synchronize(device)
            _retired[:] = [buffers for buffers in _retired if buffers.is_captured]
    return _buffers[name]


def check_not_capturing(device: torch.device) -> None:
    """Raise an error if buffers of a call would have to be allocated while a CUDA graph is captured."""
    if is_capturing(device):
        raise RuntimeError(
            "transport='copy' allocates its buffers in the first call, which a CUDA graph cannot capture: "
            "run the same forward and backward once before the capture"
        )


class CopyEngineTransport(Transport):
    """Transport by copy engines.

    A step's SLOT_FREE is signalled after the arrival of the step before, so the two transfers do not share links. The caller's
    stream waits for three things only: GRADS_READ in `send_buffer`, which has passed unless another rank is a step late; the
    transfers whose rows it uses; and towards the end of the call all sends, then all returns.
    """

    needs_sms = False

    def __init__(self, groups: RingGroups, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        self.device, self.rank, self.timeout_s, self.ranks = device, groups.group.rank(), groups.timeout_s, groups.ranks
        self.buffers = symmetric_buffers(groups.group, device)
        self.is_capturing = is_capturing(device)
        self.buffers.is_captured |= self.is_capturing
        self.last_send: Wait = lambda: None
        self.returned_to: list[tuple[int, ...]] = [(), ()]  # owner ranks of the contents of each gradient slot
        self.signal_completions: dict[SideStream, Wait] = {}  # in a capture, of the last signal of each stream

    @cached_property
    def receive_stream(self) -> SideStream:
        return SideStream(self.device, "receive")

    @cached_property
    def send_stream(self) -> SideStream:
        return SideStream(self.device, "send")

    @cached_property
    def gradient_stream(self) -> SideStream:
        return SideStream(self.device, "gradients")

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        super().publish_kv(k, v)
        if not self.is_capturing:  # a replay is ordered by the stream that it is launched on
            self.buffers.last_caller = self.receive_stream.order_caller_after(self.buffers.last_caller)
        if any(self.plan.sends):  # else nothing would join the stream to a CUDA graph's other streams
            self.send_stream.wait_for_caller()

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        self.buffers.allocate(f"kv {slot}", self.plan.max_keys * ((k.nbytes + v.nbytes) // k.shape[1]), self.device)
        return self._kv_views(slot, self.rank, 0, rows)

    def _kv_views(self, slot: int, rank: int, first: int, rows: int) -> Rows:
        """Views of some rows of a rank's K/V slot, which holds all rows of K, then all rows of V."""
        views, offset = [], 0
        for x in self.published:
            shape = rows, *x.shape[1:]
            views.append(self.buffers.view(f"kv {slot}", rank, first, shape, x.dtype, offset))
            offset += self.plan.max_keys * math.prod(x.shape[1:])
        return tuple(views)

    def fetch(self, index: int, slot: int, recv_buffers: Rows) -> Wait:
        # The owner ranks write into this rank's slot, of which `recv_buffers` are views; this rank writes into its readers'.
        pieces = self.plan.sends[index]
        owners, readers = ranks_of(self.plan.steps[index].pieces), ranks_of(pieces)
        self.receive_stream.wait_for_caller()  # the kernels that read the slot's previous contents
        with self.receive_stream.run():
            self._signal(SLOT_FREE, owners, self.receive_stream)
        if pieces:
            with self.send_stream.run():
                self._wait_for(SLOT_FREE, readers)
                for piece in pieces:
                    copy(self._kv_views(slot, piece.rank, piece.offset, len(piece)), [x[piece.rows] for x in self.published])
                self._signal(KV_WRITTEN, readers, self.send_stream)
            self.last_send = self._watch(self.send_stream, "K/V taken by", readers, index)
        with self.receive_stream.run():
            self._wait_for(KV_WRITTEN, owners)
        return self._watch(self.receive_stream, "K/V from", owners, index)

    def wait_sends(self) -> None:
        self.last_send()
        super().wait_sends()

    def abort(self) -> None:
        """Retire the buffers, so that the next call starts with new ones and no signals, on all ranks together.

        After an error some signals may be left, and would end a later wait too early. A rank that failed alone waits for the
        others in that collective, and signals nothing.
        """
        super().abort()
        if _buffers.get(self.buffers.group.group_name) is self.buffers:
            _retired.append(_buffers.pop(self.buffers.group.group_name))

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        name, shape = f"gradients {slot}", like.shape[1:]
        self.buffers.allocate(name, self.plan.max_keys * math.prod(shape) * like.itemsize, self.device)
        self._wait_until_read(slot)
        return self.buffers.view(name, self.rank, 0, (rows, *shape), like.dtype)

    def _wait_until_read(self, slot: int) -> None:
        """Make the current stream wait until the owner ranks have copied the slot's contents."""
        self._wait_for(GRADS_READ[slot], self.returned_to[slot])
        self.returned_to[slot] = ()

    def return_gradients(self, index: int, slot: int, send_buffer: Tensor, recv_buffer: Tensor) -> Wait:
        # Owner ranks copy from their readers' send buffers, so this rank copies from those of the readers of its rows.
        pieces = self.plan.sends[index]
        owners, readers = ranks_of(self.plan.steps[index].pieces), ranks_of(pieces)
        targets = [target for (target,) in split_by_piece(pieces, (recv_buffer,))]
        sources = [
            self.buffers.view(f"gradients {slot}", piece.rank, piece.offset, target.shape, target.dtype)
            for piece, target in zip(pieces, targets, strict=True)
        ]
        self.gradient_stream.wait_for_caller()
        with self.gradient_stream.run():
            self._signal(GRADS_READY[slot], owners, self.gradient_stream)
            self._wait_for(GRADS_READY[slot], readers)
            copy(targets, sources)
            self._signal(GRADS_READ[slot], readers, self.gradient_stream)
        self.returned_to[slot] = owners
        return self._watch(self.gradient_stream, "dK/dV from", readers, index)

    def wait_returns(self) -> None:
        for slot in range(2):
            self._wait_until_read(slot)

    def _signal(self, kind: int, ranks: tuple[int, ...], stream: SideStream) -> None:
        """Signal to these ranks on `stream`, the current one."""
        self.buffers.signals.signal(kind, ranks)
        if self.is_capturing:
            self.signal_completions[stream] = stream.completion()

    def _wait_for(self, kind: int, ranks: tuple[int, ...]) -> None:
        """Make the current stream wait for a signal of each of these ranks."""
        if ranks:
            for wait in self.signal_completions.values():
                wait()
            self.buffers.signals.wait(kind, ranks)

    def _watch(self, stream: SideStream, transfer: str, ranks: tuple[int, ...], index: int) -> Wait:
        """Return a wait for the transfer on `stream`, which `progress` watches.

        Watching only the end of the call is not enough: the host may synchronise earlier and would then hang.
        """
        event = stream.record()
        if event is not None and ranks:
            progress.hop(index, len(self.plan.steps) - 1)
            awaited = partial(_describe, transfer, [self.ranks[rank] for rank in ranks])
            progress.expect(awaited, self.timeout_s, end=True, event=event)
        return stream.wait_for(event)


def _describe(transfer: str, ranks: list[int]) -> str:
    return f"{transfer} {rank_names(ranks)}"


def ranks_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    return tuple(sorted({piece.rank for piece in pieces}))


def copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy tensors that are contiguous, which makes CUDA use copy engines."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def symmetric_bytes() -> int:
    """Return the bytes of this process's symmetric memory, which torch's allocator does not count."""
    return sum(
        memory.nbytes
        for buffers in [*_buffers.values(), *_retired]
        for memory, _ in [*buffers.memory.values(), *buffers.outgrown, buffers.signals.memory]
    )
