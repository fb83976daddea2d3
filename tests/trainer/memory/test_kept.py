"""Kept tensors: right in any order of copies that the streams allow, one write at a time, and named failures."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringspan.parallel.transport import copy_engine
from ringspan.trainer.memory import kept as kept_module
from ringspan.trainer.memory.kept import HostRegion, KeptTensors
from tests.parallel.transport.stream_simulator import Operation, SimulatedMachine, simulated_streams

CPU = torch.device("cpu")
LAYERS = 5


def test_tensors_come_back() -> None:
    kept = KeptTensors(CPU, {"a": 40, "b": 100})
    values = {"a": torch.arange(10.0), "b": torch.arange(5, dtype=torch.float64), "c": torch.ones(3)}
    for _ in range(2):
        kept.keep(values)
        assert "a" in kept and kept.host_bytes == 512
        kept.prefetch("a")
        assert kept.take("c") is values["c"]
        for name in "ba":
            assert torch.equal(kept.take(name), values[name]) and name not in kept


def test_second_forward_without_a_backward_is_an_error() -> None:
    kept = KeptTensors(CPU, {})
    kept.keep({"a": torch.ones(1)})
    with pytest.raises(AssertionError, match="a backward must follow each forward"):
        kept.keep({"a": torch.ones(1)})
    kept.clear()
    kept.keep({"a": torch.ones(1)})


def steps(kept: KeptTensors, machine: SimulatedMachine, found: list[Tensor], values: list[Tensor]) -> None:
    """Two steps of forward and backward; memory that is free is overwritten with NaN, as another tensor would."""
    for step in range(2):
        previous: Tensor | None = None
        for layer in range(LAYERS):
            x = torch.empty(4)
            x.copy_(values[step * LAYERS + layer])
            kept.keep({layer: x})
            if previous is not None:  # its write is finished before the next one starts
                previous.fill_(torch.nan)
            previous = x
        kept.prefetch(LAYERS - 1)
        for layer in reversed(range(LAYERS)):
            kept.prefetch(layer - 1)
            x = kept.take(layer)
            found[step * LAYERS + layer].copy_(x)
            x.fill_(torch.nan)


def run_simulated(monkeypatch: pytest.MonkeyPatch, seed: int, change: Callable[[KeptTensors], object] | None = None) -> bool:
    """Return whether two steps give the right values in the order of a seed."""
    machine = SimulatedMachine(1, seed)
    values = [torch.full((4,), float(number)) for number in range(2 * LAYERS)]
    found = [torch.zeros(4) for _ in values]
    kept = KeptTensors(CPU, dict.fromkeys(range(LAYERS), 16))
    if change is not None:
        change(kept)
    with simulated_streams(machine, is_atomic=False):
        monkeypatch.setattr(kept_module, "SideStream", copy_engine.SideStream)
        steps(kept, machine, found, values)
    machine.run()
    return all(torch.equal(x, y) for x, y in zip(found, values, strict=True))


def test_values_are_right_in_any_order_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(run_simulated(monkeypatch, seed) for seed in range(60))


@pytest.mark.parametrize("missing", ["wait for a write", "wait for a read"])
def test_missing_waits_give_wrong_values(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The simulator finds both defects."""

    def without_write_wait(kept: KeptTensors) -> None:
        monkeypatch.setattr(kept, "finish_writes", lambda: None)

    def without_read_wait(kept: KeptTensors) -> None:
        prefetch = kept.prefetch

        def changed(key: Any) -> None:
            prefetch(key)
            if key in kept:
                kept._kept[key].arrived = lambda: None  # type: ignore[union-attr]

        monkeypatch.setattr(kept, "prefetch", changed)

    change = without_write_wait if missing == "wait for a write" else without_read_wait
    assert not all(run_simulated(monkeypatch, seed, change) for seed in range(20))


def test_at_most_one_write_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the copies are the last to run, the main stream waits at the second one."""
    machine = SimulatedMachine(1, 0)
    reached: list[int] = []
    kept = KeptTensors(CPU, dict.fromkeys(range(LAYERS), 16))
    with simulated_streams(machine, is_atomic=False):
        monkeypatch.setattr(kept_module, "SideStream", copy_engine.SideStream)
        for layer in range(LAYERS):
            kept.keep({layer: torch.empty(4)})
            machine.enqueue(lambda layer=layer: reached.append(layer))
    write = next(stream for stream in machine.queues if "host write" in stream[1])
    machine.queues[write].appendleft(Operation(lambda: None, lambda: False))  # the write stream is stuck
    machine.run(may_stall=True)
    assert reached == [0]


def test_too_little_host_memory_is_named_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "available_host_memory", lambda: 2.0**30)
    with pytest.raises(MemoryError, match=r"2.0 GiB of host memory are planned, 1.0 are free: take another plan"):
        HostRegion(2**31, CPU)


class FakeCudart:
    def __init__(self, code: int) -> None:
        self.code, self.registered = code, 0

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.registered += nbytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> None:
        self.registered = 0


def test_page_that_cannot_be_locked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(2))
    with pytest.raises(MemoryError, match=r"cannot be page-locked \(2\): take another plan .* `ulimit -l`"):
        HostRegion(2**20, torch.device("cuda"))


def test_region_is_touched_and_registered_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    region = HostRegion(3 * 2**20 + 5, torch.device("cuda"), threads=3)
    assert fake.registered == region.nbytes == 3 * 2**20 + 5
    slots = [region.slot(offset, (2, 4), torch.float32) for offset in (0, 256)]
    for number, slot in enumerate(slots):
        slot.fill_(number)
    assert [slot.unique().tolist() for slot in slots] == [[0], [1]]
    assert all(a.data_ptr() != b.data_ptr() for a, b in itertools.combinations(slots, 2))
    del region
    assert fake.registered == 0
