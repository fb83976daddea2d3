"""The mover for any backend: messages between two ranks, one grouped call a step, straight from each owner."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from . import progress
from .groups import Pair, timeout_of
from .mover import Mover, Transfer, slots
from .packed import new_packed, pack
from .plan import Plan


class Messages(Mover):
    def __init__(self, pair: Pair, plan: Plan, device: torch.device) -> None:
        super().__init__(plan)
        self.pair = pair
        self.seconds = timeout_of(pair.group, device).total_seconds()
        self.published: Tensor | None = None

    def publish(self, k: Tensor, v: Tensor) -> None:
        self.published = pack(k, v, new_packed(k.shape[1], k, v))

    def fetch(self, index: int, into: Tensor) -> Transfer:
        assert self.published is not None
        gives = [(piece.rank, self.published[piece.rows]) for piece in self.plan.gives[index]]
        return self._exchange(self.pair.group, gives, slots(self.plan.steps[index].pieces, into), "K/V")

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        return like.new_empty((rows, *like.shape[1:]))

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        gives = slots(self.plan.steps[index].pieces, part)
        return self._exchange(self.pair.gradients, gives, slots(self.plan.gives[index], into), "dK/dV")

    def _exchange(
        self, group: dist.ProcessGroup, gives: list[tuple[int, Tensor]], takes: list[tuple[int, Tensor]], name: str
    ) -> Transfer:
        ops, peers = [], []
        ranks = dist.get_process_group_ranks(group)
        for call, messages, way in ((dist.irecv, takes, "from"), (dist.isend, gives, "to reach")):
            sent: Counter[int] = Counter()
            for peer, tensor in messages:
                ops.append(dist.P2POp(call, tensor, group=group, group_peer=peer, tag=sent[peer]))
                peers.append(f"{name} {way} rank {ranks[peer]}")
                sent[peer] += 1
        everyone = ", ".join(dict.fromkeys(peers))
        works: list[dist.Work] = []

        def post() -> None:
            works.extend(dist.batch_isend_irecv(ops))

        if ops:
            progress.wait(post, everyone, self.seconds)

        def finish() -> None:
            for i, work in enumerate(works):
                what = peers[i] if len(works) == len(peers) else everyone  # NCCL has one work for all
                progress.wait(work.wait, what, self.seconds)

        return Transfer(finish, everyone, self.seconds, bool(ops) and ops[0].tensor.is_cuda)
