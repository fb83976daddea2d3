"""Tile sizes of the Hopper kernels, chosen on an H200; `ringspan bench tune` measures alternatives.

    forward                                           backward
    CONSUMERS  warpgroups of 64 queries each          BLOCK_N    keys of a thread block
    BLOCK_N    keys of a tile                         STAGES     slots of q and dout
    Q_STAGES   slots of q                             DS_STAGES  slots of dS
    STAGES     slots of k and v                       DQ_STAGES  slots of dq, each of DQ_WIDTH columns
    REGISTERS  per thread of a consumer               DQ_WARPGROUP  a warpgroup computes dq; else the consumers do,
    STAGED     store out through shared memory                      only for head dims of q above 128
    IN_STEP    warps of a consumer synchronise        TIGHT      registers are scarce: weights wait for dS in 16 bits
               to free a slot                         maxnreg    registers per thread at launch (both kernels)
The first row whose limits a call's head dims do not exceed applies. Rows without DQ_WARPGROUP are skipped for head dims of q up
to 128, softcap, ordered sums of dq, and Triton 3.9; there consumer 1 has one slot fewer for dS, and each has one for dq.
STAGED needs shared memory for 16 bits per element of out. With a short window, a row of SHORT_WINDOWS replaces the forward's.
"""

import functools
from typing import Any

from torch import Tensor

from ringspan.kernels.mask import SENTINEL, Bounds
from ringspan.kernels.runtime.triton_compat import CONSUMERS_COMPUTE_DQ

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
    (64, 64): dict(BLOCK_N=128, STAGES=4, DS_STAGES=3, DQ_STAGES=2, DQ_WIDTH=64, DQ_WARPGROUP=True, TIGHT=False, maxnreg=128),
    (80, 80): dict(BLOCK_N=128, STAGES=3, DS_STAGES=3, DQ_STAGES=3, DQ_WIDTH=32, DQ_WARPGROUP=True, TIGHT=False, maxnreg=128),
    (96, 96): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=6, DQ_WIDTH=32, DQ_WARPGROUP=True, TIGHT=True, maxnreg=128),
    (128, 128): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=64, DQ_WARPGROUP=True, TIGHT=True, maxnreg=128),
    (160, 160): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=64, DQ_WARPGROUP=False, TIGHT=True, maxnreg=168),
    (192, 128): dict(BLOCK_N=128, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=64, DQ_WARPGROUP=False, TIGHT=True, maxnreg=168),
    (192, 192): dict(BLOCK_N=64, STAGES=2, DS_STAGES=2, DQ_STAGES=2, DQ_WIDTH=32, DQ_WARPGROUP=True, TIGHT=True, maxnreg=128),
    (256, 256): dict(BLOCK_N=64, STAGES=2, DS_STAGES=1, DQ_STAGES=2, DQ_WIDTH=32, DQ_WARPGROUP=True, TIGHT=True, maxnreg=128),
}


def tiles_for(kernel: str, q: Tensor, v: Tensor, bounds: Bounds | None = None, needs_registers: bool = False) -> dict[str, Any]:
    """Return BLOCK_*, TAIL_* and launch options of "forward" or "backward" for these inputs.

    Args:
        kernel: "forward" or "backward".
        q: Queries.
        v: Values.
        bounds: Of the mask; only the forward's tiles depend on them.
        needs_registers: Whether softcap or ordered sums of dq rule out consumers that compute dq.
    """
    width, v_width = q.shape[-1], v.shape[-1]
    table = {"forward": FORWARD, "backward": BACKWARD}[kernel]
    # consumers split dq into three parts of up to 64 columns
    needs_warpgroup = needs_registers or width <= 128 or not CONSUMERS_COMPUTE_DQ
    fitting = [limits for limits in table if width <= limits[0] and v_width <= limits[1]]
    limits = next(x for x in fitting if table[x].get("DQ_WARPGROUP", True) or not needs_warpgroup)
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
