"""Transport: the interface by which a ring moves K/V and gradients, and the prefetch of steps.

    transport.publish_kv(k, v)                                        make local K/V available to reader ranks
    transport.fetch(step, slot, buffer)                               send and receive one step's K/V
    transport.send_buffer(slot, …), transport.return_gradients(…)     send one step's dK/dV to their owner ranks
    transport.wait_sends(), wait_returns(), abort()                   end of a call

Buffers are double-buffered: `slot` 0 or 1. `KVPrefetch` starts the transfer of step i + 2 once step i has been read:

    receive     K/V 1   K/V 2   K/V 3   …
    compute     local   step 1  step 2  …
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator

from torch import Tensor

from ringspan.parallel.coordination import progress
from ringspan.parallel.plan import Piece, Plan, Step
from ringspan.parallel.transport.buffers import Rows, contiguous_rows, new_rows, rows_first
from ringspan.parallel.transport.streams import Wait


class Transport(ABC):
    """Transfers of one ring call."""

    needs_sms = True  # transfers run on SMs, so they wait while a kernel occupies all of them

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.published: Rows = ()

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        """Make this rank's K/V, (B, n, Hkv, D) and (B, n, Hkv, Dv), available to reader ranks."""
        self.published = tuple(contiguous_rows(rows_first(x)) for x in (k, v))

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        """Return the receive buffers of a step's K/V, with `rows` rows. Call it after `publish_kv`, once per slot."""
        return new_rows(rows, k, v)

    @abstractmethod
    def fetch(self, index: int, slot: int, recv_buffers: Rows) -> Wait:
        """Start a step's transfers: receive its K/V into `recv_buffers`, send local rows to this step's reader ranks.

        Every rank calls this for every step, in order. The result waits until the K/V have arrived.
        """

    def wait_sends(self) -> None:
        """Make the current stream wait until local K/V have been sent. Call it after the last fetch; K/V may then change."""
        self.published = ()

    def abort(self) -> None:
        """Clean up after an error anywhere in the call."""
        self.published = ()

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        """Return the buffer that a kernel writes one step's dK/dV into; shape of `like`, with `rows` rows.

        Two slots alternate. On return the previous contents of `slot` have been sent. The other slot may still be in use by a
        running kernel.
        """
        return like.new_empty((rows, *like.shape[1:]))

    @abstractmethod
    def return_gradients(self, index: int, slot: int, send_buffer: Tensor, recv_buffer: Tensor) -> Wait:
        """Send a step's dK/dV to their owner ranks; receive those of local rows, one piece after another in `Plan.sends`.

        Every rank calls this equally often. The result waits until the gradients of local rows have arrived.
        """

    def wait_returns(self) -> None:  # noqa: B027 (p2p's result of return_gradients waits for its sends)
        """Make the current stream wait until all returned gradients have been sent. Call it after the last arrival."""


class SingleRankTransport(Transport):
    """Transport of a ring with one rank: no transfers."""

    def fetch(self, index: int, slot: int, recv_buffers: Rows) -> Wait:
        return lambda: None

    def return_gradients(self, index: int, slot: int, send_buffer: Tensor, recv_buffer: Tensor) -> Wait:
        return lambda: None


def split_by_piece(pieces: list[Piece], buffers: Rows) -> list[Rows]:
    """Return each piece's views of buffers that hold the pieces one after another."""
    if len(pieces) == 1:
        return [buffers]
    views, row = [], 0
    for piece in pieces:
        views.append(tuple(buffer[row : row + len(piece)] for buffer in buffers))
        row += len(piece)
    return views


received: Counter[str] = Counter()  # transfers that this rank received: steps of K/V ("kv"), pieces of gradients ("dkv")


class KVPrefetch:
    """K/V of the steps of one call. Two receive buffers, so the transfers of two steps are in flight.

    Creating it publishes local K/V. Start the steps in order, and finish after the last kernel.
    """

    def __init__(self, transport: Transport, k: Tensor, v: Tensor) -> None:
        local_step, *self.remote_steps = transport.plan.steps
        self.transport = transport
        self.local = k[:, local_step.pieces[0].rows], v[:, local_step.pieces[0].rows]
        self.recv_buffers: list[Rows] = []
        self.in_flight: deque[tuple[Rows, Wait]] = deque()
        if self.remote_steps:
            transport.publish_kv(k, v)
            max_keys = max(step.num_keys for step in self.remote_steps)
            slots = range(min(2, len(self.remote_steps)))
            self.recv_buffers = [transport.recv_buffer(slot, max_keys, k, v) for slot in slots]
        self.start(1)
        self.start(2)

    def start(self, index: int) -> None:
        """Start the transfer of a step, if there is one, after the current stream's wait for all reads of step `index` − 2."""
        if index > len(self.remote_steps):
            return
        slot = (index - 1) % 2
        progress.hop(index, len(self.remote_steps))
        k_rows, v_rows = (buffer[: self.remote_steps[index - 1].num_keys] for buffer in self.recv_buffers[slot])
        self.in_flight.append(((k_rows, v_rows), self.transport.fetch(index, slot, (k_rows, v_rows))))

    def wait(self, index: int) -> tuple[Tensor, Tensor]:
        """Make the current stream wait for the keys and values of a step; return them, (B, keys, Hkv, D) and (…, Dv)."""
        if index == 0:
            return self.local
        progress.hop(index, len(self.remote_steps))
        (k_rows, v_rows), wait_arrival = self.in_flight.popleft()
        wait_arrival()
        received["kv"] += bool(self.remote_steps[index - 1].pieces)
        return rows_first(k_rows), rows_first(v_rows)

    def finish(self) -> None:
        """Make the current stream wait until local K/V have been sent; free the receive buffers."""
        self.recv_buffers = []
        if self.remote_steps:
            self.transport.wait_sends()


def prefetched_steps(transport: Transport, k: Tensor, v: Tensor) -> Iterator[tuple[int, Step, Tensor, Tensor]]:
    """Yield (index, step, keys, values) for each step, local block first. The current stream has waited for the K/V.

    For kernels on the current stream: a step's buffer is overwritten after the work that was enqueued when the loop goes on.
    """
    prefetch = KVPrefetch(transport, k, v)
    for index, step in enumerate(transport.plan.steps):
        yield index, step, *prefetch.wait(index)
        if index > 0:
            prefetch.start(index + 2)
    prefetch.finish()


# Lower-case substrings of a profiler's event names. "dtod" is a copy to or from another GPU's symmetric memory, but also a copy
# within one GPU. So it counts as a transfer only inside the ring, which in 16 bits makes no other copies.
TRANSFERS, WITHIN_RING = ("nccl", "c10d::", "gloo:", "memcpy ptop", "memcpy p2p"), "memcpy dtod"


def is_transfer(name: str, in_ring: bool) -> bool:
    """Whether the profiler event of this name moves data between ranks."""
    name = name.lower()
    return any(word in name for word in TRANSFERS) or (in_ring and WITHIN_RING in name)
