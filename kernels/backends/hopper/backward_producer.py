"""The producer warp of Hopper's backward: loads query tiles and their statistics (see backward.py).

    q, dout ──── TMA ─────────────────▶  slot i % STAGES  ── q_full ──▶  consumers, dq warpgroup
    lse, delta ─ split_in_three ──────▶                   ◀── q_free ──

A slot of shared memory holds one query tile:

    q, dout      64 rows, loaded by TMA
    stats        lse and delta as three bf16 each, (64, 16): operands of a matmul that subtracts them
    lse          lse in fp32, with softcap only
    tile_info    head, first row, marks (1: partial; 2, 4: visible to keys of consumer 0, 1)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringspan.kernels.backends.hopper.chunks import block_bytes, load_tiles
from ringspan.kernels.backends.hopper.common import nth_tile, num_steps, staggered_tile, start_in_window, wait_free
from ringspan.kernels.backends.triton.common import LOG2E


@gluon.jit
def produce(inputs, memory, barriers, tile, skip_borders, rules, num_rows, flags: gl.constexpr):
    """Role of the producer warp: load query tiles begin … end for each query head of the group."""
    lower_end, upper_begin = skip_borders
    num_tiles = tile.end - tile.begin
    num_partial = tile.full_begin - tile.begin + tile.end - tile.full_end
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STATS: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, STATS)
    column = gl.arange(0, 16, gl.SliceLayout(0, STATS))[None, :]
    first_head = tile.kv_head
    if tile.group is not None:
        first_head *= tile.group
    start = 0
    if rules.stagger is not None:
        start = start_in_window(tile.first_key // flags.BLOCK_N, rules.stagger)
    for i in range(num_steps(tile)):
        b, h = tile.b, first_head + i // num_tiles
        query_tile = nth_tile(i % num_tiles, tile.begin, tile.full_begin, tile.full_end, tile.end)
        if rules.stagger is not None:
            query_tile = staggered_tile(query_tile, tile.full_end, start, rules.stagger)
        row = tile.origin + query_tile * 64
        rows = row + gl.arange(0, 64, ROWS)
        slot = wait_free(barriers.q_free, i, flags.STAGES)
        q_full = barriers.q_full.index(slot)
        mbarrier.expect(q_full, block_bytes(inputs.q) + block_bytes(inputs.dout))
        load_tiles(inputs.q, b, h, row, q_full, memory.q, slot)
        load_tiles(inputs.dout, b, h, row, q_full, memory.dout, slot)
        lse_row = load_stats(inputs.lse, b, h, rows, inputs.lse_strides, num_rows, float("-inf"))
        delta_row = load_stats(inputs.delta, b, h, rows, inputs.delta_strides, num_rows, 0.0)
        # all weights of such a row are 0, whatever its delta holds: it sees no key, or a sink outweighs them all
        is_empty = (lse_row == float("-inf")) | (lse_row == float("inf"))
        lse_row = lse_row * LOG2E - flags.BIAS
        if rules.softcap is not None:
            memory.lse.index(slot).store(gl.where(is_empty, float("inf"), lse_row))
            lse_row = gl.zeros_like(delta_row)  # the cap applies before lse is subtracted, so the matmul must not subtract it
        lse_row = gl.where(is_empty, 3e38, lse_row / (rules.scale * LOG2E))  # finite, because splitting an infinity gives NaN
        delta_row = gl.where(is_empty, 0.0, delta_row)
        memory.stats.index(2 * slot).store(split_in_three(lse_row, column))
        memory.stats.index(2 * slot + 1).store(split_in_three(delta_row, column))
        memory.tile_info.index(3 * slot).store(gl.full([1], h, gl.int32, WARP))
        memory.tile_info.index(3 * slot + 1).store(gl.full([1], row, gl.int32, WARP))
        marks = gl.where(i % num_tiles < num_partial, 1, 0)
        if lower_end is not None:
            marks += gl.where(row < lower_end, 2, 0) + gl.where(row + 64 > upper_begin, 4, 0)
        memory.tile_info.index(3 * slot + 2).store(gl.full([1], marks, gl.int32, WARP))
        fence_async_shared()
        mbarrier.arrive(q_full, count=1)


@gluon.jit
def load_stats(stats, b, h, rows, strides, num_rows, other: gl.constexpr):
    """Load rows of lse or delta; `other` past the last row."""
    pointers = stats + b.to(gl.int64) * strides.batch + h.to(gl.int64) * strides.head + rows.to(gl.int64) * strides.row
    return gl.load(pointers, mask=rows < num_rows, other=other)


@gluon.jit
def split_in_three(x, column):
    """Split fp32 into a sum of three bf16, in columns 0, 1 and 2 of 16 (the narrowest matmul operand)."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    low = x - high - middle
    tail = gl.where(column == 1, middle[:, None], gl.where(column == 2, low[:, None], 0.0))
    return gl.where(column == 0, high[:, None], tail).to(gl.bfloat16)
