"""The emulator finds mistakes in a kernel: missing waits, fences and arrivals, wrong order, access out of bounds."""

import threading
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ringspan import Mask
from ringspan.kernels.backends.hopper.arguments import descriptor
from ringspan.kernels.backends.hopper.common import arrive_per_thread
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.runtime.triton_compat import tma_load, tma_store
from tests.conftest import HAS_GPU
from tests.kernels.backends.hopper.emulator import Emulated, emulate
from tests.kernels.backends.hopper.emulator.machine import EmulatedGPU
from tests.kernels.backends.hopper.emulator.memory import Barrier
from tests.kernels.backends.hopper.emulator.scheduler import NoProgress, Scheduler
from tests.kernels.backends.test_backends import check_case
from tests.kernels.helpers.dense import Case

pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU the tests run compiled kernels, not the emulator")


def results(monkeypatch: pytest.MonkeyPatch, seed: int = 0, **overrides: Any) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of several tiles, at a head dim where consumers alternate, with dq in deterministic order."""
    torch.manual_seed(0)
    emulate(monkeypatch, seed, **overrides)
    q, k, v, dout = (torch.randn(1, 400, 2, 128, dtype=torch.bfloat16) for _ in range(4))
    out, lse = block_forward(q, k, v, Mask(causal=True), backend="hopper")
    totals = [torch.zeros(x.shape) for x in (q, k, v)]
    inputs = dout, q, k, v, lse, output_delta(dout, out), Mask(causal=True), None, None
    block_backward(*inputs, *totals, deterministic=True, backend="hopper")
    return [out, *totals]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no wait for a free slot": (dict(wait_free=lambda free, index, NUM: index % NUM), "more than 1 arrive"),
    "a slot is never freed": (dict(arrive_per_thread=lambda barrier: None), "all tasks wait: .*consume .* phase 1 of"),
    "no wait for a matmul": (dict(warpgroup_mma_wait=lambda pending, deps: deps[0]), "before it was waited for"),
    "a turn is never passed on": (dict(pass_turn=lambda *_: None), "for another number in memory"),
    "out of bounds": (dict(row_count=lambda segments: segments.num_rows + 1), r"outside of a tensor's \d+ elements"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, message = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=message):
        results(monkeypatch, **overrides)


def test_reads_without_fence_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = results(monkeypatch)
    wrong = results(monkeypatch, fence_async_shared=lambda: None)
    assert all(x.isfinite().all() for x in correct) and all(x.isnan().any() for x in wrong)


@gluon.jit
def arrive_before_fence(full):
    arrive_per_thread(full)
    fence_async_shared()


@gluon.jit
def pass_turn_early(dq_turns, h, row):
    """Pass the turn before the sums are in memory."""
    gl.atomic_xchg(dq_turns.counters + h * dq_turns.stride + row // 64, dq_turns.own_turn + 1, sem="release")


@gluon.jit
def ignore_turns(dq_turns, h, row):
    return dq_turns.own_turn


def orders(monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> list[torch.Tensor]:
    return [results(monkeypatch, seed, **overrides)[1] for seed in range(1, 600, 100)]


def test_fence_after_arrival_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(dq.isnan().any() for dq in orders(monkeypatch, fence_and_arrive=arrive_before_fence))


def test_arrival_before_the_other_warps_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton inserts a barrier before one thread arrives for all (checked on compiled code); this head dim arrives that way."""

    def arrive_without_sync(machine: EmulatedGPU, barrier: Barrier, count: int = 1) -> None:
        machine.scheduler.pause()
        if machine.warp.index == 0:
            barrier.arrive(count)

    case = Case("alone", rows=500, width=64, causal=True)
    emulate(monkeypatch)
    check_case(case, "hopper", torch.bfloat16, "cpu")
    monkeypatch.setattr(EmulatedGPU, "arrive", arrive_without_sync)
    with pytest.raises(AssertionError, match=r"all tasks wait|NaN"):
        check_case(case, "hopper", torch.bfloat16, "cpu")


