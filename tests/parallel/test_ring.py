"""The ring, Ulysses and both together equal the reference in fp64, forward and all gradients, on 1 to 8 gloo ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.parallel import gradient_return, ring
from ringspan.parallel.gradient_return import Arrival, GradientReturn
from ringspan.parallel.plan import Piece, Plan, make_plan
from ringspan.parallel.ring import halves
from ringspan.parallel.streams import SideStream, Transfer
from ringspan.parallel.transport import select
from ringspan.parallel.transport.base import SingleRankTransport
from ringspan.parallel.transport.buffers import in_one_piece, unpack
from ringspan.parallel.transport.gpu_signals import GRADS_READ, GRADS_READY, KV_WRITTEN, SLOT_FREE
from tests.parallel import jobs, work
from tests.parallel.work import RingCase

MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 2), (2, 4)]
EXACT = 1e-12


def packed(*lengths: int) -> list[int]:
    """Ids of documents in a row; a negative length is padding."""
    return [i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n))]


def cases(kind: str, ring: int, ulysses: int) -> list[RingCase]:
    """Every mask; heads, lengths, transports and options differ from one to the next."""
    heads = 12 if ulysses == 3 else 8
    mha, gqa, mqa = (heads, heads), (heads, heads // 2), (heads, 1)
    n = Layout(kind, 37, ring * ulysses, ulysses).local_length
    borders = packed(*(min(n, 37 - start) for start in range(0, 37, n)))  # every shard its own document, if contiguous
    everything = dict(softcap=3.0, dropout=0.3, seed=2**40 + 5)
    plain = [
        RingCase("full", length=37, heads=gqa, batch=2),
        RingCase("causal", length=37, heads=mha, mask=dict(causal=True)),
        RingCase("causal", length=64, heads=mqa, mask=dict(causal=True), transport="all_gather"),
        RingCase("causal", length=1, heads=gqa, mask=dict(causal=True), sinks=True),
        RingCase("causal-parts", length=41, heads=mha, mask=dict(causal=True), part_bytes=0, widths=(16, 24)),
        RingCase("full-all", length=43, heads=gqa, transport="all_gather", sinks=True, options=everything, batch=2),
        RingCase("window", heads=gqa, mask=dict(causal=True, window=6)),
        RingCase("window-wide", length=50, heads=mqa, mask=dict(causal=True, window=29), sinks=True),
        RingCase("window-both", heads=mha, mask=dict(window=(3, 7)), transport="all_gather"),
        RingCase("window-both", length=53, heads=mqa, mask=dict(window=9)),
        RingCase("documents-across", heads=gqa, mask=dict(causal=True, documents=packed(5, 1, 17, 14)), options=everything),
        RingCase("documents-at-borders", heads=mqa, mask=dict(causal=True, documents=borders), batch=2, sinks=True),
        RingCase("documents-full", heads=mha, mask=dict(documents=packed(11, 26)), transport="all_gather"),
        RingCase("documents-batch", heads=gqa, batch=2, mask=dict(documents=[packed(20, 17), packed(-9, 28)], causal=True)),
        RingCase("empty-rank", heads=gqa, mask=dict(causal=True, documents=packed(-min(n, 36), max(37 - n, 1))), sinks=True),
        RingCase("empty-tail", heads=mqa, mask=dict(documents=packed(max(37 - n, 1), -min(n, 36))), transport="all_gather"),
        RingCase("all-padding", heads=gqa, mask=dict(causal=True, documents=packed(-37)), sinks=True),
        RingCase("prefix", heads=mqa, mask=dict(causal=True, prefix=15), options=everything),
        RingCase("prefix-batch", heads=gqa, batch=2, mask=dict(causal=True, prefix=[3, 30])),
        RingCase("chunked", length=61, heads=gqa, mask=dict(causal=True), backend="chunked", options=everything, batch=2),
    ]
    if ring in (2, 3) and kind != "striped":  # most of the own block goes apart from what others' blocks concern
        length = 132 * ring - 3
        plain += [
            RingCase("window-narrow", length=length, heads=gqa, mask=dict(causal=True, window=6), sinks=True),
            RingCase(
                "window-narrow-both", length=length, heads=mqa, mask=dict(window=(3, 4)), options=everything, widths=(16, 24)
            ),
        ]
    return [replace(case, kind=kind, ring=ring, ulysses=ulysses) for case in plain]


@pytest.mark.parametrize("ring, ulysses", MESHES)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_equals_the_reference(kind: str, ring: int, ulysses: int, pools) -> None:
    if kind == "striped" and ulysses > 1:
        with pytest.raises(ValueError, match="zigzag"):
            Layout(kind, 37, ring * ulysses, ulysses)
        return
    ranks = pools(ring * ulysses)
    for case in cases(kind, ring, ulysses):
        for rank, errors in enumerate(ranks(work.compare, case)):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"{case} on rank {rank}: {wrong}"


@pytest.mark.parametrize(
    "ring, ulysses, transport",
    [(2, 1, "copy"), (4, 1, "copy"), (8, 1, "copy"), (2, 2, "copy"), (3, 1, "copy_all"), (4, 1, "copy_all")],
)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_copy_engines_equal_the_reference(kind: str, ring: int, ulysses: int, transport: str, pools) -> None:
    """The copy engines' transport over memory that processes share: who brings what, where to, and behind which signal."""
    if kind == "striped" and ulysses > 1:
        pytest.skip("striped has no Ulysses")
    for case in cases(kind, ring, ulysses):
        for rank, errors in enumerate(pools(ring * ulysses)(jobs.compare_copying, replace(case, transport=transport))):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"{case} on rank {rank}: {wrong}"


