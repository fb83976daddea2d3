"""The ring, Ulysses and both together equal the reference in fp64, on 1 to 8 gloo ranks; and the order of launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.parallel import gradient_return, ring
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.streams import SideStream, Wait
from ringspan.parallel.transport import select
from ringspan.parallel.transport.base import SingleRankTransport
from tests.parallel.helpers import jobs, work
from tests.parallel.helpers.ring_cases import EXACT, ring_cases

MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("ring, ulysses", MESHES)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_equals_the_reference(kind: str, ring: int, ulysses: int, pools) -> None:
    if kind == "striped" and ulysses > 1:
        with pytest.raises(ValueError, match="zigzag"):
            Layout(kind, 37, ring * ulysses, ulysses)
        return
    pool = pools(ring * ulysses)
    for case in ring_cases(kind, ring, ulysses):
        for rank, errors in enumerate(pool(work.compare, case)):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"{case} on rank {rank}: {wrong}"


def test_backward_of_ranks_without_tokens_and_with_padding(pools) -> None:
    assert max(pools(4)(jobs.compare_backward_without_tokens)) < 1e-5


class LaunchLog:
    """Kernel launches of a ring: the stream of each, and the number of kernels that the caller had not waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, int]] = []
        self.num_awaited = 0
        self.stream = "caller"
        self.priorities: dict[str, int] = {}
        log = self

        class NamedSideStream(SideStream):
            def __init__(self, device: torch.device, name: str, priority: int = -3) -> None:
                super().__init__(device, name, priority)
                self.name = name
                log.priorities[name] = priority

            @contextmanager
            def run(self) -> Iterator[None]:  # type: ignore[override]
                log.stream = self.name
                yield
                log.stream = "caller"

            def completion(self) -> Wait:
                num_launched = len(log.launches)

                def wait() -> None:
                    if log.stream == "caller":
                        log.num_awaited = num_launched

                return wait if "kernels" in self.name else super().completion()

        for module in (ring, gradient_return):
            monkeypatch.setattr(module, "SideStream", NamedSideStream)

    def launch(self) -> None:
        self.launches.append((self.stream, len(self.launches) - self.num_awaited))


def plan_of_steps(steps: int) -> Plan:
    return make_plan(Layout("zigzag", 8 * (steps + 1), steps + 1), Mask(causal=True), rank=min(1, steps))


