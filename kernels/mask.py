"""A mask is an interval: the query at position p sees the keys lo(p) … hi(p), and nothing else.

    lo(p) = max(0, document start, p - left)         hi(p) = min(Sk - 1, document end, p + right)

`causal` is right = 0. A window w means left = w - 1, and right = w - 1 unless causal; (left, right) is taken as given. A
causal prefix lets everyone see its first keys: hi = max(hi, min(prefix - 1, document end)). Documents are runs of equal
ids; a negative id is padding, which sees nothing and is seen by nothing (its interval is empty).

A query's position is where it stands among the keys. The last query stands at the last key, whether there are fewer queries
than keys or more (then the first stand at negative positions).

Why intervals and not a matrix or a function: lo and hi never decrease with the position, so the first and the last row of a
tile bound everything the tile can see. Tiles outside are never loaded, tiles inside need no compare, and the queries that
see a key form an interval too, which is all that the backward needs. Two numbers a row instead of S.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.segments import POSITION_LIMIT, Segment, reach

NO_LIMIT = 2**31 - 1  # the value of hi where only the number of keys bounds it
SENTINEL = -1  # "no left" or "no right" in Bounds


class Bounds(NamedTuple):
    """A mask as operators and kernels take it: three numbers and three small tensors, these on the device of q."""

    left: int  # SENTINEL: unbounded
    right: int  # SENTINEL: unbounded; 0 when causal
    padded: bool  # whether ids may be negative; assumed of ids on a GPU, where to look would mean to wait
    starts: Tensor | None  # int32 (S,) or (B, S): first position of each position's document
    ends: Tensor | None  # int32, last position; starts - 1 for padding
    prefix: Tensor | None  # int32 (1,) or (B,)


class Mask:
    """Which keys a query sees. All rules compose, but a prefix and a window; see the module's first lines for their meaning."""

    def __init__(
        self,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        documents: Tensor | Sequence[int] | None = None,
        prefix: int | Tensor | None = None,
    ) -> None:
        if not isinstance(causal, bool):
            raise ValueError(f"causal={causal!r} must be True or False (a window is given by name: window=…)")
        self.causal = causal
        left, right = _window(window, self.causal)
        if prefix is not None and (not self.causal or window is not None):
            raise ValueError(
                f"prefix needs causal=True and no window (given causal={causal}, window={window}): "
                "a prefix widens a causal mask; without causal every key is seen anyway"
            )
        self.window = window
        with torch.inference_mode(False):  # a tensor of inference mode could never be saved for a backward
            self.documents = None if documents is None else _documents(documents)
            self.prefix = None if prefix is None else _prefix(prefix)
            starts, ends = (None, None) if self.documents is None else _runs(self.documents)
        padded = self.documents is not None and _may_be_negative(self.documents)
        self._bounds = Bounds(left, right, padded, starts, ends, self.prefix)
        self._elsewhere: dict[torch.device, Bounds] = {}

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        prefix: int | Tensor | None = None,
    ) -> "Mask":
        """Documents packed one after another, given by their lengths: `Mask.from_lengths([512, 3584], causal=True)`."""
        counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        if not isinstance(counts, list | tuple) or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"lengths must be a flat list of integers >= 0, not {lengths}: give ids for a batch")
        ids = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(counts)]
        return cls(causal, window, torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32), prefix)

    def bounds(self, device: torch.device | str = "cpu") -> Bounds:
        """The mask's numbers on a device, moved there once and without waiting for it."""
        tensors = [t for t in self._bounds[3:] if t is not None]
        if not tensors:
            return self._bounds
        device = torch.device(device)
        if all(t.device == device for t in tensors):
            return self._bounds
        if device not in self._elsewhere:
            with torch.inference_mode(False):
                self._elsewhere[device] = Bounds(*self._bounds[:3], *(_send(t, device) for t in self._bounds[3:]))
        return self._elsewhere[device]

    @classmethod
    def from_bounds(cls, bounds: Bounds) -> "Mask":
        """The other way: inside an operator a mask arrives as its numbers."""
        mask = cls.__new__(cls)  # __init__ would work out what is known, in every call
        mask.causal, mask.window = bounds.right == 0, None if bounds.left == SENTINEL else (bounds.left, bounds.right)
        mask.documents, mask.prefix = None, bounds.prefix
        mask._bounds, mask._elsewhere = bounds, {}
        return mask

    def coarse(self) -> "Mask":
        """A mask that lets through at least as much and is known on the CPU: for choosing tiles without waiting for a GPU.

        Documents and prefixes that were given on another device are left out: kernels apply them, but choose no tiles by them.
        """
        left, right, padded, *tensors = self._bounds
        if all(t is None or t.device.type == "cpu" for t in tensors):
            return self
        return Mask.from_bounds(Bounds(left, right if tensors[2] is None else SENTINEL, padded, None, None, None))

    @property
    def has_padding(self) -> bool:
        """Whether some position may see nothing and be seen by nothing; on a GPU nobody waits to look, so there it may."""
        return self._bounds.padded

    @property
    def length(self) -> int | None:
        """How many positions the documents describe, if there are any."""
        starts = self._bounds.starts
        return None if starts is None else starts.shape[-1]

    @property
    def documents_batch(self) -> int | None:
        """The batch size that documents are given for; None if one row serves any."""
        starts = self._bounds.starts
        return starts.shape[0] if starts is not None and starts.ndim == 2 and starts.shape[0] != 1 else None

    @property
    def prefix_batch(self) -> int | None:
        prefix = self._bounds.prefix
        return prefix.shape[0] if prefix is not None and prefix.shape[0] != 1 else None

    def hides_nothing(self, q_at: Sequence[Segment], k_at: Sequence[Segment]) -> bool:
        """Whether all queries of these segments see all keys of those; no, if only documents or a prefix could tell."""
        left, right, _, starts, _, _ = self._bounds
        if starts is not None or not q_at or not k_at:
            return False
        (first_query, last_query), (first_key, last_key) = reach(q_at), reach(k_at)
        return (left == SENTINEL or first_key >= last_query - left) and (right == SENTINEL or last_key <= first_query + right)

    def interval(self, positions: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        """lo and hi (int64) of queries at these positions: (n,), or (B, n) if documents or prefix differ within a batch."""
        left, right, _, starts, ends, prefix = self.bounds(positions.device)
        p = positions.to(torch.int64)
        first, last = _document(p, starts, ends)
        lo = first.clamp(min=0) if left == SENTINEL else torch.maximum(first, p - left).clamp(min=0)
        hi = last
        if right != SENTINEL:
            reach = p + right
            if prefix is not None:
                reach = torch.maximum(reach, prefix.to(torch.int64)[:, None] - 1)
            hi = torch.minimum(last, reach)
        if num_keys is not None:
            hi = hi.clamp(max=num_keys - 1)
        lo, hi = torch.broadcast_tensors(lo, hi)
        return (lo[0], hi[0]) if lo.ndim == 2 and lo.shape[0] == 1 else (lo, hi)

    def visible(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """bool (B or 1, n, m): who sees whom, written out. For the reference and for tests."""
        lo, hi = self.interval(q_positions)
        seen = (k_positions >= lo[..., None]) & (k_positions <= hi[..., None])
        return seen if seen.ndim == 3 else seen[None]

    def __repr__(self) -> str:
        shape = None if self._bounds.starts is None else tuple(self._bounds.starts.shape)
        return f"Mask(causal={self.causal}, window={self.window}, documents={shape}, prefix={self.prefix})"


def _window(window: int | tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    if window is None:
        return SENTINEL, 0 if causal else SENTINEL
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"window={window}: a window counts the query itself, so it must be >= 1 (None for no window)")
        left, right = window - 1, window - 1
    elif isinstance(window, tuple | list) and len(window) == 2 and all(type(w) is int for w in window):
        left, right = window
        if left < 0 or right < 0:
            raise ValueError(f"window={window}: left and right must be >= 0 (a large number for no bound on one side)")
    else:
        raise ValueError(f"window={window!r} must be an int or a pair of ints (left, right)")
    return min(left, POSITION_LIMIT), 0 if causal else min(right, POSITION_LIMIT)


def _documents(documents: Tensor | Sequence[int]) -> Tensor:
    try:
        ids = documents if isinstance(documents, Tensor) else torch.as_tensor(documents)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"documents must be integer ids of shape (S,) or (B, S): {error}") from None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"documents must hold integer ids, not {ids.dtype}: use documents.long()")
    if ids.ndim not in (1, 2):
        raise ValueError(f"documents must have shape (S,) or (B, S), not {tuple(ids.shape)}")
    return ids


