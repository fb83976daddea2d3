"""Memory format of transfers: tensors whose first dimension is rows, so that a row range is contiguous memory.

K and V are two such tensors, (rows, B, Hkv, D) and (rows, B, Hkv, Dv). At batch size 1 a rank's K and V have this format
already, and sending copies nothing. Gradients share one tensor, (rows, B, Hkv, D + Dv): one message, which the receiver needs
not rearrange. Kernels read and write all of them through views.
"""

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]  # tensors that move together, row by row


def rows_first(x: Tensor) -> Tensor:
    """Return a view with the first two dimensions swapped: (B, rows, H, D) ⇄ (rows, B, H, D)."""
    return x.transpose(0, 1)


def contiguous_rows(rows: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous, else a copy.

    The copy moves elements of 16 bytes where alignment permits, because a copy of small elements is slow.
    """
    if rows.is_contiguous():
        return rows
    offsets = rows.storage_offset(), *rows.stride()[:-1], rows.shape[-1]
    is_aligned = rows.stride(-1) == 1 and not any(n * rows.itemsize % 16 for n in offsets)
    return rows.view(torch.complex128).contiguous().view(rows.dtype) if is_aligned else rows.contiguous()


def new_rows(rows: int, k: Tensor, v: Tensor) -> Rows:
    """Allocate K and V buffers for `rows` rows; k and v are (B, n, Hkv, D) and (B, n, Hkv, Dv)."""
    return tuple(x.new_empty((rows, x.shape[0], *x.shape[2:])) for x in (k, v))


def split_gradients(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return views dk (B, rows, Hkv, D) and dv (B, rows, Hkv, Dv) of packed gradients (rows, B, Hkv, D + Dv); width = D."""
    gradients = packed.transpose(0, 1)
    return gradients[..., :width], gradients[..., width:]
