"""The cache of compiled launches: a launch with known signatures uses the compiled kernel with its own tensors."""

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
        return lambda *args: self.calls.append((grid, args))


class FakeKernel:
    """Stand-in for a Triton kernel: each call returns a new compiled kernel."""

    arg_names = ("x", "y", "rows", "pair", "factor")

    def __init__(self) -> None:
        self.compiled: list[FakeCompiled] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def call(**arguments: Any) -> FakeCompiled:
            assert set(arguments) == {*self.arg_names, "num_warps"}
            self.compiled.append(FakeCompiled())
            return self.compiled[-1]

        return call


def make(x: Tensor, y: Tensor | None, pair: tuple[Any, ...], factor: float) -> Arguments:
    tiles = descriptor(x, x.shape[1], 64, 64)
    return x.shape[1], dict(x=tiles, y=y, rows=x.shape[1], pair=pair, factor=factor, num_warps=4)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(launch, "_launches", {})
    return FakeKernel()


def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(size or (2, 8, 4, 64), dtype=dtype)


def run_launch(
    kernel: FakeKernel, x: Tensor, y: Tensor | None = None, pair: tuple[Any, ...] = (3, None), factor: float = 0.5
) -> None:
    Launch(kernel, make, dict(x=x, y=y, pair=pair), dict(factor=factor))()


def test_a_cached_launch_uses_the_new_tensors(kernel: FakeKernel) -> None:
    run_launch(kernel, tensor(), tensor(5), (3, tensor(7)))
    x, y, pair = tensor(), tensor(5), (3, tensor(7))
    run_launch(kernel, x, y, pair)
    [compiled] = kernel.compiled
    [(grid, (tiles, *arguments))] = compiled.calls
    assert grid == (8, 1, 1)
    assert isinstance(tiles, TensorDescriptor) and tiles.base is x and tiles.block_shape == [1, 1, 64, 64]
    assert arguments[0] is y and arguments[1] == 8 and arguments[2] is pair and arguments[3] == 0.5


def test_an_argument_that_is_none_stays_none(kernel: FakeKernel) -> None:
    def leave_out(x: Tensor, y: Tensor, pair: tuple[Any, ...], factor: float) -> Arguments:
        programs, arguments = make(x, y, pair, factor)
        return programs, arguments | dict(y=None)

    for _ in range(2):
        Launch(kernel, leave_out, dict(x=tensor(), y=tensor(5), pair=(3, None)), dict(factor=0.5))()
    [(_, (_, argument, *_))] = kernel.compiled[0].calls
    assert argument is None


@pytest.mark.parametrize(
    "value", [tensor(), descriptor(tensor(), 8, 64, 64), (1, tensor())], ids=["tensor", "descriptor", "pair"]
)
def test_a_tensor_that_the_cache_could_not_replace_is_rejected(value: Any, kernel: FakeKernel) -> None:
    def make_with_value(x: Tensor, y: None, pair: tuple[Any, ...], factor: float) -> Arguments:
        programs, arguments = make(x, y, pair, factor)
        return programs, arguments | dict(y=value)

    with pytest.raises(AssertionError, match=r"arguments=\['y'\] hold tensors that are not the tensors of these names"):
        Launch(kernel, make_with_value, dict(x=tensor(), y=None, pair=(3, None)), dict(factor=0.5))()


def test_one_tensor_as_two_arguments_has_the_same_key(kernel: FakeKernel) -> None:
    x = tensor()
    run_launch(kernel, x, x)
    y = tensor()
    run_launch(kernel, x, y)
    [(_, (tiles, argument, *_))] = kernel.compiled[0].calls
    assert tiles.base is x and argument is y


@pytest.mark.parametrize(
    "change",
    [
        dict(x=tensor(2, 9, 4, 64)),
        dict(x=tensor(2, 4, 8, 64).transpose(1, 2)),
        dict(x=tensor(dtype=torch.float16)),
        dict(y=None),
        dict(y=tensor(5, dtype=torch.float32)),
        dict(y=tensor(6)[1:]),  # does not begin at a multiple of 16 bytes
        dict(pair=(4, None)),
        dict(pair=(3, tensor(2))),
        dict(factor=0.25),
    ],
)
def test_another_signature_is_compiled(kernel: FakeKernel, change: dict[str, Any]) -> None:
    usual: dict[str, Any] = dict(x=tensor(), y=tensor(5))
    run_launch(kernel, **usual)
    run_launch(kernel, **usual | change)
    assert len(kernel.compiled) == 2
    assert not any(compiled.calls for compiled in kernel.compiled)
    run_launch(kernel, **usual | change)
    assert [len(compiled.calls) for compiled in kernel.compiled] == [0, 1]


def test_the_cache_keeps_no_tensors(kernel: FakeKernel) -> None:
    x, y, seed = tensor(), tensor(5), tensor(7)
    run_launch(kernel, x, y, (3, seed))
    references = [weakref.ref(value) for value in (x, y, seed)]
    del x, y, seed
    assert [reference() for reference in references] == [None, None, None]
    run_launch(kernel, tensor(), tensor(5), (3, tensor(7)))
    assert len(kernel.compiled) == 1


def test_the_cache_has_a_limit(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_LAUNCHES", 2)
    for factor in (1.0, 2.0, 3.0):
        run_launch(kernel, tensor(), factor=factor)
    assert len(launch._launches) == 1


def test_a_launch_without_thread_blocks_compiles_nothing_and_runs_once(kernel: FakeKernel) -> None:
    empty = Launch(kernel, lambda x: (0, {}), dict(x=tensor(0, 0, 4, 64)), {})
    empty()
    assert kernel.compiled == []
    with pytest.raises(AssertionError, match="runs once"):
        empty()
