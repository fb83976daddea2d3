"""How a Triton kernel is launched, many thousand times, with as little work for the host as can be.

Triton looks at every argument of a launch to find the kernel that was compiled for such arguments, which takes longer than
all that we do. A launch like one before, in all but what its tensors hold and where they are, goes straight to that kernel.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REMEMBERED = 4096  # launches; then memory is emptied
_compiled: dict[Any, Any] = {}


@dataclass
class Launch:
    """A kernel, its grid and its arguments by name: run it, or compile it ahead of time without a GPU.

    It runs once: memory that a kernel counts in is among the arguments, and only new memory begins at 0.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    ran: bool = False

    def __call__(self) -> None:
        assert not self.ran, "a launch runs once: make another"
        self.ran = True
        if 0 in self.grid:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, Tensor))
        with _on(device):
            kind = id(self.kernel), device, *self.arguments, *_forms(self.arguments.values())
            compiled = _compiled.get(kind)
            if compiled is not None:
                compiled[(*self.grid, 1, 1)](*[self.arguments[name] for name in self.kernel.arg_names])
                return
            compiled = self.kernel[self.grid](**self.arguments)
            if compiled is not None:  # Triton's interpreter compiles nothing
                if len(_compiled) >= REMEMBERED:
                    _compiled.clear()
                _compiled[kind] = compiled


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()


_PLAIN = {int, float, bool, str, type(None)}


def _form(x: Any) -> Any:
    """All of an argument that Triton's choice of a kernel can depend on; of numbers, the number."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return _forms(x)
    return getattr(x, "form", x)  # of the TMA's descriptors


def _forms(given: Iterable[Any]) -> tuple[Any, ...]:
    return tuple([x if type(x) in _PLAIN else _form(x) for x in given])