def _prefix(prefix: int | Tensor) -> Tensor:
    if isinstance(prefix, Tensor):
        if prefix.is_floating_point() or prefix.is_complex() or prefix.dtype == torch.bool or prefix.ndim > 1:
            raise ValueError(f"prefix must be an int or integers of shape (B,), not {prefix.dtype} {tuple(prefix.shape)}")
        if prefix.device.type == "cpu" and not torch.compiler.is_compiling() and bool((prefix < 0).any()):
            raise ValueError(f"prefix={prefix.tolist()} must be >= 0: 0 is no prefix")
        return prefix.reshape(-1).clamp(max=POSITION_LIMIT).to(torch.int32, copy=True)
    if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(f"prefix={prefix!r} must be an int >= 0 or a tensor of shape (B,)")
    return torch.tensor([min(prefix, POSITION_LIMIT)], dtype=torch.int32)


def _may_be_negative(ids: Tensor) -> bool:
    return torch.compiler.is_compiling() or ids.device.type != "cpu" or bool((ids < 0).any())


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last position of the run of equal ids around each position; an empty interval for negative ids."""
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    if length == 0:
        return index.to(torch.int32), index.to(torch.int32)
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    change = ids[..., 1:] != ids[..., :-1]
    starts = torch.where(torch.cat([edge, change], -1), index, 0).cummax(-1).values
    ends = torch.where(torch.cat([change, edge], -1), index, length).flip(-1).cummin(-1).values.flip(-1)
    ends = torch.where(ids < 0, starts - 1, ends)
    return starts.to(torch.int32).contiguous(), ends.to(torch.int32).contiguous()  # kernels know one stride, of both


def _document(p: Tensor, starts: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """The document around each position; positions that no document describes get an empty interval."""
    if starts is None or ends is None:
        return torch.zeros_like(p), torch.full_like(p, NO_LIMIT)
    length = starts.shape[-1]
    if length == 0:
        return torch.zeros_like(p), torch.full_like(p, -1)
    at = p.clamp(0, length - 1)
    first, last = starts[..., at].to(torch.int64), ends[..., at].to(torch.int64)
    first = torch.where(p >= length, length, first)
    last = torch.where(p >= length, length - 1, torch.where(p < 0, -1, last))
    return first, last


def _send(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        tensor = tensor.pin_memory()  # from pageable memory the copy would wait (and Dynamo cannot trace this)
    return tensor.to(device, non_blocking=device.type == "cuda")  # on the CPU it has to be there before it is read
