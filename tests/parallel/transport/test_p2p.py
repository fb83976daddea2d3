"""P2P transport: the messages of a step."""

from types import SimpleNamespace

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import make_plan
from ringspan.parallel.transport.buffers import new_rows
from ringspan.parallel.transport.p2p import P2PTransport


class RecordingGroup:
    """Process group that supports grouped calls, like NCCL's, and records its calls."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def _get_backend(self, device: torch.device) -> "RecordingGroup":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("start",))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer, tag, *(x.data_ptr() for x in tensors)))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", peer, tag, *(x.data_ptr() for x in tensors)))

    def _end_coalescing(self, device: torch.device) -> SimpleNamespace:
        self.calls.append(("end",))
        return SimpleNamespace(wait=lambda: self.calls.append(("wait",)))


def test_a_step_is_one_grouped_call_without_copies() -> None:
    group, gradient_group = RecordingGroup(), RecordingGroup()
    plan = make_plan(Layout("zigzag", 32, 4), Mask(causal=True), rank=1)
    transport = P2PTransport(RingGroups(group, gradient_group, True, [0, 1, 2, 3], 1.0), plan, torch.device("cpu"))
    k, v = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)
    transport.publish_kv(k, v)
    rows = new_rows(plan.steps[1].num_keys, k, v)
    transport.fetch(1, 0, rows)()
    receives = [("recv", 0, tag, x.data_ptr()) for tag, x in enumerate(rows)]
    sends = [("send", 2, tag, x.data_ptr()) for tag, x in enumerate((k, v))]
    assert group.calls == [("start",), *sends, *receives, ("end",), ("wait",)]
    assert gradient_group.calls == []


def test_nccl_may_start_before_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RecordingGroup()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: group.calls.append(("pause", cycles > 0)))
    plan = make_plan(Layout("zigzag", 32, 4), Mask(causal=True), rank=1)
    transport = P2PTransport(RingGroups(group, group, True, [0, 1, 2, 3], 1.0), plan, torch.device("cuda", 0))
    k, v = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)
    transport.publish_kv(k, v)
    transport.fetch(1, 0, new_rows(plan.steps[1].num_keys, k, v))
    send_buffer = transport.send_buffer(0, plan.steps[1].num_keys, torch.zeros(0, 1, 2, 32))
    transport.return_gradients(1, 0, send_buffer, torch.zeros(sum(map(len, plan.sends[1])), 1, 2, 32))
    assert [call[0] for call in group.calls if call[0] not in ("send", "recv")] == ["start", "end", "pause"] * 2
