"""The cache of compiled launches, and that lengths and batch sizes compile no kernel."""

import json
import os
import subprocess
import sys
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from ringspan import Mask
from ringspan.kernels.backends.hopper.arguments import descriptor
from ringspan.kernels.runtime import launch
from ringspan.kernels.runtime.launch import Arguments, Launch, any_sizes
from ringspan.kernels.runtime.triton_compat import VERSION, constant_result
from tests.kernels.runtime import compilations


class FakeCompiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.calls.append((grid, args))


class FakeKernel:
    """Stand-in for a Triton kernel: each warmup returns a new compiled kernel."""

    arg_names = ("x", "y", "rows", "pair", "factor")

    def __init__(self) -> None:
        self.compiled: list[FakeCompiled] = []

    def warmup(self, grid: tuple[int], **arguments: Any) -> FakeCompiled:
        assert set(arguments) == {*self.arg_names, "num_warps"}
        self.compiled.append(FakeCompiled())
        return self.compiled[-1]


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


def test_constants_are_marked_as_torch_marks_them() -> None:
    def marks(mark: Any) -> dict[str, Any]:
        return vars(mark(lambda: 0))

    assert marks(constant_result) == marks(torch.compiler.assume_constant_result) != {}


def test_a_cached_launch_uses_the_new_tensors(kernel: FakeKernel) -> None:
    run_launch(kernel, tensor(), tensor(5), (3, tensor(7)))
    x, y, pair = tensor(), tensor(5), (3, tensor(7))
    run_launch(kernel, x, y, pair)
    [compiled] = kernel.compiled
    [_, (grid, (tiles, *arguments))] = compiled.calls
    assert grid == (8, 1, 1)
    assert isinstance(tiles, TensorDescriptor) and tiles.base is x and tiles.block_shape == [1, 1, 64, 64]
    assert arguments[0] is y and arguments[1] == 8 and arguments[2] is pair and arguments[3] == 0.5


def test_an_argument_that_is_none_stays_none(kernel: FakeKernel) -> None:
    def leave_out(x: Tensor, y: Tensor, pair: tuple[Any, ...], factor: float) -> Arguments:
        programs, arguments = make(x, y, pair, factor)
        return programs, arguments | dict(y=None)

    for _ in range(2):
        Launch(kernel, leave_out, dict(x=tensor(), y=tensor(5), pair=(3, None)), dict(factor=0.5))()
    for _, (_, argument, *_) in kernel.compiled[0].calls:
        assert argument is None
    assert len(kernel.compiled[0].calls) == 2


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
    [_, (_, (tiles, argument, *_))] = kernel.compiled[0].calls
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
def test_another_signature_is_looked_up_by_triton(kernel: FakeKernel, change: dict[str, Any]) -> None:
    usual: dict[str, Any] = dict(x=tensor(), y=tensor(5))
    run_launch(kernel, **usual)
    run_launch(kernel, **usual | change)
    assert [len(compiled.calls) for compiled in kernel.compiled] == [1, 1]
    run_launch(kernel, **usual | change)
    assert [len(compiled.calls) for compiled in kernel.compiled] == [1, 2]


def test_the_cache_keeps_no_tensors(kernel: FakeKernel) -> None:
    x, y, seed = tensor(), tensor(5), tensor(7)
    run_launch(kernel, x, y, (3, seed))
    references = [weakref.ref(value) for value in (x, y, seed)]
    kernel.compiled[0].calls.clear()
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


