"""The producer warp of Hopper's backward: loads query tiles and their statistics (see backward.py).

A slot of shared memory holds one query tile:

    q_tile, dout_tile    64 rows, loaded by TMA
    stats                lse and delta as three bf16 each, (64, 16): operands of a matmul that subtracts them
    lse_tile             lse in fp32, with softcap only
    tile_info            head, first row, marks (1: partial; 2, 4: visible to keys of consumer 0, 1)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringspan.kernels.backends.hopper.chunks import block_bytes, load_tiles
from ringspan.kernels.backends.hopper.common import nth_tile, wait_free
from ringspan.kernels.backends.triton.common import LOG2E


@gluon.jit
def produce(
    q, dout, q_tile, dout_tile, statistics, barriers, b, kv_head, origin, begin, full_begin, full_end, end, skip_borders,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Role of the producer warp: load query tiles begin … end for each query head of the group."""
    lse, delta, lse_strides, delta_strides, stats, lse_tile, tile_info, num_rows, scale, softcap = statistics
    _kv_full, _exchange, q_full, q_free, _ds_full, _ds_free = barriers
    lower_end, upper_begin = skip_borders
    num_tiles = end - begin
    num_partial = full_begin - begin + end - full_end
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STATS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, STATS)
    column = gl.arange(0, 16, gl.SliceLayout(0, STATS))[None, :]
    for i in range(GROUP * num_tiles):
        h = kv_head * GROUP + i // num_tiles
        row = origin + nth_tile(i % num_tiles, begin, full_begin, full_end, end) * 64
        rows = row + gl.arange(0, 64, ROWS)
        slot = wait_free(q_free, i, STAGES)
        mbarrier.expect(q_full.index(slot), block_bytes(q) + block_bytes(dout))
        load_tiles(q, b, h, row, q_full.index(slot), q_tile, slot)
        load_tiles(dout, b, h, row, q_full.index(slot), dout_tile, slot)
        lse_row = gl.load(
            lse + b.to(gl.int64) * lse_strides[0] + h.to(gl.int64) * lse_strides[1] + rows.to(gl.int64) * lse_strides[2],
            mask=rows < num_rows, other=float("-inf"),
        )  # fmt: skip
        delta_row = gl.load(
            delta + b.to(gl.int64) * delta_strides[0] + h.to(gl.int64) * delta_strides[1]
            + rows.to(gl.int64) * delta_strides[2],
            mask=rows < num_rows, other=0.0,
        )  # fmt: skip
        # all weights of such a row are 0, whatever its delta holds: it sees no key, or a sink outweighs them all
        is_empty = (lse_row == float("-inf")) | (lse_row == float("inf"))
        lse_row = lse_row * LOG2E - BIAS
        if softcap is not None:
            lse_tile.index(slot).store(gl.where(is_empty, float("inf"), lse_row))
            lse_row = gl.zeros_like(delta_row)  # the cap applies before lse is subtracted, so the matmul must not subtract it
        lse_row = gl.where(is_empty, 3e38, lse_row / (scale * LOG2E))  # finite, because splitting an infinity gives NaN
        delta_row = gl.where(is_empty, 0.0, delta_row)
        stats.index(2 * slot).store(split_in_three(lse_row, column))
        stats.index(2 * slot + 1).store(split_in_three(delta_row, column))
        tile_info.index(3 * slot).store(gl.full([1], h, gl.int32, WARP))
        tile_info.index(3 * slot + 1).store(gl.full([1], row, gl.int32, WARP))
        marks = gl.where(i % num_tiles < num_partial, 1, 0)
        if lower_end is not None:
            marks += gl.where(row < lower_end, 2, 0) + gl.where(row + 64 > upper_begin, 4, 0)
        tile_info.index(3 * slot + 2).store(gl.full([1], marks, gl.int32, WARP))
        fence_async_shared()
        mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def split_in_three(x, column):
    """Split fp32 into a sum of three bf16, in columns 0, 1 and 2 of 16 (the narrowest matmul operand)."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    low = x - high - middle
    tail = gl.where(column == 1, middle[:, None], gl.where(column == 2, low[:, None], 0.0))
    return gl.where(column == 0, high[:, None], tail).to(gl.bfloat16)
