"""GPU signals: addresses and values of the stream memory operations, with a driver that executes them at once."""

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch

from ringspan.parallel.transport import gpu_signals
from ringspan.parallel.transport.gpu_signals import GRADS_READY, KV_WRITTEN, NUM_SIGNALS, SLOT_FREE, WAIT, WRITE, GpuSignals

RANKS = 3


class EndlessWait(Exception):
    """A wait whose signal is missing."""


@pytest.fixture
def signals_of_ranks(monkeypatch: pytest.MonkeyPatch) -> list[GpuSignals]:
    """The signals of each rank."""
    memory = [torch.full((NUM_SIGNALS, RANKS), -1, dtype=torch.int32) for _ in range(RANKS)]
    handle = SimpleNamespace(get_buffer=lambda rank, size, dtype: memory[rank].view(size))
    allocations = iter(memory)
    symmetric_memory = SimpleNamespace(
        empty=lambda size, dtype, device: next(allocations), rendezvous=lambda memory, group: handle
    )

    def driver(stream: int, count: int, operations: ctypes.Array, flags: int) -> int:
        assert (stream, count, flags) == (5, len(operations), 0) and ctypes.sizeof(operations) == 48 * count
        for operation in operations:
            flag = ctypes.c_int32.from_address(operation.address)
            assert (operation.flags, operation.alias) == (0, 0)
            if operation.operation == WRITE:
                flag.value = operation.value
            elif operation.operation == WAIT and flag.value < operation.value:
                raise EndlessWait
        return 0

    monkeypatch.setattr(gpu_signals, "symmetric_memory", symmetric_memory)
    monkeypatch.setattr(gpu_signals, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    return [
        GpuSignals(SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: RANKS), torch.device("cuda", 0))
        for rank in range(3)
    ]


def wait_ends(signals: GpuSignals, kind: int, *ranks: int) -> bool:
    try:
        signals.wait(kind, ranks)
    except EndlessWait:
        return False
    return True


def test_a_wait_ends_after_the_signal_and_clears_it(signals_of_ranks: list[GpuSignals]) -> None:
    for _ in range(2):
        assert not wait_ends(signals_of_ranks[1], KV_WRITTEN, 0)
        signals_of_ranks[0].signal(KV_WRITTEN, (1, 2))
        assert wait_ends(signals_of_ranks[1], KV_WRITTEN, 0) and wait_ends(signals_of_ranks[2], KV_WRITTEN, 0)


def test_a_signal_reaches_its_targets_only(signals_of_ranks: list[GpuSignals]) -> None:
    for signals, kind in itertools.product(signals_of_ranks, range(NUM_SIGNALS)):  # no flag is set at the beginning
        assert not any(wait_ends(signals, kind, rank) for rank in range(RANKS))
    signals_of_ranks[0].signal(GRADS_READY[1], (1,))
    assert not wait_ends(signals_of_ranks[2], GRADS_READY[1], 0)
    assert not wait_ends(signals_of_ranks[1], SLOT_FREE, 0) and not wait_ends(signals_of_ranks[1], GRADS_READY[0], 0)
    assert not wait_ends(signals_of_ranks[1], GRADS_READY[1], 2)
    assert wait_ends(signals_of_ranks[1], GRADS_READY[1], 0) and wait_ends(signals_of_ranks[1], GRADS_READY[1])


def test_release_ends_the_waits_of_its_own_rank(signals_of_ranks: list[GpuSignals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=5))
    for kind, _ in itertools.product(range(NUM_SIGNALS), range(2)):  # a wait clears the flags
        signals_of_ranks[1].release()
        assert wait_ends(signals_of_ranks[1], kind, 0, 1, 2)
        assert not wait_ends(signals_of_ranks[0], kind, 1) and not wait_ends(signals_of_ranks[2], kind, 1)


@pytest.mark.parametrize("status, words", [(801, "error 801, use transport='p2p'"), (700, "error 700, perhaps an earlier")])
def test_driver_errors_name_a_remedy(
    signals_of_ranks: list[GpuSignals], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_signals, "_driver", lambda: lambda *_: status)
    with pytest.raises(RuntimeError, match=words):
        signals_of_ranks[0].signal(KV_WRITTEN, (1,))
