"""Counters of launches: no two launches get the same, and memory that may belong to a CUDA graph is filled by itself."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringspan import Mask, attention
from ringspan.kernels.runtime import work_counters
from ringspan.kernels.runtime.custom_op import _called_eagerly
from ringspan.kernels.runtime.work_counters import PER_FILL, new_counter

GPU: Any = SimpleNamespace(type="cuda", index=0)


class Driver:
    """A GPU's streams, and the fills of counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.is_capturing, self.fills = 1, False, list[tuple[int, int]]()
        zeros = torch.zeros

        def fill(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
            self.fills.append((self.stream, zeros(shape).numel() // 4))
            return zeros(*shape, dtype=dtype)

        monkeypatch.setattr(torch, "zeros", fill)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.stream, raising=False)
        monkeypatch.setattr(work_counters, "_counters", {})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


counters_of_eager_calls = _called_eagerly(lambda count: [new_counter(GPU) for _ in range(count)])


def test_one_fill_serves_many_launches_of_a_stream(driver: Driver) -> None:
    counters = counters_of_eager_calls(PER_FILL + 1)
    assert driver.fills == [(1, PER_FILL)] * 2
    assert len({counter.data_ptr() for counter in counters}) == len(counters)
    assert all(counter.data_ptr() % 16 == 0 and counter.dtype == torch.int32 and not counter.any() for counter in counters)
    driver.stream = 2
    counters_of_eager_calls(1)
    assert driver.fills == [(1, PER_FILL), (1, PER_FILL), (2, PER_FILL)]


def test_memory_that_may_belong_to_a_graph_is_filled_by_itself(driver: Driver) -> None:
    new_counter(GPU)  # not from eager code
    driver.is_capturing = True
    counters_of_eager_calls(2)
    driver.is_capturing = False
    other = threading.Thread(target=new_counter, args=(GPU,))  # while this thread is in an eager call
    _called_eagerly(lambda: (other.start(), other.join()))()
    assert driver.fills == [(1, 1)] * 4
    with pytest.raises(ZeroDivisionError):
        _called_eagerly(lambda: 1 / 0)()
    new_counter(GPU)
    assert driver.fills == [(1, 1)] * 5


@pytest.mark.gpu
@pytest.mark.hopper
def test_more_calls_than_a_fill_has_counters() -> None:
    """On two streams in turn. A counter that does not begin at 0 leaves out tiles."""
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = attention(q, k, v, Mask(causal=True), backend="hopper")
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for index in range(2 * PER_FILL + 10):
        streams[index % 2].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[index % 2]):
            out = attention(q, k, v, Mask(causal=True), backend="hopper")
        torch.cuda.current_stream().wait_stream(streams[index % 2])
        assert torch.equal(out, expected)