@pytest.mark.slow
def test_no_length_batch_size_or_number_of_documents_compiles_a_kernel() -> None:
    """Counted in a process without the interpreter; a variant after the first may share kernels with an earlier one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.runtime.compilations"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    counts = json.loads(process.stdout.splitlines()[-1])
    warmups = {name: kernels for name, kernels in counts.items() if name.startswith("warmup ")}
    counts = {name: kernels for name, kernels in counts.items() if name not in warmups}
    assert list(counts) == list(compilations.VARIANTS) and len(compilations.CASES) == 30
    assert {kernel for kernels in counts.values() for kernel in kernels} >= {"attention_forward", "attention_backward"}
    assert set(counts.pop("zigzag").values()) == {2}  # blocks whose numbers 16 divides, and others
    for name in ("gqa-6", "head-dim-40"):  # the query heads of a KV head are split for some lengths
        kernels = counts.pop(name)
        assert (kernels.pop("attention_backward"), kernels.pop("sum_and_cast")) == (2, 1) and set(kernels.values()) <= {1}
    assert {name: kernels for name, kernels in counts.items() if set(kernels.values()) - {1}} == {}
    assert [name for name, kernels in counts.items() if not kernels] == ["window-two-sided"]  # the kernels of "window"
    assert len(warmups) == len(compilations.WARMUPS)  # `ringspan warmup` compiles the kernels of these calls, and no others
    assert {name for name, kernels in warmups.items() if kernels} == {"warmup new"}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])
def test_thirty_cases_compile_once_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test has these options, so the first case compiles: forward, delta, and one or two backward kernels."""
    compiled: list[str] = []
    compile_kernel = JITFunction._do_compile

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append(self.fn.__name__)
        return compile_kernel(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    options = dict(backend=backend, mask=Mask(causal=True, window=64), heads=2, width=88, softcap=7.0)
    compilations.run_case((1, 300, 300), "cuda", **options)
    backward = ["attention_backward"] if backend == "hopper" else ["attention_backward_dq", "attention_backward_dkdv"]
    assert set(compiled) - {"row_products"} == {"attention_forward", *backward}
    compiled.clear()
    for case in compilations.CASES:
        compilations.run_case(case, "cuda", **options)
    torch.cuda.synchronize()
    assert compiled == []


Pair = namedtuple("Pair", ("left", "length"))


@pytest.mark.parametrize(
    ("name", "values", "like"),
    [
        ("q_at", (0, 1, 4096, None), (1, 1, 1, None)),  # a step of 1 stays a constant, a start or a count does not
        ("k_at", (0, 16, 4096, 7, 16, 1, 2), (16, 3, 1, 1, 3, 16, 16)),
        ("mask", (1, 0, None, 4096), (16, 7, None, 1)),
        ("mask", Pair(1, 4096), Pair(16, 1)),
        ("drop", (1.5, 2**31, 16), (1.5, 2**32 - 1, 1)),
        ("q_strides", (2**20, 4096, 128), (2**33, 256, 16)),
        ("q_strides", (3 * 40, 120, 40), (16 * 120, 120, 40)),  # whether 16 divides the batch's stride depends on the length
        ("lse_strides", (32 * 4096, 4096, 1), (5, 1, 1)),
        ("carry_lse_strides", (0, 16, 0), (0, 1, 0)),
    ],
)
def test_numbers_in_tuples_for_which_one_kernel_is_compiled(name: str, values: tuple[Any, ...], like: tuple[Any, ...]) -> None:
    compiled = any_sizes({name: values})[name]
    assert compiled == any_sizes({name: like})[name] and type(compiled) is type(values)
    assert [x is None or type(x) is float for x in compiled] == [x is None or type(x) is float for x in values]


@pytest.mark.parametrize(
    ("name", "values", "unlike"),
    [
        ("q_at", (0, 1, 64, None), (0, 2, 64, None)),
        ("q_strides", (4096, 4096, 128), (4096, 4096, 40)),
        ("lse_strides", (4096, 4096, 1), (4096, 4096, 0)),
        ("mask", (1, None), (1, 0)),
        ("drop", (2**31,), (2**31 - 1,)),  # the compiled kernel takes 32 bits
    ],
)
def test_numbers_in_tuples_that_select_a_kernel(name: str, values: tuple[Any, ...], unlike: tuple[Any, ...]) -> None:
    assert any_sizes({name: values}) != any_sizes({name: unlike})


def test_other_arguments_are_compiled_as_they_are() -> None:
    x = tensor()
    arguments = dict(x=x, rows=16, factor=0.5, descriptor=descriptor(x, 8, 64, 64), mask=(x, None, True))
    assert any_sizes(arguments) == arguments


KEYS_OF_ALL_KERNELS = """
import importlib, json, pathlib, sys
from triton.runtime.jit import JITFunction
from ringspan.kernels.runtime import triton_compat

root = pathlib.Path(triton_compat.__file__).parents[1] / "backends"
functions = {}
for path in sorted(root.glob("*/*.py")):
    module = importlib.import_module(f"ringspan.kernels.backends.{path.parent.name}.{path.stem}")
    functions.update((f"{module.__name__}.{name}", f) for name, f in vars(module).items() if isinstance(f, JITFunction))
for name in sorted(functions, reverse=sys.argv[1] == "reversed"):
    if sys.argv[2] == "callees":
        triton_compat.hash_callees(functions[name])
    functions[name].cache_key
print(json.dumps({name: f.cache_key for name, f in functions.items()}))
"""


def test_cache_keys_do_not_depend_on_the_order_of_compiling() -> None:
    """Otherwise a run compiles kernels again that `ringspan warmup` or another process put into the cache on disk."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    def keys(order: str, callees: str) -> dict[str, str]:
        command = [sys.executable, "-c", KEYS_OF_ALL_KERNELS, order, callees]
        return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert keys("sorted", "callees") == keys("reversed", "callees")
    # from Triton 3.8 on also without hash_callees
    assert (keys("sorted", "none") == keys("reversed", "none")) == (VERSION >= (3, 8))
