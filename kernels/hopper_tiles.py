"""Tile sizes of the Hopper kernels, by head dim; chosen on an H200 beside the alternatives that docs/tiles.md names."""

from typing import Any

from torch import Tensor

from .compat import VERSION

FORWARD = {  # head dim up to: consumers of 64 queries each, keys a tile, buffers of q, of k and v, registers of a consumer,
    # whether out goes to memory through shared memory (which then has to have room), registers a thread at launch
    64: dict(CONSUMERS=3, BLOCK_N=128, Q_STAGES=2, STAGES=4, REGISTERS=160, STAGED=False, maxnreg=128),
    128: dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=2, STAGES=2, REGISTERS=240, STAGED=True, maxnreg=168),
    256: dict(CONSUMERS=2, BLOCK_N=64, Q_STAGES=1, STAGES=2, REGISTERS=240, STAGED=False, maxnreg=168),
}
BACKWARD = {  # head dim up to: queries a tile, buffers of q and dout, what half of dq a consumer computes, whether it keeps
    # k and v in registers, whether scores run a tile ahead (Triton 3.9 would then put its products one after another)
    64: dict(BLOCK_M=128, STAGES=2, SHARE="rows", KEEP=False, AHEAD=VERSION < (3, 9), maxnreg=168),
    128: dict(BLOCK_M=64, STAGES=2, SHARE="columns", KEEP=False, AHEAD=False, maxnreg=168),
}


def tiles_for(kernel: str, q: Tensor, v: Tensor) -> dict[str, Any]:
    """BLOCK_* and launch options of one kernel for these inputs."""
    width = max(q.shape[-1], v.shape[-1])
    table = {"forward": FORWARD, "backward": BACKWARD}[kernel]
    tiles = next(tiles for limit, tiles in table.items() if width <= limit)
    return dict(BLOCK_D=_block(q.shape[-1]), BLOCK_DV=_block(v.shape[-1]), num_warps=4) | tiles


def _block(width: int) -> int:
    """Columns that are not there are read as zeros."""
    return max(64, 1 << (width - 1).bit_length())
