"""The ring as an operator: what moves and when, compile, checkpointing, stale buffers, bits and accuracy."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ringspan import Layout, Mask
from ringspan.parallel.coordination import process_groups
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import make_plan
from ringspan.parallel.transport.buffers import new_rows
from ringspan.parallel.transport.p2p import P2PTransport
from ringspan.parallel.transport.select import AUTO, COPIED, TRANSPORTS, choose_transport
from tests.conftest import HAS_GPU
from tests.parallel import jobs
from tests.parallel.work import RingCase

CAUSAL = dict(causal=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_blocks_moved(kind: str, ranks: int, pools) -> None:
    """P − 1 blocks forward and none in a recompute; a backward moves them again, and as many gradients home."""
    case = RingCase("moved", kind=kind, ring=ranks, length=32, options={})
    for counts in pools(ranks)(jobs.blocks_moved, case):
        assert counts["forward"] == counts["forward, checkpointed"] == (ranks - 1, 0)
        assert counts["backward"] == counts["backward, checkpointed"] == (ranks - 1, ranks - 1)


def test_a_window_moves_its_neighbours_only(pools) -> None:
    case = RingCase("moved", kind="contiguous", ring=4, length=32, mask=dict(causal=True, window=5))
    counts = pools(4)(jobs.blocks_moved, case)
    assert [c["forward"] for c in counts] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert [c["backward"] for c in counts] == [(0, 1), (1, 1), (1, 1), (1, 0)]


def test_ulysses_recomputes_nothing(pools) -> None:
    for counts in pools(4)(jobs.blocks_moved, RingCase("moved", ring=2, ulysses=2, length=32, mask=CAUSAL)):
        assert counts["backward, checkpointed"] == counts["backward"] == (1, 1)


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("mask", [CAUSAL, dict(causal=True, documents=[0] * 10 + [1] * 11)], ids=["causal", "documents"])
def test_compiles_as_one_graph(ring: int, ulysses: int, mask: dict, pools) -> None:
    case = RingCase("compiled", ring=ring, ulysses=ulysses, length=21, mask=mask, options=dict(dropout=0.2, seed=3))
    for errors in pools(ring * ulysses)(jobs.compiled, case):
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
def test_two_backwards_in_a_row(transport: str, pools) -> None:
    case = RingCase("twice", ring=4, length=37, mask=CAUSAL, transport=transport)
    for errors in pools(4)(jobs.two_backwards, case):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("ring, ulysses", [(4, 1), (2, 2)])
def test_five_runs_are_bit_equal(ring: int, ulysses: int, pools) -> None:
    options = dict(deterministic=True, dropout=0.1, seed=1)
    case = RingCase("bits", ring=ring, ulysses=ulysses, mask=CAUSAL, dtype=torch.bfloat16, backend="chunked", options=options)
    assert pools(4)(jobs.bit_equal, case) == [True] * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bf16_loses_nothing_on_more_ranks(ranks: int, pools) -> None:
    """RMS error of the ring ≤ 1.05 × that of one call (DESIGN: the ring rule)."""
    case = RingCase("rms", ring=ranks, length=512, heads=(2, 1), widths=(32, 32), mask=CAUSAL)
    for found in pools(ranks)(jobs.rms_against_one, replace(case, dtype=torch.bfloat16, backend="chunked")):
        for name, (many, one) in found.items():
            assert 0 < many <= 1.05 * one, f"{name}: {many:.3e} on {ranks} ranks, {one:.3e} on one"


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
def test_the_portable_kernels_read_what_travelled(transport: str, pools) -> None:
    """Triton, interpreted where there is no GPU: packed K/V, slices of rows and heads, dk and dv written afresh."""
    case = RingCase("triton", ring=3, length=29, heads=(4, 2), mask=CAUSAL, transport=transport, part_bytes=0)
    for errors in pools(3)(jobs.gpu_compare, replace(case, dtype=torch.float32, backend="triton"), patience=300):
        assert max(errors.values()) <= 2e-6, errors


HOPPER = RingCase("hopper", length=300, heads=(4, 2), widths=(64, 64), mask=CAUSAL, dtype=torch.bfloat16, backend="hopper")


@pytest.mark.skipif(HAS_GPU, reason="GPUs run the kernels themselves: test_gpu.py")
@pytest.mark.parametrize(
    "case, ring, ulysses, transport",
    [
        (HOPPER, 4, 1, "copy"),
        (replace(HOPPER, heads=(2, 2), widths=(128, 128), part_bytes=0), 2, 1, "copy"),
        (replace(HOPPER, kind="contiguous", mask=dict(causal=True, window=90), sinks=True), 3, 1, "p2p"),
        (
            replace(HOPPER, heads=(4, 1), mask=dict(causal=True, documents=[0] * 100 + [-1] * 30 + [1] * 170)),
            3,
            1,
            "all_gather",
        ),
        (replace(HOPPER, kind="striped", widths=(128, 64), options=dict(softcap=4.0)), 2, 1, "copy_all"),
        (replace(HOPPER, mask={}), 2, 2, "p2p"),
    ],
    ids=["copy", "parts", "window", "documents", "striped", "both"],
)
def test_the_hopper_kernels_in_a_ring(case: RingCase, ring: int, ulysses: int, transport: str, pools) -> None:
    """Their source, on the CPU: what a ring asks of them, and that it loses nothing in bf16."""
    case = replace(case, ring=ring, ulysses=ulysses, transport=transport)
    for found in pools(ring * ulysses)(jobs.over_hopper, jobs.rms_against_one, case):
        for name, (many, one) in found.items():
            assert 0 < many <= 1.05 * one, f"{name}: {many:.3e}, in one call {one:.3e}"


@pytest.mark.skipif(HAS_GPU, reason="GPUs run the kernels themselves: test_gpu.py")
def test_a_deterministic_ring_of_hopper_kernels_is_bit_equal(pools) -> None:
    case = replace(HOPPER, ring=2, transport="copy", options=dict(deterministic=True))
    assert pools(2)(jobs.over_hopper, jobs.bit_equal, case) == [True] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_tokens_at_all(ranks: int, pools) -> None:
    for errors in pools(ranks)(jobs.compare, RingCase("nothing", ring=ranks, length=0, mask=CAUSAL)):
        assert max(errors.values()) == 0


def test_auto_chooses_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(one_host=True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for nbytes in (0, 2**20, 2**33):
        assert choose_transport("auto", pair, cpu, nbytes) == "p2p"
        for backward in (False, True):
            assert choose_transport("auto", pair, cuda, nbytes, backward) == "copy"
            assert choose_transport("auto", SimpleNamespace(one_host=False), cuda, nbytes, backward) not in COPIED
    for name in COPIED:
        assert choose_transport(name, pair, cuda, 0) == name  # forced
        with pytest.raises(ValueError, match=f"{name}' needs CUDA"):
            choose_transport(name, pair, cpu, 0)
        with pytest.raises(ValueError, match="one host"):
            choose_transport(name, SimpleNamespace(one_host=False), cuda, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_transport("auto", pair, cuda, 2**20) == "p2p"
    for name in COPIED:
        with pytest.raises(ValueError, match=f"{name}' needs CUDA"):
            choose_transport(name, pair, cuda, 0)
    for table in AUTO.values():
        limits = [limit for limit, *_ in table]
        assert all(set(kinds) <= set(TRANSPORTS[1:]) and len(kinds) == 2 for _, *kinds in table)
        assert limits[-1] is None and None not in limits[:-1] and limits[:-1] == sorted(limits[:-1])


def test_auto_leaves_copy_engines_where_nobody_has_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_transport("auto", SimpleNamespace(one_host=True), torch.device("cuda"), 2**20) == "p2p"


@pytest.mark.parametrize("gpus, reach, shared", [(2, True, True), (2, False, False), (1, True, False)])
def test_gpus_that_do_not_reach_each_other_share_no_host(
    gpus: int, reach: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a rank that sees its own GPU only: it cannot know, and two of them may both be number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reach)
    hosts = []
    for rank in range(2):
        monkeypatch.setattr("os.getpid", lambda rank=rank: 100 + rank)
        hosts.append(process_groups._host(torch.device("cuda", rank % gpus)))
    assert (hosts[0] == hosts[1]) is shared
    assert process_groups._host(torch.device("cpu")) == process_groups._host(torch.device("cpu"))


def test_auto_says_what_it_chose_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in each layer of each step."""
    monkeypatch.setenv("RINGSPAN_LOG", "1")
    for nbytes in (3 * 2**20, 3 * 2**20, 7 * 2**20):
        for backward in (False, True):
            choose_transport("auto", SimpleNamespace(one_host=True), torch.device("cpu"), nbytes, backward)
    assert capsys.readouterr().err.splitlines() == [
        f"ringspan: the ring's {way} moves {size}.0 MiB a rank by p2p (cpu)"
        for size in (3, 7)
        for way in ("forward", "backward")
    ]


