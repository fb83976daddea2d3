"""Launch Triton and Gluon kernels with little host time: `Launch`, and a cache of compiled launches.

Computing a kernel's arguments from tensors and rules, and looking up the compiled kernel for them, takes more host time than
the rest of a call. Both depend on the tensors' signatures only (shape, strides, dtype, device, alignment), not on contents or
addresses. A launch whose kernel, rules and signatures were launched earlier takes the compiled kernel and the arguments from
the cache, and replaces the tensors:

    Launch(kernel, make, tensors, rules)()      miss: make(**tensors, **rules) → compile, run, cache
                                                hit:  cached arguments with these tensors → run
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MAX_LAUNCHES = 4096  # the cache is cleared when it holds this many
Arguments = tuple[int, dict[str, Any]]  # number of thread blocks, and the kernel's arguments by name


class CachedLaunch(NamedTuple):
    """A compiled launch and its arguments without tensors."""

    compiled: Any
    programs: int
    device: torch.device
    arguments: list[Any]
    tensor_arguments: list[tuple[int, str]]  # index and name of each argument that is a launch's own tensor

    def launch(self, tensors: dict[str, Any]) -> None:
        """Launch the kernel on these tensors, whose signatures must be those of the cached launch."""
        arguments = self.arguments.copy()
        for index, name in self.tensor_arguments:
            arguments[index] = _rebase(arguments[index], tensors[name])
        with _on_device(self.device):
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
        with _on_device(device):
            compiled = self.kernel[(programs,)](**arguments)
        if compiled is None:  # Triton's interpreter compiles nothing
            return None
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        names = self.kernel.arg_names
        tensor_arguments = [
            (i, name) for i, name in enumerate(names) if self.tensors.get(name) is not None and arguments[name] is not None
        ]
        for _, name in tensor_arguments:  # the cache must not keep tensors alive
            arguments[name] = _rebase(arguments[name], None)
        cached = CachedLaunch(compiled, programs, device, [arguments[name] for name in names], tensor_arguments)
        _launches[key] = cached
        return cached


def _signature(values: Iterable[Any]) -> list[Any]:
    """Return everything that arguments and compilation depend on: signatures of tensors, also in tuples, and other values."""
    return [
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)
        if isinstance(x, Tensor)
        else tuple(_signature(x))
        if isinstance(x, tuple)
        else x
        for x in values
    ]


def _has_memory(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_has_memory(x) for x in argument)
    return isinstance(argument, Tensor | TensorDescriptor)


def _base(argument: Any) -> Any:
    return argument.base if isinstance(argument, TensorDescriptor) else argument


def _rebase(argument: Any, tensor: Any) -> Any:
    """Return the argument for another tensor: the tensor itself, or the same descriptor of it."""
    if not isinstance(argument, TensorDescriptor):
        return tensor
    descriptor = TensorDescriptor.__new__(TensorDescriptor)  # __init__ would repeat checks that depend on the signature only
    descriptor.__dict__ = argument.__dict__ | {"base": tensor}
    return descriptor


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
