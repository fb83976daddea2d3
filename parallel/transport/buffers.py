"""What travels: tensors whose first dimension is rows, so that any run of rows is one piece of memory.

K and V are two of them, (rows, B, Hkv, D) and (rows, B, Hkv, Dv). With one sequence in a batch that is how a rank has them
anyway, and nothing is copied to send them. Gradients lie side by side in one, (rows, B, Hkv, D + Dv): one message, with
nothing to sort when it comes. Kernels read and write all of them through views.
"""

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]  # tensors that move together, row by row


def by_rows(x: Tensor) -> Tensor:
    """The view (rows, B, H, D) of (B, rows, H, D), and the other way."""
    return x.transpose(0, 1)


def in_one_piece(rows: Tensor) -> Tensor:
    """Copied only where it is not yet; then as numbers of 16 bytes, if it has these, as one by one small ones take long."""
    if rows.is_contiguous():
        return rows
    begins = rows.storage_offset(), *rows.stride()[:-1], rows.shape[-1]
    large = rows.stride(-1) == 1 and not any(n * rows.itemsize % 16 for n in begins)
    return rows.view(torch.complex128).contiguous().view(rows.dtype) if large else rows.contiguous()


def new_rows(rows: int, k: Tensor, v: Tensor) -> Rows:
    return tuple(x.new_empty((rows, x.shape[0], *x.shape[2:])) for x in (k, v))


def unpack(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views (B, rows, Hkv, D) and (B, rows, Hkv, Dv) of gradients side by side."""
    rows = packed.transpose(0, 1)
    return rows[..., :width], rows[..., width:]
