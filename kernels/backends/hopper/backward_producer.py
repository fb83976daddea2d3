"""The party of Hopper's backward that brings queries, and what the others have to know of them (see hopper_backward.py).

A place in shared memory holds a tile of q and dout, its lse and delta for the tensor cores, and three facts: head, first row,
and marks of whether the mask splits it and, where tiles are left out, which consumers' keys it sees.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringspan.kernels.backends.hopper.common import nth_tile, wait_free
from ringspan.kernels.backends.triton.common import LOG2E
from ringspan.kernels.runtime.triton_compat import tma_load


@gluon.jit
def produce(
    q, dout, q_tile, dout_tile, statistics, flags, b, kv_head, origin, begin, full, rest, end, borders,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    lse, delta, lse_strides, delta_strides, stats, lse_tile, facts, n, scale, softcap = statistics
    _kv_full, _between, full_at, free_at, _ds_full, _ds_free = flags
    lower_end, upper_begin = borders
    num = end - begin
    num_split = full - begin + end - rest
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STATS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, STATS)
    column = gl.arange(0, 16, gl.SliceLayout(0, STATS))[None, :]
    for i in range(GROUP * num):
        h = kv_head * GROUP + i // num
        row = origin + nth_tile(i % num, begin, full, rest, end) * 64
        at = row + gl.arange(0, 64, ROWS)
        place = wait_free(free_at, i, STAGES)
        mbarrier.expect(full_at.index(place), q.block_type.nbytes + dout.block_type.nbytes)
        tma_load(q, [b, h, row, 0], full_at.index(place), q_tile.index(place))
        tma_load(dout, [b, h, row, 0], full_at.index(place), dout_tile.index(place))
        lse_row = gl.load(
            lse + b.to(gl.int64) * lse_strides[0] + h.to(gl.int64) * lse_strides[1] + at.to(gl.int64) * lse_strides[2],
            mask=at < n, other=float("-inf"),
        )  # fmt: skip
        delta_row = gl.load(
            delta + b.to(gl.int64) * delta_strides[0] + h.to(gl.int64) * delta_strides[1] + at.to(gl.int64) * delta_strides[2],
            mask=at < n, other=0.0,
        )  # fmt: skip
        # such a row weighs nothing, whatever its delta holds: it saw no key, or a sink that outweighs all
        nothing = (lse_row == float("-inf")) | (lse_row == float("inf"))
        lse_row = lse_row * LOG2E - BIAS
        if softcap is not None:
            lse_tile.index(place).store(gl.where(nothing, float("inf"), lse_row))
            lse_row = gl.zeros_like(delta_row)  # a cap comes between the product and what is taken away
        lse_row = gl.where(nothing, 3e38, lse_row / (scale * LOG2E))  # finite: thirds of an infinity are NaN
        delta_row = gl.where(nothing, 0.0, delta_row)
        stats.index(2 * place).store(thirds(lse_row, column))
        stats.index(2 * place + 1).store(thirds(delta_row, column))
        facts.index(3 * place).store(gl.full([1], h, gl.int32, WARP))
        facts.index(3 * place + 1).store(gl.full([1], row, gl.int32, WARP))
        marks = gl.where(i % num < num_split, 1, 0)
        if lower_end is not None:
            marks += gl.where(row < lower_end, 2, 0) + gl.where(row + 64 > upper_begin, 4, 0)
        facts.index(3 * place + 2).store(gl.full([1], marks, gl.int32, WARP))
        fence_async_shared()
        mbarrier.arrive(full_at.index(place), count=1)


@gluon.jit
def thirds(x, column):
    """fp32 as a sum of three bf16, in columns 0, 1 and 2 of a tile for the tensor cores, whose narrowest are 16 wide."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    low = x - high - middle
    tail = gl.where(column == 1, middle[:, None], gl.where(column == 2, low[:, None], 0.0))
    return gl.where(column == 0, high[:, None], tail).to(gl.bfloat16)
