"""The transport for any backend: messages between two ranks, one grouped call a step, straight from each owner."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Piece, Plan
from ringspan.parallel.streams import Transfer
from ringspan.parallel.transport.base import Transport, slots
from ringspan.parallel.transport.buffers import Rows


class P2PTransport(Transport):
    def __init__(self, pair: RingGroups, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        self.pair, self.device = pair, device

    def fetch(self, index: int, slot: int, into: Rows) -> Transfer:
        gives, takes = self.plan.gives[index], self.plan.steps[index].pieces
        rows = [tuple(x[piece.rows] for x in self.offered) for piece in gives]
        return self._exchange(self.pair.group, gives, rows, takes, slots(takes, into), "K/V")

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        return like.new_empty((rows, *like.shape[1:]))

    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Transfer:
        gives, takes = self.plan.steps[index].pieces, self.plan.gives[index]
        return self._exchange(self.pair.gradients, gives, slots(gives, (part,)), takes, slots(takes, (into,)), "dK/dV")

    def _exchange(
        self,
        group: dist.ProcessGroup,
        gives: list[Piece],
        given: list[Rows],
        takes: list[Piece],
        taken: list[Rows],
        name: str,
    ) -> Transfer:
        """As `dist.batch_isend_irecv`, whose checks of each message take longer than to post it."""
        if not gives and not takes:
            return lambda: None
        # what goes out first: where a rank is gone, to post a receipt from it is an error, and the others get what is theirs
        ways = ((group.send, gives, given, f"{name} to reach rank "), (group.recv, takes, taken, f"{name} from rank "))
        peers = [f"{way}{self.pair.ranks[piece.rank]}" for _, pieces, _, way in ways for piece in pieces]
        everyone = ", ".join(dict.fromkeys(peers))
        works: list[tuple[dist.Work, str]] = []

        def post() -> None:
            grouped = group._get_backend(self.device).supports_coalescing  # NCCL: one call, and one work for all
            if grouped:
                group._start_coalescing(self.device)
            for call, pieces, tensors, way in ways:
                posted: Counter[int] = Counter()  # tags keep the messages of a call apart, their order those of several
                for piece, rows in zip(pieces, tensors, strict=True):
                    for tensor in rows:
                        work = call([tensor], piece.rank, posted[piece.rank])
                        posted[piece.rank] += 1
                        if not grouped:
                            works.append((work, f"{way}{self.pair.ranks[piece.rank]}"))
            if grouped:
                works.append((group._end_coalescing(self.device), everyone))

        def finish() -> None:
            for work, what in reversed(works):  # what comes in is missed first
                progress.wait(work.wait, what, self.pair.seconds)

        progress.wait(post, everyone, self.pair.seconds)
        return finish