def test_turns_make_dq_independent_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed is another order. Without turns dq has other bits."""

    def differ(dq: list[torch.Tensor]) -> bool:
        return any(not torch.equal(dq[0], other) for other in dq[1:])

    assert not differ(orders(monkeypatch))
    for mistake in (dict(read_turn=ignore_turns), dict(pass_turn=pass_turn_early)):
        assert differ(orders(monkeypatch, **mistake)), mistake


@gluon.jit
def through_shared_memory(x, out, WAITS: gl.constexpr, FENCES: gl.constexpr, KEEPS: gl.constexpr, ENDS: gl.constexpr):
    """Double a tile: TMA load, registers, shared memory, TMA store. Each flag set to False omits one synchronisation."""
    tile = gl.allocate_shared_memory(x.dtype, [1, 1, 64, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), x.block_type.nbytes)
    tma_load(x, [0, 0, 0, 0], full.index(0), tile)
    if WAITS:
        mbarrier.wait(full.index(0), 0)
    rows = tile.reshape([64, 64])
    value = rows.load(None)
    mbarrier.wait(full.index(0), 0)
    rows.store(value * 2)
    if FENCES:
        fence_async_shared()
    tma_store(out, [0, 0, 0, 0], tile)
    if not KEEPS:
        rows.store(value)
    if ENDS:
        tma.store_wait(0)


def test_tma_is_asynchronous() -> None:
    """Rows past the end are zeros and are not stored. Each omitted synchronisation is found in some order."""

    def run(**omitted: bool) -> list[torch.Tensor]:
        outputs = []
        for seed in range(20):
            x, out = torch.ones(1, 64, 1, 64), torch.zeros(1, 64, 1, 64)
            options = dict(WAITS=True, FENCES=True, KEEPS=True, ENDS=True) | omitted
            inputs = dict(x=descriptor(x, 50, 64, 64), out=descriptor(out, 60, 64, 64))
            Emulated(through_shared_memory, seed, 1, {})[(1,)](**inputs, **options)
            outputs.append(out[0, :, 0])
        return outputs

    for out in run():
        assert (out[:50] == 2).all() and (out[50:] == 0).all()
    assert all(out[:60].isnan().all() for out in run(FENCES=False))
    for omitted in ("WAITS", "KEEPS"):
        wrong = [bool(out[:50].isnan().all()) for out in run(**{omitted: False})]
        assert any(wrong), omitted
    with pytest.raises(AssertionError, match="before the TMA has read its shared memory"):
        run(ENDS=False)


def lost_updates(seed: int) -> int:
    """Two tasks increment a number; each may be interrupted between its load and its store."""
    scheduler, number = Scheduler(seed), 0

    def add() -> None:
        nonlocal number
        for _ in range(20):
            old = number
            scheduler.pause()
            number = old + 1

    scheduler.add("one", add)
    scheduler.add("other", add)
    scheduler.run()
    return 40 - number


def test_scheduler_orders_vary_by_seed_and_repeat() -> None:
    lost = [lost_updates(seed) for seed in range(40)]
    assert 0 in lost and max(lost) > 10
    assert lost == [lost_updates(seed) for seed in range(40)]


def test_hang_is_reported_and_threads_end() -> None:
    num_threads = threading.active_count()
    for reason, message in (("a word", "all tasks wait: one for a word; other for a word"), ("", "too many switches")):
        scheduler = Scheduler(0, max_switches=1000)

        def loop(scheduler: Scheduler = scheduler, reason: str = reason) -> None:
            while True:
                scheduler.wait(lambda: not reason, reason)

        scheduler.add("one", loop)
        scheduler.add("other", loop)
        with pytest.raises(NoProgress, match=message):
            scheduler.run()
    assert threading.active_count() == num_threads


def test_failure_is_raised_and_threads_end() -> None:
    num_threads = threading.active_count()
    scheduler = Scheduler(0)

    def fails() -> None:
        scheduler.pause()
        raise ValueError("failed")

    scheduler.add("one", fails)
    scheduler.add("other", lambda: scheduler.wait(lambda: False, "one"))
    scheduler.add_event("event", lambda: None)
    with pytest.raises(ValueError, match="failed"):
        scheduler.run()
    assert threading.active_count() == num_threads
