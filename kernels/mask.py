"""Interval masks: the query at position p attends to the keys lo(p) … hi(p) and to no other key.

    lo(p) = max(0, document start, p − left)         hi(p) = min(Sk − 1, document end, p + right)

`causal` means right = 0. A window w means left = w − 1, and right = w − 1 unless causal; (left, right) is used as it is.
A causal prefix is visible to every query: hi = max(hi, min(prefix − 1, document end)). A document is a range of equal
ids. A negative id is padding: its interval is empty, and no query attends to it.

Positions count keys. The last query is at the position of the last key; with more queries than keys, the first queries
are at negative positions. With `key_documents` each document aligns in this way (see document_tables.py).

Intervals, because lo and hi never decrease with p: the first and the last row of a tile bound the keys that the tile
needs. Kernels skip tiles outside these bounds and compare nothing in tiles inside every row's interval. The queries that
attend to one key form an interval too, which the backward uses. A mask costs two numbers per row instead of Sk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.document_tables import (
    SENTINEL,
    Tables,
    ids_are_ordered,
    joint_tables_from_ids,
    query_origin,
    tables_from_ids,
)
from ringspan.kernels.segments import POSITION_LIMIT, Segment, one_segment, position_range
from ringspan.kernels.tensors import can_read

NO_LIMIT = 2**31 - 1  # hi where only the number of keys bounds it
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # torch cannot compare other unsigned integers


class Bounds(NamedTuple):
    """A mask in the form that operators and kernels take: three numbers, and three small tensors on q's device."""

    left: int  # SENTINEL: unbounded
    right: int  # SENTINEL: unbounded; 0 when causal
    has_padding: bool  # whether ids may be negative; assumed for ids on a GPU, because reading them needs a host sync
    starts: Tensor | None  # int32 (S,) or (B, S): first position of each position's document
    ends: Tensor | None  # int32, like starts: last position; starts - 1 for padding
    prefix: Tensor | None  # int32 (1,) or (B,)

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """starts, ends and prefix."""
        return self.starts, self.ends, self.prefix

    @property
    def has_tensors(self) -> bool:
        """Whether the mask has documents or a prefix."""
        return self.starts is not None or self.prefix is not None


