"""Launch Triton and Gluon kernels with little host time: `Launch`, and a cache of compiled launches.

Computing a kernel's arguments from tensors and rules, and looking up the compiled kernel for them, takes more host time than
the rest of a call. Both depend on the tensors' signatures only (shape, strides, dtype, device, alignment), not on contents or
addresses. A launch whose kernel, rules and signatures were launched earlier takes the compiled kernel and the arguments from
the cache, and replaces the tensors:

    Launch(kernel, make, tensors, rules)()      miss: make(**tensors, **rules) → compile, run, cache
                                                hit:  cached arguments with these tensors → run

A miss rarely compiles, because kernels are compiled for any sequence length, batch size and number of documents:
`any_sizes` hides these numbers from Triton.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan.kernels.runtime.call_cache import tensor_signature
from ringspan.kernels.runtime.precompile import compile_kernel
from ringspan.kernels.tensors import on_device

MAX_LAUNCHES = 4096  # the cache is cleared when it holds this many
Arguments = tuple[int, dict[str, Any]]  # number of thread blocks, and the kernel's arguments by name
STEPS = (1, 4)  # indices of the steps in a tuple of segments: a step of 1 makes row · step and position // step free


class CachedLaunch(NamedTuple):
    """A compiled launch and its arguments without tensors."""

    compiled: Any
    programs: int
    device: torch.device
    arguments: list[Any]
    # index and name of each argument that is a launch's own tensor; for a descriptor also its fields other than `base`
    tensor_arguments: list[tuple[int, str, dict[str, Any] | None]]

    def launch(self, tensors: dict[str, Any]) -> None:
        """Launch the kernel on these tensors, whose signatures must be those of the cached launch."""
        arguments = self.arguments.copy()
        for index, name, fields in self.tensor_arguments:
            if fields is None:
                arguments[index] = tensors[name]
            else:
                descriptor = TensorDescriptor.__new__(TensorDescriptor)  # __init__ would repeat checks of the signature
                descriptor.__dict__ = {**fields, "base": tensors[name]}
                arguments[index] = descriptor
        with on_device(self.device):
            self.compiled[self.programs, 1, 1](*arguments)


_launches: dict[Any, CachedLaunch] = {}


@dataclass
class Launch:
    """A kernel with its inputs: call it to run the kernel, or compile it ahead of time without a GPU.

    `make(**tensors, **rules)` returns the arguments and must read nothing else. An argument with the name of a tensor is that
    tensor, a descriptor of it, or None; a tuple of numbers and tensors counts as a tensor. No other argument may hold a
    tensor, because later launches from the cache could not replace it.

    A Launch runs once. Memory in which a kernel counts is one of the tensors, and only new memory begins at 0.
    """

    kernel: Any
    make: Callable[..., Arguments]
    tensors: dict[str, Any]
    rules: dict[str, Any]
    ran: bool = False

    def make_arguments(self) -> Arguments:
        """Return the number of thread blocks and the kernel's arguments."""
        programs, arguments = self.make(**self.tensors, **self.rules)
        unknown = [name for name, x in arguments.items() if _has_memory(x) and _base(x) is not self.tensors.get(name)]
        assert not unknown, f"arguments={unknown} hold tensors that are not the tensors of these names: list them in tensors"
        return programs, arguments

    def __call__(self) -> CachedLaunch | None:
        """Run the kernel; return the cached launch, which callers may replay for tensors with the same signatures."""
        assert not self.ran, "a Launch runs once: make another"
        self.ran = True
        key = id(self.kernel), self.make, *self.rules.values(), *_signature(self.tensors.values())
        cached = _launches.get(key)
        if cached is not None:
            cached.launch(self.tensors)
            return cached
        programs, arguments = self.make_arguments()
        if programs == 0:
            return None
        device = next(x.device for x in self.tensors.values() if isinstance(x, Tensor))
        with on_device(device):
            compiled = self.compile(programs, arguments)
            if compiled is None:  # Triton's interpreter compiles nothing
                self.kernel[(programs,)](**arguments)
                return None
        if device.type == "meta":  # the caller only wanted to compile (warmup.py)
            return None
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        names, tensor_arguments = self.kernel.arg_names, []
        for i, name in enumerate(names):
            if self.tensors.get(name) is not None and arguments[name] is not None:
                argument, arguments[name] = arguments[name], None  # the cache must not keep tensors alive
                fields = {**argument.__dict__, "base": None} if isinstance(argument, TensorDescriptor) else None
                tensor_arguments.append((i, name, fields))
        cached = CachedLaunch(compiled, programs, device, [arguments[name] for name in names], tensor_arguments)
        _launches[key] = cached
        cached.launch(self.tensors)
        return cached

    def compile(self, programs: int, arguments: dict[str, Any]) -> Any:
        """Return the compiled kernel, which Triton takes from its cache where possible. Needs no GPU."""
        return compile_kernel(self.kernel, (programs,), any_sizes(arguments))


def any_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to compile a kernel for, which then takes any lengths, batch sizes and positions.

    Triton compiles a kernel again for an integer that is 1, that 16 divides, or that exceeds 32 bits. `do_not_specialize`
    excludes arguments from that (`ANY_SIZE` in common.py), but not the elements of tuples. Here other numbers replace them:

        strides of tensors     whether 16 divides all of them, which decides between 16-byte and narrow stores; 64 bits for
                               the batch, because a long sequence exceeds 32
        strides of statistics  (lse, delta, turns) only whether rows are consecutive
        segments               only whether a step is 1, and of two segments whether 16 divides all other numbers
        other tuples           nothing
    """
    return {
        name: _any_size(name, argument) if isinstance(argument, tuple) else argument for name, argument in arguments.items()
    }


def _any_size(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a tuple argument with its integers replaced (see any_sizes)."""
    if all(isinstance(x, tuple) for x in values):  # one for each of several tensors
        return tuple(_any_size(name, x) for x in values)
    if name.endswith("_strides"):
        *outer, last = values
        is_statistic = name.removeprefix("carry_").startswith(("lse", "delta", "turns"))
        is_aligned = all(stride % 16 == 0 for stride in (*outer, 0 if last == 1 else last))
        other = 16 if is_aligned and not is_statistic else 17
        result = [2**40 + other, *[other] * (len(outer) - 1), 1 if last == 1 else other]
    else:
        steps = STEPS if name in ("q_at", "k_at") else ()
        # one segment has the sequence's length, two are a ring's
        is_aligned = bool(steps) and all(type(x) is int and x % 16 == 0 for i, x in enumerate(values) if i not in steps)
        other = 16 if is_aligned else 17
        result = [
            (x if x == 1 and i in steps else other if abs(x) < 2**31 else 2**40 + 1) if type(x) is int else x
            for i, x in enumerate(values)
        ]
    named: Any = type(values)
    return named(*result) if hasattr(values, "_fields") else tuple(result)


def _signature(values: Iterable[Any]) -> list[Any]:
    """Return everything that arguments and compilation depend on: signatures of tensors, also in tuples, and other values."""
    return [
        tensor_signature(x) if isinstance(x, Tensor) else tuple(_signature(x)) if isinstance(x, tuple) else x for x in values
    ]


def _has_memory(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_has_memory(x) for x in argument)
    return isinstance(argument, Tensor | TensorDescriptor)


def _base(argument: Any) -> Any:
    return argument.base if isinstance(argument, TensorDescriptor) else argument
