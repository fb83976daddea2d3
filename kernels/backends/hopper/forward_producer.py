"""The producer warp of Hopper's forward: picks query tiles, loads q, k and v by TMA, publishes tiles (see forward.py).

    rows        0          R          2R          3R             R = rows of a query tile = rows of a piece of work
    documents   [---- A -----)[--- B ---)[------ C -----
    borders     |          |  |          |          |            first row of each document, and every R rows after it
    tiles       [          [  [          [          [            piece 0: first tile; piece 1: the next two; …

Work is scheduled in pieces. Without documents a piece is a query tile. With documents tiles begin at borders, because a tile
that spans two documents would process the keys of both. A piece then extends from the first border in its rows to the next
piece's first border, which makes zero, one or two tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringspan.kernels.backends.hopper.chunks import block_bytes, load_tiles
from ringspan.kernels.backends.hopper.common import (
    arrive,
    load_int,
    next_tile_end,
    nth_tile,
    scheduled_tile,
    tile_border,
    wait_free,
    wait_full,
)
from ringspan.kernels.backends.triton.common import document_interval, position, row_count, rows_below, tile_range, visible_keys


@gluon.jit
def produce(
    inputs, tiles, queue, work_counter, work,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Role of the producer warp: take pieces of work from the counter and load their tiles."""
    _q_tile, _k_tile, v_tile, _o_tile, _q_full, _q_free, kv_full, kv_free, _columns = tiles
    v = inputs[2]
    num_pieces = work[3] * work[4]
    i = 0
    loaded = (0, 0, 0, 0)  # K/V slots filled; batch, head and first row of the last slot's keys
    index = gl.program_id(0)
    while index < num_pieces:
        b, h, row, piece_end = work_piece(index, work, CONSUMERS * 64)
        if work[0][2] is not None:
            while row < piece_end:
                row, loaded = fetch(
                    inputs, tiles, queue, work, index, b, h, row, piece_end, i, loaded, BLOCK_N, CONSUMERS, Q_STAGES, STAGES
                )
                i += 1
        else:  # a piece is one tile; with the loop this is measurably slower
            _, loaded = fetch(
                inputs, tiles, queue, work, index, b, h, row, piece_end, i, loaded, BLOCK_N, CONSUMERS, Q_STAGES, STAGES
            )
            i += 1
        index = gl.num_programs(0) + gl.atomic_add(work_counter, 1)
    publish_tile(queue, i, (0, 0, 0, 0, 0, 0, 0, 0, 0))
    kv_count, prev_b, prev_head, prev_key = loaded
    slot = wait_free(kv_free, kv_count, STAGES)
    mbarrier.expect(kv_full.index(slot), block_bytes(v))
    load_tiles(v, prev_b, prev_head, prev_key, kv_full.index(slot), v_tile, slot)