class Mask:
    """The keys that each query attends to. All rules compose, except a prefix with a window.

    A mask holds its rules and document ids, not a matrix, and can be used for any number of calls. Tensors that a call
    needs on another device are copied there once, without a host sync.

    Args:
        causal: Let the query at position p attend to keys j ≤ p only.
        window: An int w ≥ 1 lets a query attend to keys within w − 1 positions: p − w < j < p + w, and j ≤ p if causal. A
            pair (left, right) of ints ≥ 0 gives p − left ≤ j ≤ p + right. None: no window.
        documents: Integer ids, (S,) or (B, S), for S queries and S keys. A query attends to keys of its own document.
            Equal neighbours form one document. Negative ids are padding: such rows attend to no key, and no query
            attends to them.
        prefix: Number of first keys that every query attends to, within its document: an int ≥ 0 or integers of shape
            (B,). Needs causal=True and no window.
        key_documents: Integer ids of the keys, (Sk,) or (B, Sk), if they differ from those of the queries. A document is
            then the rows with one id, and its last query is at the position of its last key. Apart from padding, ids may
            not decrease; a device-side assertion checks ids on a GPU. Not with a prefix, and not in a ring.

    Raises:
        ValueError: An argument has the wrong type, shape or range, or two arguments do not go together.

    Example:
        >>> Mask(causal=True, window=4096)
        >>> Mask.from_lengths([512, 3584], causal=True)
        >>> Mask(causal=True, documents=[0, 1], key_documents=[0] * 500 + [1] * 40)  # one new token for each of two
    """

    def __init__(
        self,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        documents: Tensor | Sequence[int] | None = None,
        prefix: int | Tensor | None = None,
        key_documents: Tensor | Sequence[int] | None = None,
    ) -> None:
        if not isinstance(causal, bool):
            raise ValueError(f"causal={causal!r} must be True or False (a window is passed by name: window=…)")
        self.causal = causal
        left, right = _window(window, self.causal)
        if prefix is not None and (not self.causal or window is not None):
            raise ValueError(
                f"prefix with causal={causal}, window={window}: a prefix widens a causal mask, so it needs causal=True and "
                "no window"
            )
        if key_documents is not None and documents is None:
            raise ValueError("documents=None with key_documents: pass the ids of the queries as documents")
        if key_documents is not None and prefix is not None:
            raise ValueError(f"prefix={prefix} with key_documents: a prefix needs the same documents for queries and keys")
        self.window = window
        self._lengths: tuple[int, int] | None = None
        has_padding, starts, ends = False, None, None
        with torch.inference_mode(False):  # autograd cannot save an inference tensor for a backward
            self.documents = None if documents is None else _documents(documents)
            self.key_documents = None if key_documents is None else _documents(key_documents, "key_documents")
            self.prefix = None if prefix is None else _prefix(prefix)
            if self.documents is not None:
                has_padding = _may_be_negative(self.documents)
            if self.documents is not None and self.key_documents is not None:
                has_padding = has_padding or _may_be_negative(self.key_documents)
                _check_pair(self.documents, self.key_documents)
                starts, ends = joint_tables_from_ids(self.documents, self.key_documents, left, right)
                left = right = SENTINEL  # the tables contain them
                self._lengths = self.documents.shape[-1], self.key_documents.shape[-1]
            elif self.documents is not None:
                starts, ends = tables_from_ids(self.documents)
        self._bounds = Bounds(left, right, has_padding, starts, ends, self.prefix)
        self._bounds_on: dict[torch.device, Bounds] = {}

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        prefix: int | Tensor | None = None,
    ) -> "Mask":
        """Return the mask of documents that are packed one after another.

        Args:
            lengths: Length of each document: a flat list or tensor of ints ≥ 0. S is their sum.
            causal: As in `Mask`.
            window: As in `Mask`.
            prefix: As in `Mask`.

        Raises:
            ValueError: `lengths` is not flat, or holds anything but ints ≥ 0.

        Example:
            >>> Mask.from_lengths([512, 3584], causal=True)
        """
        counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        if not isinstance(counts, list | tuple) or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"lengths={lengths} must be a flat list of integers >= 0: for a batch pass Mask(documents=ids)")
        ids = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(counts)]
        return cls(causal, window, torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32), prefix)

    def bounds(self, device: torch.device | str | None = None) -> Bounds:
        """Return the mask's numbers, with its tensors on `device`, or where they are.

        They are copied to a GPU once, without a host sync. A copy from a GPU to the CPU waits for the GPU.
        """
        bounds = self._bounds
        if device is None or not bounds.has_tensors:
            return bounds
        device = torch.device(device)
        if all(t is None or t.device == device for t in bounds.tensors):
            return bounds
        if device not in self._bounds_on:
            with torch.inference_mode(False):
                starts, ends, prefix = (_copy(t, device) for t in bounds.tensors)
                self._bounds_on[device] = bounds._replace(starts=starts, ends=ends, prefix=prefix)
        return self._bounds_on[device]

    @classmethod
    def from_bounds(cls, bounds: Bounds, lengths: tuple[int, int] | None = None) -> "Mask":
        """Return the mask with these bounds: the inverse of `bounds`, for operators, which receive numbers and tensors."""
        mask = cls.__new__(cls)  # __init__ would compute the bounds again in every call
        mask.causal, mask.window = bounds.right == 0, None if bounds.left == SENTINEL else (bounds.left, bounds.right)
        mask.documents, mask.key_documents, mask.prefix = None, None, bounds.prefix
        mask._bounds, mask._bounds_on, mask._lengths = bounds, {}, lengths
        return mask

    def with_tables(self, tables: Tables, lengths: tuple[int, int] | None = None) -> "Mask":
        """Return a mask with these rules and the documents of a table, none of them padding (see document_tables.py).

        Args:
            tables: First and last row of each position's document, int32.
            lengths: Number of queries and of keys, if it is a joint table. It contains the causal rule and the window.
        """
        left, right = (SENTINEL, SENTINEL) if lengths is not None else self._bounds[:2]
        mask = Mask.from_bounds(Bounds(left, right, False, *tables, None), lengths)
        mask.causal, mask.window = self.causal, self.window
        return mask

    def host_mask(self) -> "Mask":
        """Return a mask on the CPU that hides no key that this mask shows, so that the host can select tiles and blocks.

        Documents and prefixes on another device are left out: reading them would need a host sync. Kernels still apply
        them to the tiles that the host selects.
        """
        bounds = self._bounds
        if all(t is None or t.device.type == "cpu" for t in bounds.tensors):
            return self
        right = bounds.right if bounds.prefix is None else SENTINEL
        return Mask.from_bounds(Bounds(bounds.left, right, bounds.has_padding, None, None, None))

    @property
    def has_padding(self) -> bool:
        """Whether a position may be padding. Assumed for documents on a GPU, where reading ids needs a host sync."""
        return self._bounds.has_padding

    @property
    def length(self) -> int | None:
        """Number of queries that the documents describe; None without documents."""
        starts = self._bounds.starts
        return self._lengths[0] if self._lengths is not None else None if starts is None else starts.shape[-1]

    @property
    def key_length(self) -> int | None:
        """Number of keys that `key_documents` describe; None without them, where it equals `length`."""
        return None if self._lengths is None else self._lengths[1]

    def joint_segments(self, num_queries: int, num_keys: int) -> tuple[list[Segment] | None, list[Segment] | None]:
        """Return the positions of whole sequences in a joint table, as segments of queries and keys; else (None, None)."""
        starts = self._bounds.starts
        if starts is None or starts.shape[-1] == num_queries:  # a joint table is longer
            return None, None
        return one_segment(num_queries, query_origin(num_keys)), one_segment(num_keys)

    @property
    def documents_batch(self) -> int | None:
        """Batch size of the documents; None if one row serves any batch."""
        starts = self._bounds.starts
        return starts.shape[0] if starts is not None and starts.ndim == 2 and starts.shape[0] != 1 else None

    @property
    def prefix_batch(self) -> int | None:
        """Batch size of the prefix; None if one number serves any batch."""
        prefix = self._bounds.prefix
        return prefix.shape[0] if prefix is not None and prefix.shape[0] != 1 else None

    def covers_block(self, q_at: Sequence[Segment], k_at: Sequence[Segment]) -> bool:
        """Return whether every query of these segments attends to every key of those, so that kernels need no mask.

        Only causal and window rules are evaluated: with documents the result is False, and a prefix never makes it True.
        """
        bounds = self._bounds
        if bounds.starts is not None or not q_at or not k_at:
            return False
        (first_query, last_query), (first_key, last_key) = position_range(q_at), position_range(k_at)
        left_covers = bounds.left == SENTINEL or first_key >= last_query - bounds.left
        return left_covers and (bounds.right == SENTINEL or last_key <= first_query + bounds.right)

    def interval(self, positions: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the first and last visible key, lo and hi, of queries at these positions.

        Args:
            positions: (n,) integers. With `key_documents`, those of `joint_segments`.
            num_keys: Limit hi to num_keys − 1. None: no limit.

        Returns:
            lo and hi, int64, (n,); or (B, n) if documents or prefix differ within a batch. lo > hi: no visible key.
        """
        bounds = self.bounds(positions.device)
        p = positions.to(torch.int64)
        first, last = _document_of(p, bounds)
        lo = first.clamp(min=0) if bounds.left == SENTINEL else torch.maximum(first, p - bounds.left).clamp(min=0)
        hi = last
        if bounds.right != SENTINEL:
            last_visible = p + bounds.right
            if bounds.prefix is not None:
                last_visible = torch.maximum(last_visible, bounds.prefix.to(torch.int64)[:, None] - 1)
            hi = torch.minimum(last, last_visible)
        if num_keys is not None:
            hi = hi.clamp(max=num_keys - 1)
        lo, hi = torch.broadcast_tensors(lo, hi)
        return (lo[0], hi[0]) if lo.ndim == 2 and lo.shape[0] == 1 else (lo, hi)

    def visible(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the mask as a matrix: bool (B or 1, queries, keys). For the reference backend and for tests."""
        lo, hi = self.interval(q_positions)
        visible = (k_positions >= lo[..., None]) & (k_positions <= hi[..., None])
        return visible if visible.ndim == 3 else visible[None]

    def __repr__(self) -> str:
        starts = self._bounds.starts
        documents: Any = None if starts is None else tuple(starts.shape)
        if self._lengths is not None:
            documents = "{} queries, {} keys".format(*self._lengths)
        return f"Mask(causal={self.causal}, window={self.window}, documents={documents}, prefix={self.prefix})"


def _window(window: int | tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    if window is None:
        return SENTINEL, 0 if causal else SENTINEL
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"window={window}: a window includes the query itself, so it must be >= 1 (None for no window)")
        left, right = window - 1, window - 1
    elif isinstance(window, tuple | list) and len(window) == 2 and all(type(w) is int for w in window):
        left, right = window
        if left < 0 or right < 0:
            raise ValueError(f"window={window}: left and right must be >= 0 (a large number for no bound on one side)")
    else:
        raise ValueError(f"window={window!r} must be an int or a pair of ints (left, right)")
    return min(left, POSITION_LIMIT), 0 if causal else min(right, POSITION_LIMIT)


def _documents(documents: Tensor | Sequence[int], name: str = "documents") -> Tensor:
    try:
        ids = documents if isinstance(documents, Tensor) else torch.as_tensor(documents)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be integer ids of shape (S,) or (B, S): {error}") from None
    if ids is not documents and not ids.numel():
        ids = ids.long()  # torch makes floats of an empty list
    if ids.dtype not in INTEGERS:
        remedy = f"use {name}.long()" if ids is documents else "pass ints"
        raise ValueError(f"{name} must hold integer ids, not {ids.dtype}: {remedy}")
    if ids.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (S,) or (B, S), not {tuple(ids.shape)}")
    return ids


def _check_pair(documents: Tensor, key_documents: Tensor) -> None:
    """Validate ids of queries and keys that are matched by value."""
    if documents.device != key_documents.device:
        raise ValueError(
            f"key_documents are on {key_documents.device}, documents on {documents.device}: move one with .to(device)"
        )
    batches = {ids.shape[0] for ids in (documents, key_documents) if ids.ndim == 2 and ids.shape[0] != 1}
    if len(batches) > 1:
        raise ValueError(
            f"key_documents of shape {tuple(key_documents.shape)} with documents of shape {tuple(documents.shape)}: "
            "their batch sizes must be equal, or one of them has one row"
        )
    for name, ids in (("documents", documents), ("key_documents", key_documents)):
        message = (
            f"{name} decrease, or have padding within a document: with key_documents, a document is one range of rows, "
            "and ids ascend; number the documents in order"
        )
        ordered = ids_are_ordered(ids)
        if not can_read(ids):
            torch._assert_async(ordered, message)  # no host sync
        elif not ordered:
            raise ValueError(message)


def _prefix(prefix: int | Tensor) -> Tensor:
    if isinstance(prefix, Tensor):
        if prefix.dtype not in INTEGERS or prefix.ndim > 1:
            raise ValueError(
                f"prefix must be an int or integers of shape (B,), not {prefix.dtype} {tuple(prefix.shape)}: use prefix.long()"
            )
        if can_read(prefix) and bool((prefix < 0).any()):
            raise ValueError(f"prefix={prefix.tolist()} must be >= 0: 0 is no prefix")
        return prefix.reshape(-1).long().clamp(max=POSITION_LIMIT).to(torch.int32)
    if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(f"prefix={prefix!r} must be an int >= 0 or a tensor of shape (B,)")
    return torch.tensor([min(prefix, POSITION_LIMIT)], dtype=torch.int32)


def _may_be_negative(ids: Tensor) -> bool:
    return not can_read(ids) or bool((ids < 0).any())


def _document_of(p: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """First and last position of the document at each p; an empty interval outside all documents."""
    starts, ends = bounds.starts, bounds.ends
    if starts is None or ends is None:
        return torch.zeros_like(p), torch.full_like(p, NO_LIMIT)
    length = starts.shape[-1]
    if length == 0:
        return torch.zeros_like(p), torch.full_like(p, -1)
    index = p.clamp(0, length - 1)
    first, last = starts[..., index].to(torch.int64), ends[..., index].to(torch.int64)
    first = torch.where(p >= length, length, first)
    last = torch.where(p >= length, length - 1, torch.where(p < 0, -1, last))
    return first, last


def _copy(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        tensor = tensor.pin_memory()  # a copy from pageable memory would block the host (Dynamo cannot trace pin_memory)
    return tensor.to(device, non_blocking=device.type == "cuda")  # a copy to the CPU must finish before the host reads it
