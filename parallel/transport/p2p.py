"""P2P transport: send/recv between two ranks, for any backend. One grouped call per step, directly from each owner rank."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Piece, Plan
from ringspan.parallel.transport.base import Transport, split_by_piece
from ringspan.parallel.transport.buffers import Rows
from ringspan.parallel.transport.streams import Wait

# NCCL's kernel starts some microseconds after the work that it waits for. Without a pause, an attention kernel on the caller's
# stream starts before it and occupies all SMs, and the transfer begins only when that kernel ends. 10,000 cycles are 5 µs;
# 2,000 are too few on an H200 (docs/results/ring-p2p-pause-h200.json).
PAUSE_CYCLES = 10_000


class P2PTransport(Transport):
    def __init__(self, groups: RingGroups, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        self.groups, self.device = groups, device

    def fetch(self, index: int, slot: int, recv_buffers: Rows) -> Wait:
        sends, receives = self.plan.sends[index], self.plan.steps[index].pieces
        send_rows = [tuple(x[piece.rows] for x in self.published) for piece in sends]
        return self._exchange(self.groups.group, sends, send_rows, receives, split_by_piece(receives, recv_buffers), "K/V")

    def return_gradients(self, index: int, slot: int, send_buffer: Tensor, recv_buffer: Tensor) -> Wait:
        sends, receives = self.plan.steps[index].pieces, self.plan.sends[index]
        send_rows, recv_rows = split_by_piece(sends, (send_buffer,)), split_by_piece(receives, (recv_buffer,))
        return self._exchange(self.groups.gradient_group, sends, send_rows, receives, recv_rows, "dK/dV")

    def _exchange(
        self,
        group: dist.ProcessGroup,
        sends: list[Piece],
        send_rows: list[Rows],
        receives: list[Piece],
        recv_rows: list[Rows],
        name: str,
    ) -> Wait:
        """Post one step's messages like dist.batch_isend_irecv, without its checks, which take longer than posting."""
        if not sends and not receives:
            return lambda: None
        # Sends are posted first: posting a receive from a dead rank raises, and the peers must still get their rows.
        directions = (
            (group.send, sends, send_rows, f"{name} to reach rank "),
            (group.recv, receives, recv_rows, f"{name} from rank "),
        )
        works: list[tuple[dist.Work, str]] = []
        awaited = ""  # the transfer that is being posted

        def post() -> None:
            nonlocal awaited
            is_grouped = group._get_backend(self.device).supports_coalescing  # NCCL: one call and one work for all messages
            if is_grouped:
                group._start_coalescing(self.device)
            transfers = []
            for call, pieces, piece_rows, label in directions:
                num_posted: Counter[int] = Counter()  # tags tell apart the messages of a call; their order, those of calls
                for piece, rows in zip(pieces, piece_rows, strict=True):
                    awaited = f"{label}{self.groups.ranks[piece.rank]}"
                    transfers.append(awaited)
                    for tensor in rows:
                        work = call([tensor], piece.rank, num_posted[piece.rank])
                        num_posted[piece.rank] += 1
                        if not is_grouped:
                            works.append((work, awaited))
            if is_grouped:
                awaited = ", ".join(dict.fromkeys(transfers))
                works.append((group._end_coalescing(self.device), awaited))
                if self.device.type == "cuda":
                    torch.cuda._sleep(PAUSE_CYCLES)

        def wait() -> None:
            for work, transfer in reversed(works):  # receives first: a missing one names the rank that is late
                progress.wait(work.wait, transfer, self.groups.timeout_s)

        progress.wait(post, lambda: awaited, self.groups.timeout_s)
        return wait