@pytest.mark.parametrize("needs_sms", [False, True])
@pytest.mark.parametrize("is_atomic", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 2**28])
@pytest.mark.parametrize("steps", [1, 3])
def test_launch_order_of_a_backward(
    needs_sms: bool, is_atomic: bool, part_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local block is first and last. A kernel is launched before the previous one has completed.

    Not so if transfers need SMs, or if kernels do not add to dq atomically.
    """
    log, plan = LaunchLog(monkeypatch), plan_of_steps(steps)
    kernels: list[tuple[bool, int]] = []  # whether it is the local block's, number of query heads

    def kernel(dout: torch.Tensor, *args: Any, **_: Any) -> None:
        kernels.append((args[7] == plan.steps[0].k_at, dout.shape[2]))
        log.launch()

    monkeypatch.setattr(ring, "adds_dq_atomically", lambda *_, **__: is_atomic)
    monkeypatch.setattr(ring, "block_backward", kernel)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    transport = SingleRankTransport(plan)
    transport.needs_sms = needs_sms
    q, k, v, out = (torch.zeros(1, 8, 4, 16) for _ in range(4))
    row = out.new_zeros(1, 4, 8)  # delta and lse
    ring.ring_backward(out, row, q, k, v, row, Mask(causal=True), transport, 0, backend="reference")
    parts, heads = (1, 4) if part_bytes else (4, 1)
    assert kernels == [(True, 2), *[(False, heads)] * parts * steps, (True, 2)]
    if is_atomic and not needs_sms:
        remote = [(("kernels 1", "kernels 0")[n % 2], 1) for n in range(parts * steps)]
        assert log.launches == [("kernels 0", 0), *remote, ("filler", 2)]
        priorities = log.priorities
        assert priorities["kernels 0"] == priorities["kernels 1"] < priorities["sums"] < priorities["filler"] == 0
    else:
        assert {stream for stream, _ in log.launches} == {"caller"}
        assert log.priorities == {"sums": 0}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "kind, rank, forward, backward", [("contiguous", 0, 1, 2), ("contiguous", 1, 3, 2), ("zigzag", 1, 3, 3)]
)
def test_a_short_window_has_few_kernels(
    kind: str, rank: int, forward: int, backward: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches each for longer than it runs.

    Forward: rows with remote keys twice, the others once. Backward: local keys with remote queries, the others, remote keys.
    """
    rows: dict[str, list[int]] = {"block_forward": [], "block_backward": []}
    monkeypatch.setattr(ring, "block_forward", lambda q, *_, **__: rows["block_forward"].append(q.shape[1]))
    monkeypatch.setattr(
        ring, "block_backward", lambda dout, q, k, *_, **__: rows["block_backward"].append((q.shape[1], k.shape[1]))
    )
    monkeypatch.setattr(ring, "adds_dq_atomically", lambda *_, **__: True)
    n, ids = 2**15, torch.arange(2**16) // 5000
    mask = Mask(causal=True, window=128, documents=ids if documents else None)
    transport = SingleRankTransport(make_plan(Layout(kind, 2 * n, 2), mask, rank))
    transport.needs_sms = False
    q, k = torch.empty(1, n, 4, 1), torch.empty(1, n, 2, 1)
    lse = q.new_empty(1, 4, n)
    ring.ring_forward(q, k, k, mask, transport, None, 0, backend="reference")
    ring.ring_backward(q, lse, q, k, k, lse, mask, transport, 0, backend="reference")
    assert len(rows["block_forward"]) == forward and len(rows["block_backward"]) == backward
    assert sum(rows["block_forward"]) == n + (128 if forward > 1 else 0)
    assert sum(num_keys for _, num_keys in rows["block_backward"]) == n + (128 if backward > 2 or rank else 0)


def test_rules_of_documents_on_a_gpu_are_read_without_a_copy() -> None:
    """A copy to the CPU waits for the GPU. One from "meta" would raise."""
    mask = Mask.from_bounds(Mask(causal=True, window=3, documents=[0, 0, 1, 1, 1, 1, 1, 1]).bounds("meta"))
    assert ring.equivalent_rows(8, mask) == (8 * 3) ** 0.5


@pytest.mark.parametrize(
    "splits_heads, changes",
    [
        (True, {}),
        (False, dict(needs_sms=True)),
        (False, dict(kv_heads=1)),
        (False, dict(split_heads_above=32)),
        (False, dict(steps=0)),
    ],
    ids=str,
)
def test_launch_order_of_a_forward(splits_heads: bool, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of half of the heads is launched before the other half's, and the previous step's, have completed.

    Heads are split if there are several, if kernels are long, and if transfers need no SMs.
    """
    setting = dict(needs_sms=False, kv_heads=3, split_heads_above=31, steps=3) | changes
    log, plan = LaunchLog(monkeypatch), plan_of_steps(setting["steps"])
    heads: list[int] = []

    def kernel(q: torch.Tensor, *_: Any, **__: Any) -> None:
        heads.append(q.shape[2])
        log.launch()

    monkeypatch.setattr(ring, "block_forward", kernel)
    monkeypatch.setattr(ring, "SPLIT_HEADS_ABOVE", setting["split_heads_above"])
    transport = SingleRankTransport(plan)
    transport.needs_sms = bool(setting["needs_sms"])
    q, k = torch.zeros(1, 8, 2 * setting["kv_heads"], 16), torch.zeros(1, 8, setting["kv_heads"], 16)
    ring.ring_forward(q, k, k, Mask(causal=True), transport, None, 0, backend="reference")
    if splits_heads:
        assert heads == [2, 4] * 4
        assert log.launches == [("kernels 0", 0), ("kernels 1", 1), *[("kernels 0", 2), ("kernels 1", 3)] * 3]
        assert log.priorities["kernels 0"] == log.priorities["kernels 1"]
    else:
        assert heads == [q.shape[2]] * (setting["steps"] + 1)
        assert {stream for stream, _ in log.launches} == {"caller"}
