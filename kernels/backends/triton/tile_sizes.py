"""Tile sizes of the portable kernels, by kernel, head dim and chip.

Sizes are powers of two, at least 16. A head dim above 64 may be a sum of two. `ringspan bench tune` measured HOPPER on an
H200. The other tables are not measured: they hold the largest tiles that compile with few or no register spills;
tests/kernels/runtime/ahead.py checks that.
"""

import functools
from typing import Any

import triton
from torch import Tensor

from ringspan.kernels.runtime.triton_compat import chip

# {largest head dim: (BLOCK_M, BLOCK_N, num_warps, num_stages)}
HOPPER = {  # 227 KB of shared memory: sm_90
    "forward": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    "dq": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)},
    "dkdv": {64: (64, 64, 4, 3), 128: (64, 128, 8, 3), 256: (64, 64, 8, 2)},
}
AMPERE = {  # 163 KB of shared memory, no warpgroup matmul: sm_80; used for sm_100 too
    "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 1)},
    "dq": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)},
    "dkdv": {64: (64, 64, 4, 3), 128: (64, 64, 8, 2), 256: (32, 32, 4, 1)},
}
SMALL = {  # 99 KB (sm_86, sm_89, sm_120) and 64 KB (AMD) of shared memory
    "forward": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 1)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 32, 4, 1), 256: (32, 32, 4, 1)},
    "dkdv": {64: (64, 64, 4, 2), 128: (32, 64, 4, 1), 256: (16, 32, 4, 1)},
}
FP32 = {  # three TF32 matmuls need three times the registers for operands
    "forward": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)},
    "dq": {64: (32, 32, 4, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
}
INTERPRETED = {"forward": {256: (32, 16, 1, 1)}, "dq": {256: (32, 16, 1, 1)}, "dkdv": {256: (16, 32, 1, 1)}}


def tiles_for(kernel: str, q: Tensor, v: Tensor, extras: bool) -> dict[str, Any]:
    """Return BLOCK_* and launch options of one kernel for these inputs; extras: dropout or softcap is on."""
    chip_name = chip(q.device)
    width = max(q.shape[-1], v.shape[-1])
    if chip_name == "interpreter":
        table = INTERPRETED
    elif q.element_size() == 4:
        table = FP32
    else:
        large = AMPERE if extras else HOPPER  # Philox and tanh need registers and shared memory
        table = {"sm_80": AMPERE, "sm_90": large, "sm_100": AMPERE}.get(chip_name, SMALL)
    block_m, block_n, warps, stages = next(tiles for limit, tiles in table[kernel].items() if width <= limit)
    # Two chunks need more registers than one padded block where matmuls read operands from them: the tiles below would spill.
    in_chunks = table is not FP32 and (chip_name != "sm_80" or width <= 128)
    (block_d, tail_d), (block_dv, tail_dv) = (chunks(x.shape[-1]) if in_chunks else padded(x.shape[-1]) for x in (q, v))
    return dict(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        TAIL_D=tail_d,
        BLOCK_DV=block_dv,
        TAIL_DV=tail_dv,
        PRECISION="ieee" if chip_name.startswith("gfx") else "tf32x3",
        num_warps=warps,
        num_stages=stages,
    )


def padded(width: int) -> tuple[int, int]:
    """Return the columns of one block for a head dim, and 0."""
    return max(16, triton.next_power_of_2(width)), 0


@functools.cache
def chunks(width: int) -> tuple[int, int]:
    """Return the columns of two chunks of a head dim, such as 96 = 64 + 32, or of one block that is not wider."""
    block = triton.next_power_of_2(width) // 2
    tail = max(16, triton.next_power_of_2(width - block))
    return (block, tail) if block >= 64 and tail < block else padded(width)