@pytest.mark.parametrize("mask", [CAUSAL, dict(causal=True, documents=[0] * 7 + [1] * 9)], ids=["causal", "documents"])
def test_a_mask_is_planned_once_for_all_layers(mask: dict, pools) -> None:
    """The backward's steps are other ones from four ranks on, made of the same."""
    assert pools(4)(jobs.looked_at, mask) == [(1, 2)] * 4


class _Group:
    """A process group that groups calls, as NCCL's does, and writes down what it is told."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def _get_backend(self, device: torch.device) -> "_Group":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.told.append(("start",))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(("recv", peer, tag, *(x.data_ptr() for x in tensors)))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.told.append(("send", peer, tag, *(x.data_ptr() for x in tensors)))

    def _end_coalescing(self, device: torch.device) -> SimpleNamespace:
        self.told.append(("end",))
        return SimpleNamespace(wait=lambda: self.told.append(("wait",)))


def test_a_step_is_one_grouped_call_straight_from_k_and_v() -> None:
    group, gradients = _Group(), _Group()
    plan = make_plan(Layout("zigzag", 32, 4), Mask(causal=True), rank=1)
    transport = P2PTransport(RingGroups(group, gradients, True, [0, 1, 2, 3], 1.0), plan, torch.device("cpu"))
    k, v = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)
    transport.publish_kv(k, v)
    rows = new_rows(plan.steps[1].num_keys, k, v)
    transport.fetch(1, 0, rows)()
    taken = [("recv", 0, tag, x.data_ptr()) for tag, x in enumerate(rows)]
    given = [("send", 2, tag, x.data_ptr()) for tag, x in enumerate((k, v))]
    assert group.told == [("start",), *given, *taken, ("end",), ("wait",)]
    assert gradients.told == []
