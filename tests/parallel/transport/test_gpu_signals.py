"""Signals write into and wait for the right places of memory, as the driver is told to."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from ringspan.parallel.transport import gpu_signals
from ringspan.parallel.transport.gpu_signals import GRADS_READY, SLOT_FREE, WAIT, WRITE, GpuSignals

RANKS = 3


class Missing(Exception):
    """A wait that would not end."""


@pytest.fixture
def everyone(monkeypatch: pytest.MonkeyPatch) -> list[GpuSignals]:
    """Each rank's signals, with a driver that does at once what it is told."""
    memory = [torch.full((4, RANKS), -1, dtype=torch.int32) for _ in range(RANKS)]
    handle = SimpleNamespace(get_buffer=lambda rank, size, dtype: memory[rank].view(size))
    made = iter(memory)
    fake = SimpleNamespace(empty=lambda size, dtype, device: next(made), rendezvous=lambda mine, group: handle)

    def driver(stream: int, count: int, orders: ctypes.Array, flags: int) -> int:
        assert (stream, count, flags) == (5, len(orders), 0) and ctypes.sizeof(orders) == 48 * count
        for order in orders:
            there = ctypes.c_int32.from_address(order.address)
            assert (order.flags, order.alias) == (0, 0)
            if order.operation == WRITE:
                there.value = order.count
            elif order.operation == WAIT and there.value < order.count:
                raise Missing
        return 0

    monkeypatch.setattr(gpu_signals, "symmetric_memory", fake)
    monkeypatch.setattr(gpu_signals, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    return [
        GpuSignals(SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: RANKS), torch.device("cuda", 0))
        for rank in range(3)
    ]


def ends(one: GpuSignals, what: int, count: int, *ranks: int) -> bool:
    """Whether its wait for these ranks does."""
    try:
        one.wait(what, count, ranks)
    except Missing:
        return False
    return True


def test_who_was_told_need_not_wait(everyone: list[GpuSignals]) -> None:
    for count in (1, 2):
        assert not ends(everyone[1], GRADS_READY, count, 0)
        everyone[0].tell(GRADS_READY, count, (1, 2))
        assert ends(everyone[1], GRADS_READY, count, 0) and ends(everyone[2], GRADS_READY, count, 0)
        assert ends(everyone[2], GRADS_READY, count - 1, 0)


def test_nobody_else_is_told(everyone: list[GpuSignals]) -> None:
    for one in everyone:  # all begin with 0
        assert ends(one, GRADS_READY, 0, *(rank for rank in range(RANKS) if rank != one.rank))
    everyone[0].tell(GRADS_READY, 3, (1,))
    assert not ends(everyone[2], GRADS_READY, 1, 0)
    assert not ends(everyone[1], SLOT_FREE, 1, 0)
    assert not ends(everyone[1], GRADS_READY, 4, 0)
    assert not ends(everyone[1], GRADS_READY, 3, 0, 2)
    assert ends(everyone[1], GRADS_READY, 3, 0) and ends(everyone[1], GRADS_READY, 9)


def test_who_meets_tells_before_it_waits(everyone: list[GpuSignals]) -> None:
    with pytest.raises(Missing):
        everyone[0].meet(GRADS_READY, 1, (1, 2), (1,))
    everyone[1].meet(GRADS_READY, 1, (0,), (0,))
    everyone[0].meet(GRADS_READY, 1, (1, 2), (1,))
    assert not ends(everyone[0], GRADS_READY, 1, 2)


@pytest.mark.parametrize("status, words", [(801, "error 801, use transport='p2p'"), (700, "error 700, perhaps an earlier")])
def test_what_the_driver_refuses_is_an_error(
    everyone: list[GpuSignals], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_signals, "_driver", lambda: lambda *_: status)
    with pytest.raises(RuntimeError, match=words):
        everyone[0].tell(GRADS_READY, 1, (1,))
