"""The ring, Ulysses and both together equal the reference in fp64 on 1 to 8 gloo ranks; the overlapped ring equals the ring."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.parallel import ring, ring_overlapped
from ringspan.parallel.plan import make_plan
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


@pytest.mark.parametrize("ring, transport", [(2, "copy"), (3, "copy_all"), (4, "copy"), (8, "copy")])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_overlapped_ring_equals_the_ring(kind: str, ring: int, transport: str, pools) -> None:
    """In fp64, with memory that processes share in place of symmetric memory."""
    for case in ring_cases(kind, ring, 1):
        for rank, errors in enumerate(pools(ring)(jobs.compare_rings, replace(case, transport=transport))):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"{case} on rank {rank}: {wrong}"


def test_rings_are_short() -> None:
    """`ring` is one screen per direction, without streams and with one nested function at most."""
    definition, overlapped = (Path(module.__file__ or "").read_text() for module in (ring, ring_overlapped))
    assert len(definition.splitlines()) <= 120 and len(overlapped.splitlines()) <= 250
    assert "Stream" not in definition and definition.count("\n    def ") <= 1


@pytest.mark.parametrize(
    "changes, overlaps",
    [
        ({}, True),
        (dict(needs_sms=True), False),
        (dict(mask=Mask(documents=torch.tensor([0, 0, -1]))), False),
        (dict(mask=Mask(documents=torch.tensor([0, 0, 1]))), True),
        (dict(atomic=False), False),
        (dict(has_backward=False), False),
        (dict(has_backward=False, rows=2**14), True),
        (dict(has_backward=False, rows=2**13, mask=Mask(causal=True, window=2**12)), True),
        (dict(has_backward=False, rows=2**13, mask=Mask(causal=True, window=2**14)), False),
    ],
    ids=str,
)
def test_overlapped_ring_runs_where_kernels_may_overlap(changes: dict[str, Any], overlaps: bool) -> None:
    """And pays: a short forward without a backward waits for the host."""
    setting: dict[str, Any] = dict(rows=3, needs_sms=False, mask=Mask(causal=True), atomic=True, has_backward=True) | changes
    transport: Any = SimpleNamespace(needs_sms=setting["needs_sms"])
    rules = setting["rows"], setting["mask"], transport, setting["atomic"], setting["has_backward"]
    assert ring_overlapped.choose_ring(*rules) is (ring_overlapped if overlaps else ring)


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
    monkeypatch.setattr(ring_overlapped, "block_forward", lambda q, *_, **__: rows["block_forward"].append(q.shape[1]))
    monkeypatch.setattr(
        ring_overlapped, "block_backward", lambda dout, q, k, *_, **__: rows["block_backward"].append((q.shape[1], k.shape[1]))
    )
    n, ids = 2**15, torch.arange(2**16) // 5000
    mask = Mask(causal=True, window=128, documents=ids if documents else None)
    transport = SingleRankTransport(make_plan(Layout(kind, 2 * n, 2), mask, rank))
    q, k = torch.empty(1, n, 4, 1), torch.empty(1, n, 2, 1)
    lse = q.new_empty(1, 4, n)
    ring_overlapped.ring_forward(q, k, k, mask, transport, None, 0, backend="reference")
    ring_overlapped.ring_backward(q, lse, q, k, k, lse, mask, transport, 0, backend="reference")
    assert len(rows["block_forward"]) == forward and len(rows["block_backward"]) == backward
    assert sum(rows["block_forward"]) == n + (128 if forward > 1 else 0)
    assert sum(num_keys for _, num_keys in rows["block_backward"]) == n + (128 if backward > 2 or rank else 0)


def test_rules_of_documents_on_a_gpu_are_read_without_a_copy() -> None:
    """A copy to the CPU waits for the GPU. One from "meta" would raise."""
    mask = Mask.from_bounds(Mask(causal=True, window=3, documents=[0, 0, 1, 1, 1, 1, 1, 1]).bounds("meta"))
    assert ring_overlapped.equivalent_rows(8, mask) == (8 * 3) ** 0.5