@gluon.jit
def fetch(
    inputs, tiles, queue, work, index, b, h, row, piece_end, i, loaded,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load a query tile and its visible keys; return (end of the tile, updated `loaded`).

    A K/V slot holds what is multiplied concurrently: keys, and the values of the previous keys.

    Without a mask all thread blocks would read the same tile of keys at the same moment, which is slower. So every two pieces
    start one tile later than the previous two and wrap around. The start depends on the piece, not on the thread block:
    thread blocks get other pieces in each run, and the order of the sums must not change.
    """
    q_tile, k_tile, v_tile, _o_tile, q_full, q_free, kv_full, kv_free, _columns = tiles
    q, k, v = inputs
    kv_count, prev_b, prev_head, prev_key = loaded
    tile_end, origin, begin, full_begin, full_end, end = visible_key_tiles(b, row, piece_end, work, CONSUMERS * 64, BLOCK_N)
    publish_tile(queue, i, (tile_end, b, h, row, begin, full_begin, full_end, end, origin))
    kv_head = h // work[6]
    UNMASKED: gl.constexpr = work[0][0] is None and work[0][1] is None and work[0][2] is None
    shift = index // 2 % gl.maximum(full_end, 1)  # tiles 0 … full_end - 1 are full; consumers need not know which one it is
    for j in range(gl.maximum(end - begin, 1)):
        tile = nth_tile(j, begin, full_begin, full_end, end)
        if UNMASKED:
            tile = gl.where(tile < full_end, gl.where(tile + shift < full_end, tile + shift, tile + shift - full_end), tile)
        key = origin + tile * BLOCK_N
        slot = wait_free(kv_free, kv_count, STAGES)
        if kv_count == 0:
            mbarrier.expect(kv_full.index(slot), block_bytes(k))
        else:
            mbarrier.expect(kv_full.index(slot), block_bytes(k) + block_bytes(v))
        load_tiles(k, b, kv_head, key, kv_full.index(slot), k_tile, slot)
        if kv_count > 0:
            load_tiles(v, prev_b, prev_head, prev_key, kv_full.index(slot), v_tile, slot)
        prev_b, prev_head, prev_key = b, kv_head, key
        kv_count += 1
        if j == 0:  # not earlier: the previous query tile needs the values in this slot before it frees q
            q_slot = wait_free(q_free, i, Q_STAGES)
            mbarrier.expect(q_full.index(q_slot), CONSUMERS * block_bytes(q))
            for c in gl.static_range(CONSUMERS):
                load_tiles(q, b, h, row + c * 64, q_full.index(q_slot), q_tile, q_slot * CONSUMERS + c)
    return tile_end, (kv_count, prev_b, prev_head, prev_key)


@gluon.jit
def work_piece(index, work, ROWS: gl.constexpr):
    """Return (batch, head, first row, end row) of a piece of work."""
    mask, q_at, _k_at, num_tiles, num_sequences, num_heads, _group, concurrent_heads = work
    sequence, tile = scheduled_tile(index, num_tiles, num_sequences, concurrent_heads, True)
    row = (num_tiles - 1 - tile) * ROWS  # the last queries, which see most keys under a causal mask, first
    b, h = sequence // num_heads, sequence % num_heads
    piece_end = gl.minimum(tile_border(row + ROWS, b, mask, q_at, ROWS), row_count(q_at))
    return b, h, tile_border(row, b, mask, q_at, ROWS), piece_end


@gluon.jit
def visible_key_tiles(b, row, piece_end, work, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (end row of a piece's next query tile, first row of key tile 0, and the tile_range of its visible keys)."""
    mask, q_at, k_at = work[0], work[1], work[2]
    tile_end, origin = piece_end, 0
    if mask[2] is not None:
        tile_end = next_tile_end(row, piece_end, ROWS)
        first, _ = document_interval(position(row, q_at), mask, b)
        origin = rows_below(first, k_at)
    LOW_BOUND: gl.constexpr = mask[0] is not None or mask[2] is not None
    first_lo, first_hi = visible_keys(position(row, q_at), mask, b)
    last_lo, last_hi = visible_keys(position(tile_end - 1, q_at), mask, b)
    begin, full_begin, full_end, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, origin, BLOCK_N, LOW_BOUND)
    return tile_end, origin, begin, full_begin, full_end, end


@gluon.jit
def publish_tile(queue, i, tile):
    """Publish query tile i of this thread block to the consumers: nine int32 in a slot of sixteen."""
    next_tile, next_full, next_free = queue
    slot = wait_free(next_free, i, 2)
    for n in gl.static_range(9):
        next_tile.index(slot * 16 + n).store(gl.full([1], tile[n], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_full.index(slot), count=1)


@gluon.jit
def receive_tile(queue, i, DOCUMENTS: gl.constexpr, IN_STEP: gl.constexpr):
    """Return (end row, or 0 after the last tile; batch, head, first row; tile_range of keys; first row of key tile 0)."""
    next_tile, next_full, next_free = queue
    slot = wait_full(next_full, i, 2)
    offset = slot * 16
    origin = load_int(next_tile, offset + 8) if DOCUMENTS else 0
    tile_end, b = load_int(next_tile, offset), load_int(next_tile, offset + 1)
    h, row = load_int(next_tile, offset + 2), load_int(next_tile, offset + 3)
    begin, full_begin = load_int(next_tile, offset + 4), load_int(next_tile, offset + 5)
    full_end, end = load_int(next_tile, offset + 6), load_int(next_tile, offset + 7)
    arrive(next_free.index(slot), IN_STEP)
    return tile_end, b, h, row, begin, full_begin, full_end, end, origin
