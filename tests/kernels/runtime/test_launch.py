"""Launches that look like one before: they go straight to its kernel, with their own tensors."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan.kernels.backends.hopper.arguments import descriptor
from ringspan.kernels.runtime import launch
from ringspan.kernels.runtime.launch import Arguments, Launch


class FakeCompiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *given: self.calls.append((grid, given))


class FakeKernel:
    """Stands where Triton would compile: a new one for each call that comes this way."""

    arg_names = ("x", "y", "rows", "pair", "factor")

    def __init__(self) -> None:
        self.compiled: list[FakeCompiled] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def call(**given: Any) -> FakeCompiled:
            assert set(given) == {*self.arg_names, "num_warps"}
            self.compiled.append(FakeCompiled())
            return self.compiled[-1]

        return call


def make(x: Tensor, y: Tensor | None, pair: tuple[Any, ...], factor: float) -> Arguments:
    described = descriptor(x, x.shape[1], 64, 64)
    return x.shape[1], dict(x=described, y=y, rows=x.shape[1], pair=pair, factor=factor, num_warps=4)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(launch, "_known", {})
    return FakeKernel()


def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(size or (2, 8, 4, 64), dtype=dtype)


def launched(
    kernel: FakeKernel, x: Tensor, y: Tensor | None = None, pair: tuple[Any, ...] = (3, None), factor: float = 0.5
) -> None:
    Launch(kernel, make, dict(x=x, y=y, pair=pair), dict(factor=factor))()


def test_one_like_before_takes_its_own_tensors(kernel: FakeKernel) -> None:
    launched(kernel, tensor(), tensor(5), (3, tensor(7)))
    x, y, pair = tensor(), tensor(5), (3, tensor(7))
    launched(kernel, x, y, pair)
    [compiled] = kernel.compiled
    [(grid, (described, *given))] = compiled.calls
    assert grid == (8, 1, 1)
    assert isinstance(described, TensorDescriptor) and described.base is x and described.block_shape == [1, 1, 64, 64]
    assert given[0] is y and given[1] == 8 and given[2] is pair and given[3] == 0.5


def test_an_argument_left_out_stays_out(kernel: FakeKernel) -> None:
    def leave_out(x: Tensor, y: Tensor, pair: tuple[Any, ...], factor: float) -> Arguments:
        programs, given = make(x, y, pair, factor)
        return programs, given | dict(y=None)

    for _ in range(2):
        Launch(kernel, leave_out, dict(x=tensor(), y=tensor(5), pair=(3, None)), dict(factor=0.5))()
    [(_, (_, given, *_))] = kernel.compiled[0].calls
    assert given is None


@pytest.mark.parametrize(
    "stranger", [tensor(), descriptor(tensor(), 8, 64, 64), (1, tensor())], ids=["tensor", "descriptor", "pair"]
)
def test_a_tensor_that_later_launches_could_not_replace_is_found(stranger: Any, kernel: FakeKernel) -> None:
    def smuggle(x: Tensor, y: None, pair: tuple[Any, ...], factor: float) -> Arguments:
        programs, given = make(x, y, pair, factor)
        return programs, given | dict(y=stranger)

    with pytest.raises(AssertionError, match=r"not the tensors of these names.*\['y'\]"):
        Launch(kernel, smuggle, dict(x=tensor(), y=None, pair=(3, None)), dict(factor=0.5))()


def test_the_same_tensor_twice_is_no_other_launch(kernel: FakeKernel) -> None:
    x = tensor()
    launched(kernel, x, x)
    y = tensor()
    launched(kernel, x, y)
    [(_, (described, given, *_))] = kernel.compiled[0].calls
    assert described.base is x and given is y


@pytest.mark.parametrize(
    "other",
    [
        dict(x=tensor(2, 9, 4, 64)),
        dict(x=tensor(2, 4, 8, 64).transpose(1, 2)),
        dict(x=tensor(dtype=torch.float16)),
        dict(y=None),
        dict(y=tensor(5, dtype=torch.float32)),
        dict(y=tensor(6)[1:]),  # begins at no multiple of 16 bytes
        dict(pair=(4, None)),
        dict(pair=(3, tensor(2))),
        dict(factor=0.25),
    ],
)
def test_one_that_looks_different_is_compiled(kernel: FakeKernel, other: dict[str, Any]) -> None:
    usual: dict[str, Any] = dict(x=tensor(), y=tensor(5))
    launched(kernel, **usual)
    launched(kernel, **usual | other)
    assert len(kernel.compiled) == 2
    assert not any(compiled.calls for compiled in kernel.compiled)
    launched(kernel, **usual | other)
    assert [len(compiled.calls) for compiled in kernel.compiled] == [0, 1]


def test_memory_is_not_kept(kernel: FakeKernel) -> None:
    x, y, seed = tensor(), tensor(5), tensor(7)
    launched(kernel, x, y, (3, seed))
    gone = [weakref.ref(one) for one in (x, y, seed)]
    del x, y, seed
    assert [ref() for ref in gone] == [None, None, None]
    launched(kernel, tensor(), tensor(5), (3, tensor(7)))
    assert len(kernel.compiled) == 1


def test_not_more_than_so_many(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REMEMBERED", 2)
    for factor in (1.0, 2.0, 3.0):
        launched(kernel, tensor(), factor=factor)
    assert len(launch._known) == 1


def test_nothing_to_do_and_twice(kernel: FakeKernel) -> None:
    launch = Launch(kernel, lambda x: (0, {}), dict(x=tensor(0, 0, 4, 64)), {})
    launch()
    assert kernel.compiled == []
    with pytest.raises(AssertionError, match="once"):
        launch()
