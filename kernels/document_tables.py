"""Tables of packed documents, from ids or from cumulative lengths: first and last visible row, for each position.

    one table      position p                 first and last row of the document at p, for queries and keys alike
    joint table    0 … Sk − 1, a key          first and last query that attends to it, as positions
                   query_origin(Sk) + i        first and last key that query i attends to

Kernels read one pair of tables by position. If the queries and the keys of a document differ in number, they need two pairs;
the joint table holds both, because queries and keys get different positions in it. Rows align at a document's end: the last
query is at the last key. Causal rule and window are part of the entries, so kernels get none. Bounds never decrease within
the keys, nor within the queries, also where a document has no row on one side.

All functions run on the device of their arguments without a host sync, with a number of operations that does not depend on the
number of documents.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]  # first and last row of each position, int32
# Positions between the last key and the first query. A kernel reads entries past the last row of a tensor up to the end of its
# tile, which has fewer rows. They are empty intervals after all rows, as positions past the end of the table are.
GAP = 512
SENTINEL = -1  # "unbounded" for left and right


class Counterparts(NamedTuple):
    """For each row of one tensor, the rows of its document in the other tensor. int64, (rows,) or (B, rows)."""

    end: Tensor  # last row of the document in the row's own tensor
    first: Tensor  # first row of the document in the other tensor
    last: Tensor  # first − 1 if there is none


def query_origin(num_keys: int) -> int:
    """Return the position of query 0 in a joint table. Triton compiles a kernel again for integers that 16 does not divide."""
    return -(-num_keys // 128) * 128 + GAP


def tables_from_ids(ids: Tensor) -> Tables:
    """Return the table of documents with these ids, (S,) or (B, S). A negative id gets an empty interval."""
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    if length == 0:
        return index.to(torch.int32), index.to(torch.int32)
    edge = torch.ones_like(ids[..., :1], dtype=torch.bool)
    change = ids[..., 1:] != ids[..., :-1]
    starts = torch.where(torch.cat([edge, change], -1), index, 0).cummax(-1).values
    ends = torch.where(torch.cat([change, edge], -1), index, length).flip(-1).cummin(-1).values.flip(-1)
    ends = torch.where(ids < 0, starts - 1, ends)
    return starts.to(torch.int32).contiguous(), ends.to(torch.int32).contiguous()  # kernels use one stride for both


def tables_from_boundaries(boundaries: Tensor, length: int) -> Tables:
    """Return the table of `length` rows. Document d has rows boundaries[d] … boundaries[d + 1] − 1; int32, (documents + 1,)."""
    document = _document_of_rows(boundaries, length)
    return boundaries[document], boundaries[document + 1] - 1


def joint_tables_from_boundaries(
    q_boundaries: Tensor, k_boundaries: Tensor, num_queries: int, num_keys: int, left: int, right: int
) -> Tables:
    """Return the joint table of documents with these boundaries, int32, (documents + 1,)."""

    def counterparts(own: Tensor, other: Tensor, length: int) -> Counterparts:
        document = _document_of_rows(own, length)
        tables = own[document + 1] - 1, other[document], other[document + 1] - 1
        return Counterparts(*(x.to(torch.int64) for x in tables))

    queries = counterparts(q_boundaries, k_boundaries, num_queries)
    return _joint_tables(queries, counterparts(k_boundaries, q_boundaries, num_keys), left, right)


def joint_tables_from_ids(q_ids: Tensor, k_ids: Tensor, left: int, right: int) -> Tables:
    """Return the joint table of documents with these ids, (S,) or (B, S), and (Sk,) or (B, Sk).

    A document is the rows with one id ≥ 0. Except for negative ids, padding, ids do not decrease.
    """
    if q_ids.ndim != k_ids.ndim or q_ids.shape[:-1] != k_ids.shape[:-1]:
        batch = torch.broadcast_shapes(q_ids.shape[:-1], k_ids.shape[:-1])
        q_ids, k_ids = q_ids.expand(*batch, -1), k_ids.expand(*batch, -1)
    queries, keys = _IdRanges(q_ids), _IdRanges(k_ids)
    return _joint_tables(queries.counterparts(keys), keys.counterparts(queries), left, right)


def ids_are_ordered(ids: Tensor) -> Tensor:
    """Return whether ids do not decrease and no padding is within a document: a bool tensor ()."""
    ranges = _IdRanges(ids)
    in_order = (ids < 0) | (ranges.before == ids)
    split = (ids < 0) & (ranges.before == ranges.after)
    return (in_order & ~split).all()


class _IdRanges:
    """Ids for searches: their running maximum, and their running minimum from the end. Both are sorted."""

    def __init__(self, ids: Tensor) -> None:
        ids = ids.to(torch.int64)
        self.is_padding = ids < 0
        self.before = torch.where(self.is_padding, -1, ids)
        self.after = torch.where(self.is_padding, torch.iinfo(torch.int64).max, ids)
        if ids.shape[-1]:
            self.before = self.before.cummax(-1).values
            self.after = self.after.flip(-1).cummin(-1).values.flip(-1)
        self.before, self.after = self.before.contiguous(), self.after.contiguous()

    def counterparts(self, other: "_IdRanges") -> Counterparts:
        """Padding has no counterpart: an empty range before the next document's rows."""
        end = torch.searchsorted(self.after, self.before, right=True) - 1
        last = torch.searchsorted(other.after, self.before, right=True) - 1
        first = torch.searchsorted(other.before, self.before)
        next_first = torch.searchsorted(other.before, self.before, right=True)
        return Counterparts(
            torch.where(self.is_padding, torch.arange(end.shape[-1], device=end.device), end),
            torch.where(self.is_padding, next_first, first),
            torch.where(self.is_padding, next_first - 1, last),
        )


def _document_of_rows(boundaries: Tensor, length: int) -> Tensor:
    """Return the document of each row; documents of length 0 have none. Rows past the last boundary count to the last one."""
    index = torch.arange(length, device=boundaries.device, dtype=boundaries.dtype)
    return torch.searchsorted(boundaries[1:].contiguous(), index, right=True).clamp(max=max(0, len(boundaries) - 2))


def _joint_tables(queries: Counterparts, keys: Counterparts, left: int, right: int) -> Tables:
    visible_keys, attending_queries = _intervals(queries, left, right), _intervals(keys, right, left)
    num_keys = keys.end.shape[-1]
    origin = query_origin(num_keys)
    length = origin + queries.end.shape[-1]
    gap = keys.end.new_full((*keys.end.shape[:-1], origin - num_keys), length)
    starts = torch.cat([attending_queries[0] + origin, gap, visible_keys[0]], -1)
    ends = torch.cat([attending_queries[1] + origin, gap - 1, visible_keys[1]], -1)
    return starts.to(torch.int32), ends.to(torch.int32)


def _intervals(rows: Counterparts, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Return the first and last visible row of the other tensor, up to `before` and `after` rows away; empty: first − 1."""
    p = torch.arange(rows.end.shape[-1], device=rows.end.device) + rows.last - rows.end
    lo = rows.first if before == SENTINEL else torch.maximum(rows.first, p - before)
    hi = rows.last if after == SENTINEL else torch.minimum(rows.last, p + after)
    return lo, torch.maximum(hi, rows.first - 1)
