"""K and V, or their gradients, as one tensor that travels: (rows, B, Hkv, D + Dv).

Rows come first, so that any run of them is one piece of memory, and K and V of a row lie side by side: one message, with
nothing to gather before and nothing to sort after. Kernels read and write it through views.
"""

import torch
from torch import Tensor


def new_packed(rows: int, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return k.new_empty((rows, k.shape[0], k.shape[2], k.shape[3] + v.shape[3]), dtype=dtype)


def pack(k: Tensor, v: Tensor, into: Tensor) -> Tensor:
    for view, x in zip(unpack(into, k.shape[3]), (k, v), strict=True):
        view.copy_(x)
    return into


def unpack(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views (B, rows, Hkv, D) and (B, rows, Hkv, Dv)."""
    rows = packed.transpose(0, 1)
    return rows[..., :width], rows[..., width:]
