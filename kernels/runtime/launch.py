"""How a kernel is launched, many thousand times, with as little work for the host as can be.

To work out a kernel's arguments from tensors and rules, and to find the kernel that Triton compiled for such arguments, takes
longer than everything else that a call does. Both depend on what the tensors look like, and not on what they hold or where
they are. So a launch that looks like one before takes that one's kernel and arguments, and puts its own tensors in.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

REMEMBERED = 4096  # launches; then memory is emptied
Arguments = tuple[int, dict[str, Any]]  # how many programs, and what they are given, by name


class CachedLaunch(NamedTuple):
    """A launch as it was made before: all but the tensors."""

    compiled: Any
    programs: int
    device: torch.device
    arguments: list[Any]
    own: list[tuple[int, str]]  # which arguments are of a launch's own tensors, and their names

    def launch(self, tensors: dict[str, Any]) -> None:
        arguments = self.arguments.copy()
        for index, name in self.own:
            arguments[index] = _of(arguments[index], tensors[name])
        with _on(self.device):
            self.compiled[self.programs, 1, 1](*arguments)


_known: dict[Any, CachedLaunch] = {}


@dataclass
class Launch:
    """A kernel and what it is to work on: run it, or compile it ahead of time without a GPU.

    make(**tensors, **rules) gives the arguments; it must look at nothing else. A tensor whose name an argument bears is that
    argument, or what that descriptor describes, unless the argument is None; tuples of numbers and tensors count as tensors.
    No other argument may hold a tensor: it would be the same one in all later launches.

    It runs once: memory that a kernel counts in is among the tensors, and only new memory begins at 0.
    """

    kernel: Any
    make: Callable[..., Arguments]
    tensors: dict[str, Any]
    rules: dict[str, Any]
    ran: bool = False

    def worked_out(self) -> Arguments:
        programs, given = self.make(**self.tensors, **self.rules)
        strangers = [name for name, x in given.items() if _has_memory(x) and _described(x) is not self.tensors.get(name)]
        assert not strangers, f"not the tensors of these names, so later launches would be given others: {strangers}"
        return programs, given

    def __call__(self) -> CachedLaunch | None:
        """What is known of it from now on, for callers that know by themselves when a launch looks like this one."""
        assert not self.ran, "a launch runs once: make another"
        self.ran = True
        looks = id(self.kernel), self.make, *self.rules.values(), *_signature(self.tensors.values())
        known = _known.get(looks)
        if known is not None:
            known.launch(self.tensors)
            return known
        programs, given = self.worked_out()
        if programs == 0:
            return None
        device = next(x.device for x in self.tensors.values() if isinstance(x, Tensor))
        with _on(device):
            compiled = self.kernel[(programs,)](**given)
        if compiled is None:  # Triton's interpreter compiles nothing
            return None
        if len(_known) >= REMEMBERED:
            _known.clear()
        names = self.kernel.arg_names
        own = [(i, name) for i, name in enumerate(names) if self.tensors.get(name) is not None and given[name] is not None]
        for _, name in own:  # to remember it is not to keep its memory
            given[name] = _of(given[name], None)
        known = _known[looks] = CachedLaunch(compiled, programs, device, [given[name] for name in names], own)
        return known


def _signature(given: Iterable[Any]) -> list[Any]:
    """What can be seen of tensors from outside, and of each only what arguments and compiling can depend on."""
    return [
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)
        if isinstance(x, Tensor)
        else tuple(_signature(x))
        if isinstance(x, tuple)
        else x
        for x in given
    ]


def _has_memory(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_has_memory(x) for x in argument)
    return isinstance(argument, Tensor | TensorDescriptor)


def _described(argument: Any) -> Any:
    return argument.base if isinstance(argument, TensorDescriptor) else argument


def _of(argument: Any, own: Any) -> Any:
    """The argument as it is for another launch's tensor."""
    if not isinstance(argument, TensorDescriptor):
        return own
    made = TensorDescriptor.__new__(TensorDescriptor)  # Triton's checks of it take long, and would say the same
    made.__dict__ = argument.__dict__ | {"base": own}
    return made


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
