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

from ringspan.kernels.backends.hopper.argument_tuples import LoadedKeys, QueryTile
from ringspan.kernels.backends.hopper.chunks import block_bytes, load_tiles
from ringspan.kernels.backends.hopper.common import (
    arrive,
    load_int,
    next_tile_end,
    nth_tile,
    scheduled_tile,
    staggered_tile,
    start_in_window,
    tile_border,
    wait_free,
    wait_full,
)
from ringspan.kernels.backends.triton.common import document_interval, position, row_count, rows_below, tile_range, visible_keys


@gluon.jit
def produce(inputs, memory, queue, work_counter, work, flags: gl.constexpr):
    """Role of the producer warp: take pieces of work from the counter and load their tiles."""
    num_pieces = work.num_tiles * work.num_sequences
    i = 0
    loaded = LoadedKeys(0, 0, 0, 0)
    index = gl.program_id(0)
    while index < num_pieces:
        b, h, row, piece_end = work_piece(index, work, flags.CONSUMERS * 64)
        if work.mask.starts is not None:
            while row < piece_end:
                row, loaded = fetch(inputs, memory, queue, work, index, b, h, row, piece_end, i, loaded, flags)
                i += 1
        else:  # a piece is one tile; with the loop this is measurably slower
            _, loaded = fetch(inputs, memory, queue, work, index, b, h, row, piece_end, i, loaded, flags)
            i += 1
        index = gl.num_programs(0) + gl.atomic_add(work_counter, 1)
    publish_tile(queue, i, QueryTile(0, 0, 0, 0, 0, 0, 0, 0, 0))
    slot = wait_free(memory.kv_free, loaded.count, flags.STAGES)
    mbarrier.expect(memory.kv_full.index(slot), block_bytes(inputs.v))
    load_tiles(inputs.v, loaded.b, loaded.h, loaded.first_key, memory.kv_full.index(slot), memory.v, slot)


@gluon.jit
def fetch(inputs, memory, queue, work, index, b, h, row, piece_end, i, loaded, flags: gl.constexpr):
    """Load a query tile and its visible keys; return (end of the tile, updated `loaded`).

    A K/V slot holds what is multiplied concurrently: keys, and the values of the previous keys.
    """
    q, k, v = inputs
    kv_count, prev_b, prev_head, prev_key = loaded
    tile_end, origin, begin, full_begin, full_end, end = visible_key_tiles(
        b, row, piece_end, work, flags.CONSUMERS * 64, flags.BLOCK_N
    )
    publish_tile(queue, i, QueryTile(tile_end, b, h, row, begin, full_begin, full_end, end, origin))
    kv_head = h // work.group
    start = 0
    if work.stagger is not None:
        start = start_in_window(index % (work.num_tiles * work.group), work.stagger)
    for j in range(gl.maximum(end - begin, 1)):
        tile = nth_tile(j, begin, full_begin, full_end, end)
        if work.stagger is not None:  # consumers need not know which full tile it is
            tile = staggered_tile(tile, full_end, start, work.stagger)
        key = origin + tile * flags.BLOCK_N
        slot = wait_free(memory.kv_free, kv_count, flags.STAGES)
        kv_full = memory.kv_full.index(slot)
        if kv_count == 0:
            mbarrier.expect(kv_full, block_bytes(k))
        else:
            mbarrier.expect(kv_full, block_bytes(k) + block_bytes(v))
        load_tiles(k, b, kv_head, key, kv_full, memory.k, slot)
        if kv_count > 0:
            load_tiles(v, prev_b, prev_head, prev_key, kv_full, memory.v, slot)
        prev_b, prev_head, prev_key = b, kv_head, key
        kv_count += 1
        if j == 0:  # not earlier: the previous query tile needs the values in this slot before it frees q
            q_slot = wait_free(memory.q_free, i, flags.Q_STAGES)
            q_full = memory.q_full.index(q_slot)
            mbarrier.expect(q_full, flags.CONSUMERS * block_bytes(q))
            for c in gl.static_range(flags.CONSUMERS):
                load_tiles(q, b, h, row + c * 64, q_full, memory.q, q_slot * flags.CONSUMERS + c)
    return tile_end, LoadedKeys(kv_count, prev_b, prev_head, prev_key)


@gluon.jit
def work_piece(index, work, ROWS: gl.constexpr):
    """Return (batch, head, first row, end row) of a piece of work."""
    sequence, tile = scheduled_tile(index, work.num_tiles, work.num_sequences, work.concurrent_heads, work.stagger is None)
    row = (work.num_tiles - 1 - tile) * ROWS  # the last queries, which see most keys under a causal mask, first
    b, h = sequence // work.num_heads, sequence % work.num_heads
    piece_end = gl.minimum(tile_border(row + ROWS, b, work.mask, work.q_at, ROWS), row_count(work.q_at))
    return b, h, tile_border(row, b, work.mask, work.q_at, ROWS), piece_end


@gluon.jit
def visible_key_tiles(b, row, piece_end, work, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (end row of a piece's next query tile, first row of key tile 0, and the tile_range of its visible keys)."""
    mask, q_at, k_at = work.mask, work.q_at, work.k_at
    tile_end, origin = piece_end, 0
    if mask.starts is not None:
        tile_end = next_tile_end(row, piece_end, ROWS)
        first, _ = document_interval(position(row, q_at), mask, b)
        origin = rows_below(first, k_at)
    LOW_BOUND: gl.constexpr = mask.left is not None or mask.starts is not None
    first_lo, first_hi = visible_keys(position(row, q_at), mask, b)
    last_lo, last_hi = visible_keys(position(tile_end - 1, q_at), mask, b)
    begin, full_begin, full_end, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, origin, BLOCK_N, LOW_BOUND)
    return tile_end, origin, begin, full_begin, full_end, end


@gluon.jit
def publish_tile(queue, i, tile):
    """Publish query tile i of this thread block to the consumers: the fields as int32, in a slot of sixteen."""
    slot = wait_free(queue.free, i, 2)
    for n in gl.static_range(len(tile)):
        queue.tiles.index(slot * 16 + n).store(gl.full([1], tile[n], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def receive_tile(queue, i, DOCUMENTS: gl.constexpr, IN_STEP: gl.constexpr):
    """Return the QueryTile i of this thread block."""
    slot = wait_full(queue.full, i, 2)
    offset = slot * 16
    origin = load_int(queue.tiles, offset + 8) if DOCUMENTS else 0
    end_row, b = load_int(queue.tiles, offset), load_int(queue.tiles, offset + 1)
    h, row = load_int(queue.tiles, offset + 2), load_int(queue.tiles, offset + 3)
    begin, full_begin = load_int(queue.tiles, offset + 4), load_int(queue.tiles, offset + 5)
    full_end, end = load_int(queue.tiles, offset + 6), load_int(queue.tiles, offset + 7)
    arrive(queue.free.index(slot), IN_STEP)
    return QueryTile(end_row, b, h, row, begin, full_begin, full_end, end, origin)