@pytest.mark.parametrize("transport", ["copy", "copy_all"])
def test_copies_of_ranks_that_are_ahead(transport: str, pools) -> None:
    case = RingCase("haste", ring=4, transport=transport, mask=dict(causal=True))
    assert max(pools(4)(jobs.copy_in_haste, case)) <= EXACT


@pytest.mark.parametrize("transport", ["copy", "copy_all"])
def test_copies_go_on_after_an_error(transport: str, pools) -> None:
    case = RingCase("error", ring=4, transport=transport, mask=dict(causal=True))
    assert max(pools(4)(jobs.copy_after_an_error, case)) <= EXACT


def test_a_step_waits_for_those_it_concerns_alone(pools) -> None:
    """For its owners' rows, and for each reader's free place by itself; gradients likewise."""
    for counts in pools(4)(jobs.waits, RingCase("waits", ring=4, transport="copy", mask=dict(causal=True))):
        assert counts["forward"] == {SLOT_FREE: [1, 1, 1], KV_WRITTEN: [1, 2]}
        assert counts["backward"] == {SLOT_FREE: [1, 1, 1], KV_WRITTEN: [2, 1], GRADS_READ: [2, 1], GRADS_READY: [2, 1]}
    window = RingCase("window", ring=4, kind="contiguous", transport="copy", mask=dict(causal=True, window=2))
    for rank, counts in enumerate(pools(4)(jobs.waits, window)):
        owners, readers = [int(rank > 0)], [int(rank < 3)]
        free = {SLOT_FREE: [1]} if rank < 3 else {}
        assert counts["forward"] == free | {KV_WRITTEN: owners}
        assert counts["backward"] == free | {KV_WRITTEN: owners, GRADS_READ: owners, GRADS_READY: readers}


