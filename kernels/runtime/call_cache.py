"""Cache of validated block calls, so that a repeated call skips validation and the construction of a Block.

A ring repeats the same calls with other tensors, some thousand times a second. The key of a call consists of the signatures
of its tensors (shape, strides, dtype, device, alignment), the segments, the numbers of the mask and the options. Contents and
addresses of tensors are not part of it. A cached call may also hold the backend's `replay`, a shorter path to the kernel.
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
MAX_CALLS = 4096  # the cache is cleared when it holds this many
FULL_MASK = Mask()
_CACHEABLE_OPTIONS = {float, int, bool, str, type(None)}
Positions = tuple[Segments, Segments]  # segments of the queries and of the keys


class CachedCall:
    """A validated call: its segments, and the backend's replay if it has one."""

    def __init__(self, at: Positions) -> None:
        self.at = at
        self.replay: Replay | None = None
        # Replaces the mask's own bounds in a replay. A call that can be replayed has its mask in the key.
        self.bounds: Bounds | None = None


_calls: dict[Any, CachedCall] = {}


def lookup(key: Any, validate: Callable[[], Positions]) -> CachedCall:
    """Return the cached call with this key, or validate the call and cache it. torch.compile caches nothing."""
    if torch.compiler.is_compiling():
        return CachedCall(validate())
    call = _calls.get(key)
    if call is None:
        call = CachedCall(validate())
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def find(key: Any) -> CachedCall | None:
    """Return the cached call with this key."""
    return _calls.get(key)


def tensor_signatures(tensors: Iterable[Any] | None) -> Any:
    """Return each tensor's signature; for anything else its type, which validation rejects."""
    if tensors is None:
        return None
    compiling = torch.compiler.is_compiling()
    return tuple([tensor_signature(x, compiling) if isinstance(x, Tensor) else type(x) for x in tensors])


def tensor_signature(x: Tensor, compiling: bool = False) -> tuple[Any, ...]:
    """Return what validation and kernels depend on: shape, strides, dtype, device, and whether 16 divides the address."""
    is_even = not compiling and not isinstance(x, FakeTensor) and x.data_ptr() % 16 == 0
    return x.shape, x.stride(), x.dtype, x.device, is_even


def call_key(q: Tensor, mask: Mask | None, seed: Any, *options: Any) -> tuple[Bounds | None, Any]:
    """Return (mask bounds, key of the mask and the options).

    The key includes the options' types, so that True and 1 differ. It is None when a replay is not possible: with a seed, or
    with an option that is not a plain Python value. Such calls build a Block and validate their options every time.
    """
    if not (isinstance(mask, Mask | None) and isinstance(q, Tensor)):
        return None, None
    bounds = (FULL_MASK if mask is None else mask).bounds(q.device)
    types = tuple(map(type, options))
    if seed is not None or not _CACHEABLE_OPTIONS.issuperset(types):
        return bounds, None
    return bounds, (bounds[:3], tensor_signatures(bounds.tensors) if bounds.has_tensors else None, options, types)


def freeze_segments(at: Iterable[Segment] | None) -> Any:
    """Copy segments into tuples. An iterator can be read once only, and both the key and the validation read them."""
    return None if at is None else tuple(map(tuple, at))
