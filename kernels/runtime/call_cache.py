"""What was asked before: calls of the block functions that passed their checks, and how to do the same again.

A ring asks the same of other tensors again and again, some thousand times a second. A call is known by what its tensors look
like, but not by what they hold or where they are, and by what it was told beside them, as far as that is plain numbers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ringspan.kernels.mask import Bounds, Mask
from ringspan.kernels.segments import Segment, Segments

# forward: (q, k, v, bounds of the mask, carry, out, lse); backward: (q, k, v, bounds, gradients)
Replay = Callable[..., Any]
REMEMBERED = 4096  # calls that passed; then memory is emptied
EVERYTHING = Mask()
_PLAIN = {float, int, bool, str, type(None)}
Positions = tuple[Segments, Segments]  # where queries and keys stand


class CachedCall:
    """A call that passed its checks, and how a backend does it again, if it has a shorter way than from a block."""

    def __init__(self, at: Positions) -> None:
        self.at = at
        self.replay: Replay | None = None
        # What `again` is given instead of the mask's own. (Calls whose masks this does not tell apart never ask `again`.)
        self.bounds: Bounds | None = None


_passed: dict[Any, CachedCall] = {}


def lookup(key: Any, check: Callable[[], Positions]) -> CachedCall:
    """The call, remembered by all that it depends on: a ring asks the same of other tensors again and again."""
    if torch.compiler.is_compiling():
        return CachedCall(check())
    passed = _passed.get(key)
    if passed is None:
        passed = CachedCall(check())
        if len(_passed) >= REMEMBERED:
            _passed.clear()
        _passed[key] = passed
    return passed


def tensor_signatures(tensors: Iterable[Any] | None) -> Any:
    """What the tensors are, but for their values and addresses; anything else by its type, which no check lets pass."""
    if tensors is None:
        return None
    compiling = torch.compiler.is_compiling()
    return tuple([tensor_signature(x, compiling) if isinstance(x, Tensor) else type(x) for x in tensors])


def tensor_signature(x: Tensor, compiling: bool) -> tuple[Any, ...]:
    somewhere = x.is_cuda and not compiling and not isinstance(x, FakeTensor)
    return x.shape, x.stride(), x.dtype, x.device, somewhere and x.data_ptr() % 16 == 0


def rules_of(q: Tensor, mask: Mask | None, seed: Any, *options: Any) -> tuple[Bounds | None, Any]:
    """The mask as kernels take it, and all that a call was told beside its tensors, by which one like it is known; True is not
    1 here. None if only a check can say what it was told: then nothing is done again without it."""
    if not (isinstance(mask, Mask | None) and isinstance(q, Tensor)):
        return None, None
    bounds = (EVERYTHING if mask is None else mask).bounds(q.device)
    kinds = tuple(map(type, options))
    if seed is not None or not _PLAIN.issuperset(kinds):
        return bounds, None
    return bounds, (bounds[:3], tensor_signatures(bounds[3:]), options, kinds)


def read_once(at: Iterable[Segment] | None) -> Any:
    """Read once: what is remembered and what is checked are then the same, whatever was given."""
    return None if at is None else tuple(map(tuple, at))