@pytest.mark.parametrize("width, begin, large", [(16, 0, True), (24, 0, True), (20, 0, False), (16, 2, False)])
def test_heads_are_copied_in_large_numbers(width: int, begin: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they begin and end at multiples of 16 bytes; and what is in one piece stays where it is."""
    heads = torch.randn(5, 1, 4, width + begin).bfloat16()[:, :, 1:3, begin:]
    copied: list[torch.dtype] = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copied.append(x.dtype) or contiguous(x))
    piece = in_one_piece(heads)
    assert copied == [torch.complex128 if large else torch.bfloat16]
    assert piece.is_contiguous() and torch.equal(piece, heads) and in_one_piece(piece) is piece


class Returns(SingleRankTransport):
    """What other ranks return."""

    def give(self, index: int, which: int, part: torch.Tensor, into: torch.Tensor) -> Transfer:
        return lambda: into.copy_(torch.randn_like(into))


@pytest.mark.parametrize("heads, parts", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("num_keys", [0, 5, 8])
@pytest.mark.parametrize(
    "places",
    [
        [[]],
        [[slice(0, 4)]],
        [[slice(2, 5), slice(6, 8)]],
        [[slice(0, 8)] * 4],
        [[], [slice(0, 4)]],
        [[slice(0, 4)], [slice(0, 8)]],
        [[slice(0, 4), slice(0, 8)], []],
        [[slice(0, 8)] * 4, [slice(2, 4), slice(0, 8)], [slice(5, 8)]],
    ],
)
def test_what_comes_home_is_added_to_what_a_kernel_made(
    heads: int, num_keys: int, parts: int, places: list[list[slice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the last kernel is at work only the free region becomes dk and dv; then the other, with what the kernel left."""
    rows, width = 8, 3
    free, last = halves(heads, num_keys, rows)
    _, its = halves(heads, num_keys, num_keys)  # padding has no gradients
    # what the kernels of the own block left, and are yet to leave; nobody may look at the rest
    mine = torch.full((rows, 1, heads, 2 * width), torch.nan)
    mine[free[1], :, free[0]] = torch.randn_like(mine[free[1], :, free[0]])
    mine[num_keys:] = 0
    right = torch.randn(its[1].stop - its[1].start, 1, its[0].stop - its[0].start, 2 * width)
    expected = mine.clone()
    expected[last[1], :, last[0]] = 0
    expected[its[1], :, its[0]] = right
    gives = [[Piece(0, at, 0) for at in its] for its in places]
    home = GradientReturn(
        Returns(Plan([], gives, 0, [], slice(0, 0), [], [])), mine, [slice(0, 8)], free, last, parts, width, "reference"
    )
    arrived = home._arrived

    def watched(arrival: Arrival) -> list[tuple[slice, torch.Tensor]]:
        came = arrived(arrival)
        for at, more in came:
            expected[at, :, arrival.heads] += more
        return came

    monkeypatch.setattr(home, "_arrived", watched)
    for index in range(len(places)):
        for of in home.head_parts():
            home.send(index, of, mine[:0, :, of])
    grads = tuple(torch.full((1, rows, heads, width), torch.nan) for _ in range(2))
    own = torch.full_like(right, torch.inf)

    def done() -> None:
        for grad in grads:
            assert grad[:, last[1], last[0]].isnan().all() and grad[:, free[1], free[0]].isfinite().all()
        own.copy_(right)

    home.finish(own, done, *grads)
    for grad, wanted in zip(grads, unpack(expected, width), strict=True):
        torch.testing.assert_close(grad, wanted)


class Given:
    """Kernels that a ring gave: on which stream, and how many others were being waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[tuple[str, int]] = []
        self.ended = 0
        self.stream = "caller's"
        self.priorities: dict[str, int] = {}
        given = self

        class Named(SideStream):
            def __init__(self, device: torch.device, use: str, priority: int = -3) -> None:
                super().__init__(device, use, priority)
                self.use = use
                given.priorities[use] = priority

            @contextmanager
            def run(self) -> Iterator[None]:  # type: ignore[override]
                given.stream = self.use
                yield
                given.stream = "caller's"

            def done(self) -> Transfer:
                number = len(given.kernels)

                def wait() -> None:
                    if given.stream == "caller's":
                        given.ended = number

                return wait if "kernels" in self.use else super().done()

        for module in (ring, gradient_return):
            monkeypatch.setattr(module, "SideStream", Named)

    def kernel(self) -> None:
        self.kernels.append((self.stream, len(self.kernels) - self.ended))


def plan_of(steps: int) -> Plan:
    return make_plan(Layout("zigzag", 8 * (steps + 1), steps + 1), Mask(causal=True), rank=min(1, steps))


@pytest.mark.parametrize("needs_sms", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 2**28])
@pytest.mark.parametrize("steps", [1, 3])
def test_when_a_backward_gives_kernels(
    needs_sms: bool, in_memory: bool, part_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own block's first and last; each before the one ahead of it has ended, unless transfers would stand behind it, or
    kernels must not meet."""
    given, plan = Given(monkeypatch), plan_of(steps)
    what: list[tuple[bool, int]] = []  # whether it is the own block's, and how many heads

    def kernel(dout: torch.Tensor, *args: Any, **_: Any) -> None:
        what.append((args[7] == plan.steps[0].k_at, dout.shape[2]))
        given.kernel()

    monkeypatch.setattr(ring, "adds_in_memory", lambda *_, **__: in_memory)
    monkeypatch.setattr(ring, "block_backward", kernel)
    monkeypatch.setattr(select, "PART_BYTES", part_bytes)
    transport = SingleRankTransport(plan)
    transport.needs_sms = needs_sms
    q, k, v, out = (torch.zeros(1, 8, 4, 16) for _ in range(4))
    ring.ring_backward(out, None, q, k, v, out, out.new_zeros(1, 4, 8), Mask(causal=True), transport, 0, backend="reference")
    parts, heads = (1, 4) if part_bytes else (4, 1)
    assert what == [(True, 2), *[(False, heads)] * parts * steps, (True, 2)]
    if in_memory and not needs_sms:
        others = [(("more kernels", "kernels")[n % 2], 1) for n in range(parts * steps)]
        assert given.kernels == [("kernels", 0), *others, ("filling", 2)]
        priorities = given.priorities
        assert priorities["kernels"] == priorities["more kernels"] < priorities["sums"] < priorities["filling"] == 0
    else:
        assert {stream for stream, _ in given.kernels} == {"caller's"}
        assert given.priorities == {"sums": 0}


@pytest.mark.parametrize(
    "in_two, changes",
    [
        (True, {}),
        (False, dict(needs_sms=True)),
        (False, dict(kv_heads=1)),
        (False, dict(long=32)),
        (False, dict(steps=0)),
    ],
    ids=str,
)
def test_when_a_forward_gives_kernels(in_two: bool, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of half of the heads before the other half's, and those of the step before, have ended; if there are halves, and
    kernels are long, and transfers do not stand behind them."""
    how = dict(needs_sms=False, kv_heads=3, long=31, steps=3) | changes
    given, plan = Given(monkeypatch), plan_of(how["steps"])
    heads: list[int] = []

    def kernel(q: torch.Tensor, *_: Any, **__: Any) -> None:
        heads.append(q.shape[2])
        given.kernel()

    monkeypatch.setattr(ring, "block_forward", kernel)
    monkeypatch.setattr(ring, "LONG", how["long"])
    transport = SingleRankTransport(plan)
    transport.needs_sms = bool(how["needs_sms"])
    q, k = torch.zeros(1, 8, 2 * how["kv_heads"], 16), torch.zeros(1, 8, how["kv_heads"], 16)
    ring.ring_forward(q, k, k, Mask(causal=True), transport, None, 0, backend="reference")
    if in_two:
        assert heads == [2, 4] * 4
        assert given.kernels == [("kernels", 0), ("more kernels", 1), *[("kernels", 2), ("more kernels", 3)] * 3]
        assert given.priorities["kernels"] == given.priorities["more kernels"]
    else:
        assert heads == [q.shape[2]] * (how["steps"] + 1)
        assert {stream for stream, _ in given.kernels} == {"caller's"}


def test_ranks_without_tokens_have_a_backward_where_documents_have_padding(pools) -> None:
    assert max(pools(4)(jobs.backward_without_tokens)) < 1e-5
