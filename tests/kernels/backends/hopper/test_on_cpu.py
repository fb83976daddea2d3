"""The Hopper kernels' source on a CPU, in orders that a GPU seldom takes; and that what runs it there would find mistakes."""

import random
import threading
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ringspan import Mask, attention
from ringspan.kernels.backends.hopper import arguments as hopper_arguments
from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.backends.hopper.arguments import descriptor
from ringspan.kernels.backends.hopper.common import arrive_each
from ringspan.kernels.bench import tune
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime.launch import Launch
from ringspan.kernels.runtime.triton_compat import tma_load, tma_store
from tests.conftest import HAS_GPU
from tests.kernels.backends.hopper.emulator import Emulated, emulate
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU
from tests.kernels.backends.hopper.emulator.memory import Barrier
from tests.kernels.backends.hopper.emulator.parties import Parties, Stuck
from tests.kernels.backends.test_backends import check_case
from tests.kernels.cases import CASES
from tests.kernels.dense import Case

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU runs the kernels themselves: test_gpu.py")

TAKEN = [case for case in CASES if not case.dropout and (case.scale is None or case.scale > 0)]
MASKS = [case for case in TAKEN if case.width == 32 and case.scale is None]


@pytest.mark.hopper
@pytest.mark.parametrize("case", TAKEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sweep(case: Case, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_case(case, "hopper", dtype, "cpu")


@pytest.mark.parametrize("case", MASKS, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_many_tiles_in_many_orders(case: Case, width: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these head dims has tiles and parties of its own. Seeds are fixed: an order that went wrong once comes again."""
    seed = zlib.crc32(f"{case} {width}".encode())
    emulate(monkeypatch, seed, resident=1 + seed % 4)
    longer = replace(case, width=width, v_width=None).grown(random.Random(seed).choice([2, 3, 5]))
    check_case(longer, "hopper", torch.bfloat16, "cpu")


@pytest.mark.parametrize("cached, pieces", [(2**24, [100, 200]), (2**15, [100, 128, 72]), (1, [100, 128, 72])])
@pytest.mark.parametrize("width, v_width", [(64, 64), (128, 104), (80, 56)])
@pytest.mark.parametrize("last", [True, False])
def test_many_keys_are_gone_through_in_pieces(
    cached: int, pieces: list[int], width: int, v_width: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is hidden. The carry is what it was, unless its lse is written over. Sums in fp32 go out as they are, or
    half of their columns at a time."""
    emulate(monkeypatch)
    monkeypatch.setattr(hopper_arguments, "CACHE", cached)
    given: list[tuple[int, int]] = []
    run = Launch.__call__

    def look(self: Launch) -> Any:
        out = self.tensors["out"]
        given.append((self.tensors["k"].shape[1], out.data_ptr()))
        if width > 64:
            columns = self.worked_out()[1]["out_tiles"].block_shape[3]
            assert columns == max(64, v_width // 64 * 128) * 2 // out.element_size()
        return run(self)

    monkeypatch.setattr(Launch, "__call__", look)
    torch.manual_seed(0)
    sizes = (150, 4, width), (300, 2, width), (300, 2, v_width)
    q, k, v = (torch.randn(1, *size, dtype=torch.bfloat16) for size in sizes)
    carry = torch.randn(1, 150, 4, v_width), torch.randn(1, 4, 150)
    kept = [x.clone() for x in carry]
    where = Mask(causal=True), [(300, 1, 150)], [(100, 2, 100), (0, 1, 100), (101, 2, 100)], carry, last
    out, lse = block_forward(q, k, v, *where, backend="hopper")
    assert [rows for rows, _ in given] == pieces
    expected = block_forward(*(x.float() for x in (q, k, v)), *where, backend="reference")
    assert out.dtype == (torch.bfloat16 if last else torch.float32)
    torch.testing.assert_close(out.float(), expected[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=0)
    assert all(torch.equal(x, y) for x, y in zip(carry, kept, strict=True))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("carried", ["as it is", "in odd rows", "one for all heads"])
def test_sums_have_the_memory_of_a_carry_that_is_written_over(
    backend: str, carried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of queries in the midst of a larger tensor, as in a ring, and of keys; unless no kernel could write there."""
    emulate(monkeypatch)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 128, dtype=torch.float16) for rows in (150, 130, 130))
    acc = torch.randn(1, 200, 1 if carried == "one for all heads" else 2, 129 if carried == "in odd rows" else 128)
    lse = torch.randn(1, 2, 200)
    carry = acc[:, 40:190, :, :128].expand(-1, -1, 2, -1), lse[:, :, 40:190]
    kept, around = [x.clone() for x in carry], (acc.clone(), lse.transpose(1, 2).clone())
    where = Mask(), [(300, 1, 100), (0, 1, 50)], [(40, 1, 100), (0, 1, 30)]
    made: list[int] = []
    run = Launch.__call__

    def look(self: Launch) -> Any:
        made.append(self.tensors["out"].data_ptr())
        return run(self)

    monkeypatch.setattr(Launch, "__call__", look)
    into = torch.full_like(q, torch.nan), carry[1]
    block_forward(q, k, v, *where, carry, True, backend=backend, into=into)
    expected = block_forward(*(x.float() for x in (q, k, v)), *where, kept, True, backend="reference")
    torch.testing.assert_close(into[0].float(), expected[0], atol=1e-2, rtol=0)
    torch.testing.assert_close(into[1], expected[1], atol=1e-3, rtol=0)
    first = [carry[0][:, rows].data_ptr() for rows in (slice(0, 100), slice(100, 150))]
    assert len(made) == 4 and (made[::2] == first) == (carried == "as it is")
    for x, before in zip((acc, lse.transpose(1, 2)), around, strict=True):  # what is not of these queries
        assert torch.equal(x[:, :40], before[:, :40]) and torch.equal(x[:, 190:], before[:, 190:])


def test_a_forward_without_a_mask_is_the_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take other tiles of queries in each run, and each tile's sums keep their order."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, rows, 1, 64, dtype=torch.bfloat16) for rows in (960, 512, 512))
    found = []
    for seed in range(4):
        emulate(monkeypatch, seed, resident=2)
        found.append(block_forward(q, k, v, None, last=False, backend="hopper"))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


def test_to_count_keys_waits_for_no_device() -> None:
    """A mask that is elsewhere, as inside an op, stays there."""
    k = torch.empty(1, 256, 1, 64, dtype=torch.bfloat16, device="meta")
    for mask in (
        Mask(causal=True, documents=torch.zeros(1, 256, dtype=torch.int64)),
        Mask(causal=True, prefix=torch.tensor([3])),
    ):
        elsewhere = Mask.from_bounds(mask.bounds(k.device))
        assert hopper_arguments.most_keys(elsewhere, k, k, k) is None


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", tune.HOPPER_CANDIDATES)
def test_every_tile_that_the_tuner_tries_is_right(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program has both heads, so every place in memory is used again."""
    emulate(monkeypatch, resident=1)
    table = hopper_tiles.FORWARD if kernel == "hopper-forward" else hopper_tiles.BACKWARD
    used = table[width]
    for tile in tune.HOPPER_CANDIDATES[kernel][width]:
        monkeypatch.setitem(table, width, used | tile)
        check_case(Case("tile", rows=150, width=width, heads=(2, 1), causal=True), "hopper", torch.bfloat16, "cpu")


@pytest.mark.hopper
def test_what_hopper_does_not_take_on_a_cpu_either() -> None:
    q = torch.randn(1, 10, 2, 64)
    with pytest.raises(ValueError, match=r"hopper.*bf16 and fp16 only"):
        attention(q, q, q, backend="hopper")


def results(monkeypatch: pytest.MonkeyPatch, seed: int = 0, **instead: Any) -> list[torch.Tensor]:
    """Of some tiles of keys and queries, at a head dim where consumers take turns; programs take turns at dq, too."""
    torch.manual_seed(0)
    emulate(monkeypatch, seed, **instead)
    q, k, v, dout = (torch.randn(1, 400, 2, 128, dtype=torch.bfloat16) for _ in range(4))
    out, lse = block_forward(q, k, v, Mask(causal=True), backend="hopper")
    sums = [torch.zeros(x.shape) for x in (q, k, v)]
    given = dout, q, k, v, lse, output_delta(dout, out), Mask(causal=True), None, None
    block_backward(*given, *sums, deterministic=True, backend="hopper")
    return [out, *sums]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nobody waits for a place": (dict(wait_free=lambda free, nth, NUM: nth % NUM), "more than 1 arrive"),
    "a place is not given back": (dict(arrive_each=lambda barrier: None), "all wait: .*consume .* phase 1 of"),
    "a product is not waited for": (dict(warpgroup_mma_wait=lambda pending, deps: deps[0]), "before it was waited for"),
    "nobody hands a turn on": (dict(pass_turn=lambda *_: None), "for another number in memory"),
    "one step beyond memory": (dict(row_count=lambda at: at[2] + 1), r"outside of a tensor's \d+ elements"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead, told = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=told):
        results(monkeypatch, **instead)


def test_what_no_fence_makes_visible_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    right = results(monkeypatch)
    wrong = results(monkeypatch, fence_async_shared=lambda: None)
    assert all(x.isfinite().all() for x in right) and all(x.isnan().any() for x in wrong)


@gluon.jit
def hand_on_unfenced(full):
    arrive_each(full)
    fence_async_shared()


@gluon.jit
def pass_turn_early(taking_turns, h, row):
    """Before what was added is in memory."""
    turns, stride, turn, _before_end = taking_turns
    gl.atomic_xchg(turns + h * stride + row // 64, turn + 1, sem="release")


@gluon.jit
def turn_at_once(taking_turns, h, row):
    return taking_turns[2]


def orders(monkeypatch: pytest.MonkeyPatch, **instead: Any) -> list[torch.Tensor]:
    return [results(monkeypatch, seed, **instead)[1] for seed in range(1, 600, 100)]


def test_a_fence_behind_the_arrival_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(dq.isnan().any() for dq in orders(monkeypatch, hand_on=hand_on_unfenced))


def test_a_warp_that_goes_ahead_of_its_party_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has them meet before one arrives for all (ahead.goes_ahead makes sure of it), and at this head dim one does."""

    def arrives_alone(machine: EmulatedGPU, barrier: Barrier, count: int = 1) -> None:
        machine.parties.pause()
        if machine.me.index == 0:
            barrier.arrive(count)

    case = Case("alone", rows=500, width=64, causal=True)
    emulate(monkeypatch)
    check_case(case, "hopper", torch.bfloat16, "cpu")
    monkeypatch.setattr(EmulatedGPU, "arrive", arrives_alone)
    with pytest.raises(AssertionError, match=r"all wait|NaN"):
        check_case(case, "hopper", torch.bfloat16, "cpu")


def test_orders_differ_and_turns_make_them_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed is an order of its own, in which dq would add up to other bits."""

    def differ(dq: list[torch.Tensor]) -> bool:
        return any(not torch.equal(dq[0], other) for other in dq[1:])

    assert not differ(orders(monkeypatch))
    for mistake in (dict(turn_at=turn_at_once), dict(pass_turn=pass_turn_early)):
        assert differ(orders(monkeypatch, **mistake)), mistake


@gluon.jit
def through_shared_memory(x, out, WAITS: gl.constexpr, FENCES: gl.constexpr, STAYS: gl.constexpr, ENDS: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [1, 1, 64, 64], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    mbarrier.expect(arrived.index(0), x.block_type.nbytes)
    tma_load(x, [0, 0, 0, 0], arrived.index(0), tile)
    if WAITS:
        mbarrier.wait(arrived.index(0), 0)
    rows = tile.reshape([64, 64])
    value = rows.load(None)
    mbarrier.wait(arrived.index(0), 0)
    rows.store(value * 2)
    if FENCES:
        fence_async_shared()
    tma_store(out, [0, 0, 0, 0], tile)
    if not STAYS:
        rows.store(value)
    if ENDS:
        tma.store_wait(0)


def test_the_tma_is_late() -> None:
    """Rows that are not there are zeros, and not written; each thing left out is found, if not in every order."""

    def run(**left_out: bool) -> list[torch.Tensor]:
        found = []
        for seed in range(20):
            x, out = torch.ones(1, 64, 1, 64), torch.zeros(1, 64, 1, 64)
            options = dict(WAITS=True, FENCES=True, STAYS=True, ENDS=True) | left_out
            given = dict(x=descriptor(x, 50, 64, 64), out=descriptor(out, 60, 64, 64))
            Emulated(through_shared_memory, seed, 1, {})[(1,)](**given, **options)
            found.append(out[0, :, 0])
        return found

    for out in run():
        assert (out[:50] == 2).all() and (out[50:] == 0).all()
    assert all(out[:60].isnan().all() for out in run(FENCES=False))
    for left_out in ("WAITS", "STAYS"):
        wrong = [bool(out[:50].isnan().all()) for out in run(**{left_out: False})]
        assert any(wrong), left_out
    with pytest.raises(AssertionError, match="shared memory that goes away"):
        run(ENDS=False)


def lost_updates(seed: int) -> int:
    """Two parties add to a number, and let the other go first in between."""
    parties, number = Parties(seed), 0

    def add() -> None:
        nonlocal number
        for _ in range(20):
            seen = number
            parties.pause()
            number = seen + 1

    parties.add("one", add)
    parties.add("other", add)
    parties.run()
    return 40 - number


def test_parties_meet_in_every_way_and_again() -> None:
    lost = [lost_updates(seed) for seed in range(40)]
    assert 0 in lost and max(lost) > 10
    assert lost == [lost_updates(seed) for seed in range(40)]


def test_a_hang_is_told_and_nobody_stays() -> None:
    before = threading.active_count()
    for waits_for, told in (("a word", "all wait: one for a word; other for a word"), ("", "no end in sight")):
        parties = Parties(0, most_turns=1000)

        def work(parties: Parties = parties, waits_for: str = waits_for) -> None:
            while True:
                parties.wait(lambda: not waits_for, waits_for)

        parties.add("one", work)
        parties.add("other", work)
        with pytest.raises(Stuck, match=told):
            parties.run()
    assert threading.active_count() == before


def test_what_fails_is_told_and_nobody_stays() -> None:
    before = threading.active_count()
    parties = Parties(0)

    def fails() -> None:
        parties.pause()
        raise ValueError("so it is")

    parties.add("one", fails)
    parties.add("other", lambda: parties.wait(lambda: False, "the one"))
    parties.later("and a third", lambda: None)
    with pytest.raises(ValueError, match="so it is"):
        parties.run()
    assert threading.active_count() == before
