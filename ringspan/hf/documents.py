"""Document ids from the forms in which batches describe packing and padding: position_ids, cu_seqlens, attention_mask.

Equal neighbours form one document and a negative id is padding, as in `Mask`. Each function reads values, so it synchronises
with a GPU; a forward does so once, a layer never.
"""

from itertools import pairwise

import torch
from torch import Tensor


def documents_from_positions(position_ids: Tensor) -> Tensor | None:
    """Return ids (B, S) of documents that start where position_ids (B, S) do not grow by one; None if no row has two."""
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    return starts.cumsum(-1) if bool(starts.any()) else None


def documents_from_cu_seqlens(cu_seqlens: Tensor, length: int, position_ids: Tensor | None) -> Tensor:
    """Return ids (1, S) of documents that end at cu_seqlens.

    Args:
        cu_seqlens: (N + 1,) integers from 0 to `length`, ascending.
        length: Number of tokens.
        position_ids: (1, S) positions that restart with each document.

    Raises:
        ValueError: The offsets do not describe `length` tokens, or positions are missing or do not restart.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seq_lens_q must be an int32 tensor, not {type(cu_seqlens).__name__}")
    offsets = cu_seqlens.tolist()
    if cu_seqlens.ndim != 1 or offsets[:1] != [0] or offsets[-1] != length or sorted(offsets) != offsets:
        raise ValueError(f"cu_seq_lens_q={offsets} does not describe {length} tokens: it must ascend from 0 to {length}")
    starts = sorted({start for start, end in pairwise(offsets) if start < end})
    if position_ids is None or position_ids.shape[0] != 1 or bool(position_ids[0, starts].any()):
        found = None if position_ids is None else position_ids[:, starts].tolist()
        raise ValueError(
            f"position_ids at the starts of documents are {found} with cu_seq_lens_q={offsets}: packing needs one row of "
            "positions that restart at 0 with each document"
        )
    ids = torch.zeros(length, dtype=torch.int64)
    ids[starts] = 1
    return ids.cumsum(0)[None].to(cu_seqlens.device)


def join_documents(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return ids of documents that end where either ends. Padding of either is padding."""
    if a is None or b is None:
        return b if a is None else a
    a, b = torch.broadcast_tensors(a, b)
    change = (a[:, 1:] != a[:, :-1]) | (b[:, 1:] != b[:, :-1])
    ids = torch.cat([torch.zeros_like(a[:, :1]), change.cumsum(-1)], -1)
    return ids.masked_fill((a < 0) | (b < 0), -1)


def check_no_holes(attention_mask: Tensor) -> bool:
    """Return whether attention_mask (B, S), bool, has no padding.

    Raises:
        ValueError: Padding lies between valid tokens of a row.
    """
    first = attention_mask[:, :1].to(torch.int64)
    runs = first.sum(-1) + (attention_mask[:, 1:] & ~attention_mask[:, :-1]).sum(-1)  # runs of valid tokens in each row
    full, holes = torch.stack([attention_mask.all(), (runs > 1).any()]).tolist()
    if holes:
        raise ValueError(
            "attention_mask has padding between valid tokens: visible keys are no interval; pad a row at its ends only "
            "(padding_side='left' for generate())"
        )
    return bool(full)
