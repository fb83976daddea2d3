"""Tile sizes of the Hopper kernels, by head dim; measured on an H200 (see docs/tiles.md)."""

from typing import Any

import torch
from torch import Tensor

FORWARD = {  # head dim up to: consumers of 64 queries each, keys, buffers of q and of k and v, registers of a consumer and at launch
    64: dict(CONSUMERS=3, BLOCK_N=128, Q_STAGES=2, STAGES=3, REGISTERS=160, maxnreg=128),
    128: dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=2, STAGES=2, REGISTERS=240, maxnreg=168),
    256: dict(CONSUMERS=2, BLOCK_N=64, Q_STAGES=1, STAGES=2, REGISTERS=240, maxnreg=168),
}
BACKWARD = {  # head dim up to: queries a tile, buffers of q and of dout
    64: dict(BLOCK_M=128, STAGES=2, DOUT_STAGES=2, maxnreg=168),
    128: dict(BLOCK_M=64, STAGES=2, DOUT_STAGES=2, maxnreg=168),
}


def tiles_for(kernel: str, q: Tensor, v: Tensor) -> dict[str, Any]:
    width = max(q.shape[-1], v.shape[-1])
    table = {"forward": FORWARD, "backward": BACKWARD}[kernel]
    tiles = next(tiles for limit, tiles in table.items() if width <= limit)
    return dict(BLOCK_D=_block(q.shape[-1]), BLOCK_DV=_block(v.shape[-1]), num_warps=4) | tiles


def _block(width: int) -> int:
    return max(64, 1 << (width - 1).bit_length())
