"""Tile sizes of the Hopper kernels, chosen on an H200; `ringspan bench tune` measures alternatives.

    forward                                           backward
    CONSUMERS  warpgroups of 64 queries each          BLOCK_N    keys of a thread block
    BLOCK_N    keys of a tile                         STAGES     slots of q and dout
    Q_STAGES   slots of q                             DS_STAGES  slots of dS
    STAGES     slots of k and v                       DQ_STAGES  slots of dq, each of DQ_WIDTH columns
    REGISTERS  per thread of a consumer               TIGHT      registers are scarce: scores do not run one tile
    STAGED     store out through shared memory                   ahead, and weights wait for dS in 16 bits
    IN_STEP    warps of a consumer synchronise        maxnreg    registers per thread at launch (both kernels)
               to free a slot
The first row whose limits a call's head dims do not exceed applies. STAGED needs shared memory for 16 bits per element of out.
With a short window, a row of SHORT_WINDOWS replaces that of the forward.
"""

import functools
from typing import Any

from torch import Tensor

from ringspan.kernels.mask import SENTINEL, Bounds

FORWARD = {  # by largest head dims of q and k, and of v
    (64, 64): dict(CONSUMERS=3, BLOCK_N=128, Q_STAGES=2, STAGES=5, REGISTERS=160, STAGED=False, maxnreg=128, IN_STEP=True),
    (80, 80): dict(CONSUMERS=3, BLOCK_N=64, Q_STAGES=2, STAGES=6, REGISTERS=160, STAGED=True, maxnreg=128, IN_STEP=True),
    (96, 96): dict(CONSUMERS=3, BLOCK_N=64, Q_STAGES=2, STAGES=6, REGISTERS=160, STAGED=False, maxnreg=128, IN_STEP=True),
    (120, 120): dict(CONSUMERS=3, BLOCK_N=64, Q_STAGES=1, STAGES=5, REGISTERS=160, STAGED=False, maxnreg=128, IN_STEP=True),
    (128, 128): dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=2, STAGES=2, REGISTERS=240, STAGED=True, maxnreg=168, IN_STEP=False),
    (160, 160): dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=1, STAGES=2, REGISTERS=240, STAGED=False, maxnreg=168, IN_STEP=False),
    (192, 128): dict(CONSUMERS=2, BLOCK_N=128, Q_STAGES=1, STAGES=2, REGISTERS=240, STAGED=False, maxnreg=168, IN_STEP=False),
    (192, 192): dict(CONSUMERS=2, BLOCK_N=64, Q_STAGES=1, STAGES=3, REGISTERS=240, STAGED=False, maxnreg=168, IN_STEP=True),
    (256, 256): dict(CONSUMERS=2, BLOCK_N=64, Q_STAGES=1, STAGES=2, REGISTERS=240, STAGED=False, maxnreg=168, IN_STEP=True),
}
# By the same limits: a number of keys, and the tiles if a query sees at most as many. A tile of fewer queries loads fewer keys
# that only some of them see.
SHORT_WINDOWS = {
    (96, 96): (4096, FORWARD[128, 128] | dict(STAGES=3, STAGED=False)),
    (120, 120): (2048, FORWARD[128, 128]),
}
BACKWARD = {
    (64, 64): dict(BLOCK_N=128, STAGES=4, DS_STAGES=3, DQ_STAGES=2, DQ_WIDTH=64, TIGHT=False, maxnreg=128),
    (80, 80): dict(BLOCK_N=128, STAGES=3, DS_STAGES=3, DQ_STAGES=3, DQ_WIDTH=32, TIGHT=False, maxnreg=128),
    (96, 96): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=6, DQ_WIDTH=32, TIGHT=True, maxnreg=128),
    (128, 128): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=64, TIGHT=True, maxnreg=128),
    (192, 192): dict(BLOCK_N=64, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=32, TIGHT=True, maxnreg=128),
    (256, 256): dict(BLOCK_N=64, STAGES=2, DS_STAGES=1, DQ_STAGES=2, DQ_WIDTH=32, TIGHT=True, maxnreg=128),
}


def tiles_for(kernel: str, q: Tensor, v: Tensor, bounds: Bounds | None = None) -> dict[str, Any]:
    """Return BLOCK_*, TAIL_* and launch options of "forward" or "backward" for these inputs and bounds of a mask."""
    width, v_width = q.shape[-1], v.shape[-1]
    table = {"forward": FORWARD, "backward": BACKWARD}[kernel]
    limits = next(limits for limits in table if width <= limits[0] and v_width <= limits[1])
    tiles = table[limits]
    if kernel == "forward" and bounds is not None and limits in SHORT_WINDOWS:
        max_keys, short_tiles = SHORT_WINDOWS[limits]
        if SENTINEL not in (bounds.left, bounds.right) and bounds.left + bounds.right < max_keys:
            tiles = short_tiles
    (block_d, tail_d), (block_dv, tail_dv) = chunks(width), chunks(v_width)
    return dict(BLOCK_D=block_d, TAIL_D=tail_d, BLOCK_DV=block_dv, TAIL_DV=tail_dv, num_warps=4) | tiles


@functools.cache
def chunks(width: int) -> tuple[int, int]:
    """Return the columns of both chunks of a head dim (chunks.py). Columns past the head dim are read as zeros."""
    block = max(64, 1 << (width.bit_length() - 1))
    if width <= block:
        return block, 0
    tail = max(16, 1 << (width - block - 1).bit_length())
    return (2 * block, 0) if tail == block else (block, tail)
