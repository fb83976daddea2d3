"""Tile sizes of the Hopper kernels, by head dim, chosen on an H200; `ringspan bench tune` measures them beside others."""

import functools
from typing import Any

from torch import Tensor

FORWARD = {  # head dim up to: consumers of 64 queries each, keys a tile, buffers of q, of k and v, registers of a consumer,
    # whether out goes to memory through shared memory (which has to have room for 16 bits of it), registers at launch, whether
    # a consumer's warps meet when it frees a place
    64: dict(CONSUMERS=3, BLOCK_N=128, Q_STAGES=2, STAGES=5, REGISTERS=160, STAGED=False, maxnreg=128, IN_STEP=True),
    128: dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=2, STAGES=2, REGISTERS=240, STAGED=True, maxnreg=168, IN_STEP=False),
    256: dict(CONSUMERS=2, BLOCK_N=64, Q_STAGES=1, STAGES=2, REGISTERS=240, STAGED=False, maxnreg=168, IN_STEP=True),
}
BACKWARD = {  # head dim up to: keys of a program, buffers of q and dout, of dS, of dq and how many columns one has, whether
    # registers are tight (then scores do not run a tile ahead, and weights wait in 16 bits), registers a thread at launch
    64: dict(BLOCK_N=128, STAGES=4, DS_STAGES=3, DQ_STAGES=2, DQ_WIDTH=64, TIGHT=False, maxnreg=128),
    128: dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=64, TIGHT=True, maxnreg=128),
    256: dict(BLOCK_N=64, STAGES=2, DS_STAGES=1, DQ_STAGES=2, DQ_WIDTH=32, TIGHT=True, maxnreg=128),
}


def tiles_for(kernel: str, q: Tensor, v: Tensor) -> dict[str, Any]:
    """BLOCK_* and launch options of one kernel for these inputs."""
    width, v_width = q.shape[-1], v.shape[-1]
    table = {"forward": FORWARD, "backward": BACKWARD}[kernel]
    tiles = next(tiles for limit, tiles in table.items() if max(width, v_width) <= limit)
    return dict(BLOCK_D=_block(width), BLOCK_DV=_block(v_width), num_warps=4) | tiles


@functools.cache
def _block(width: int) -> int:
    """Columns that are not there are read as zeros."""
    return max(64, 1 << (width - 1).bit_length())
