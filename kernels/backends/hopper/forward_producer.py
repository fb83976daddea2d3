"""The party of Hopper's forward that fetches queries, keys and values, and tells consumers which (see hopper_forward.py).

A program's work comes in pieces of as many rows as a tile of queries has. With documents, tiles begin where one does, and
every so many rows behind: one that began in the document before would see all of that too. So there a piece begins at the
first of these borders in its rows and ends at the next piece's, which makes one tile, or two, or none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringspan.kernels.backends.hopper.common import (
    arrive,
    border,
    first_of_two,
    in_turn,
    nth_tile,
    number,
    wait_free,
    wait_full,
)
from ringspan.kernels.backends.triton.common import document, keys_of, position, row_count, rows_below, tile_range
from ringspan.kernels.runtime.triton_compat import tma_load


@gluon.jit
def produce(
    q, k, v, tiles, queue, taken, work,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _q_tile, _k_tile, v_tile, _o_tile, _q_full, _q_free, kv_full, kv_free, _columns = tiles
    total = work[3] * work[4]
    i = 0
    sent = (0, 0, 0, 0)  # slots so far; of the last one's keys: batch, head, first row
    index = gl.program_id(0)
    while index < total:
        b, h, row, behind = piece(index, work, CONSUMERS * 64)
        if work[0][2] is not None:
            while row < behind:
                row, sent = fetch(
                    q, k, v, tiles, queue, work, index, b, h, row, behind, i, sent, BLOCK_N, CONSUMERS, Q_STAGES, STAGES
                )
                i += 1
        else:  # a piece is a tile, and a loop around it took longer
            _, sent = fetch(
                q, k, v, tiles, queue, work, index, b, h, row, behind, i, sent, BLOCK_N, CONSUMERS, Q_STAGES, STAGES
            )
            i += 1
        index = gl.num_programs(0) + gl.atomic_add(taken, 1)
    publish(queue, i, (0, 0, 0, 0, 0, 0, 0, 0, 0))
    slots, before_b, before_head, before_key = sent
    place = wait_free(kv_free, slots, STAGES)
    mbarrier.expect(kv_full.index(place), v.block_type.nbytes)
    tma_load(v, [before_b, before_head, before_key, 0], kv_full.index(place), v_tile.index(place))


@gluon.jit
def fetch(
    q, k, v, tiles, queue, work, index, b, h, row, behind, i, sent,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A query tile and what it sees → (row behind it, what has been sent).

    A slot holds what is multiplied at the same time: keys, and the values of the keys before.

    Without a mask all programs would go through a head's keys abreast, and to ask for the same tile at the same moment takes
    longer. So each two pieces of work begin a tile further than the two before and go round. (By the work's number, not
    the program's, which is another in each run: the order of sums would be, too.)
    """
    q_tile, k_tile, v_tile, _o_tile, q_full, q_free, kv_full, kv_free, _columns = tiles
    slots, before_b, before_head, before_key = sent
    until, origin, begin, full, rest, end = what_is_seen(b, row, behind, work, CONSUMERS * 64, BLOCK_N)
    publish(queue, i, (until, b, h, row, begin, full, rest, end, origin))
    kv_head = h // work[6]
    UNMASKED: gl.constexpr = work[0][0] is None and work[0][1] is None and work[0][2] is None
    further = index // 2 % gl.maximum(rest, 1)  # tiles 0 … rest - 1 are whole; consumers need not know which of them one is
    for j in range(gl.maximum(end - begin, 1)):
        tile = nth_tile(j, begin, full, rest, end)
        if UNMASKED:
            tile = gl.where(tile < rest, gl.where(tile + further < rest, tile + further, tile + further - rest), tile)
        key = origin + tile * BLOCK_N
        place = wait_free(kv_free, slots, STAGES)
        if slots == 0:
            mbarrier.expect(kv_full.index(place), k.block_type.nbytes)
        else:
            mbarrier.expect(kv_full.index(place), k.block_type.nbytes + v.block_type.nbytes)
        tma_load(k, [b, kv_head, key, 0], kv_full.index(place), k_tile.index(place))
        if slots > 0:
            tma_load(v, [before_b, before_head, before_key, 0], kv_full.index(place), v_tile.index(place))
        before_b, before_head, before_key = b, kv_head, key
        slots += 1
        if j == 0:  # not earlier: the last query tile is not done before it has these values
            q_place = wait_free(q_free, i, Q_STAGES)
            mbarrier.expect(q_full.index(q_place), CONSUMERS * q.block_type.nbytes)
            for c in gl.static_range(CONSUMERS):
                tma_load(q, [b, h, row + c * 64, 0], q_full.index(q_place), q_tile.index(q_place * CONSUMERS + c))
    return until, (slots, before_b, before_head, before_key)


@gluon.jit
def piece(index, work, ROWS: gl.constexpr):
    """Number of a piece of work → (batch, head, first row, row behind the last)."""
    mask, q_at, _k_at, num_tiles, num_sequences, num_heads, _group, together = work
    sequence, turn = in_turn(index, num_tiles, num_sequences, together, True)
    row = (num_tiles - 1 - turn) * ROWS  # the last queries, which see most under a causal mask, first
    b, h = sequence // num_heads, sequence % num_heads
    behind = gl.minimum(border(row + ROWS, b, mask, q_at, ROWS), row_count(q_at))
    return b, h, border(row, b, mask, q_at, ROWS), behind


@gluon.jit
def what_is_seen(b, row, behind, work, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """A piece's next tile of queries → (row behind it; row where the first tile of keys begins; tiles of keys that it sees)."""
    mask, q_at, k_at = work[0], work[1], work[2]
    until, origin = behind, 0
    if mask[2] is not None:
        until = first_of_two(row, behind, ROWS)
        first, _ = document(position(row, q_at), mask, b)
        origin = rows_below(first, k_at)
    HEAD: gl.constexpr = mask[0] is not None or mask[2] is not None
    first_lo, first_hi = keys_of(position(row, q_at), mask, b)
    last_lo, last_hi = keys_of(position(until - 1, q_at), mask, b)
    begin, full, rest, end = tile_range(first_lo, last_lo, first_hi, last_hi, k_at, origin, BLOCK_N, HEAD)
    return until, origin, begin, full, rest, end


@gluon.jit
def publish(queue, i, tile):
    """Tells the consumers about the i-th tile of queries of this program, in nine numbers."""
    next_tile, next_full, next_free = queue
    place = wait_free(next_free, i, 2)  # of two, of sixteen numbers each
    for n in gl.static_range(9):
        next_tile.index(place * 16 + n).store(gl.full([1], tile[n], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_full.index(place), count=1)


@gluon.jit
def receive(queue, i, DOCUMENTS: gl.constexpr, IN_STEP: gl.constexpr):
    """To a consumer: (row behind the tile, 0 if there is none; batch, head, first row; tiles of keys, and their first row)."""
    next_tile, next_full, next_free = queue
    place = wait_full(next_full, i, 2)
    at = place * 16
    origin = number(next_tile, at + 8) if DOCUMENTS else 0
    until, b, h, row = number(next_tile, at), number(next_tile, at + 1), number(next_tile, at + 2), number(next_tile, at + 3)
    begin, full = number(next_tile, at + 4), number(next_tile, at + 5)
    rest, end = number(next_tile, at + 6), number(next_tile, at + 7)
    arrive(next_free.index(place), IN_STEP)
    return until, b, h, row, begin, full, rest, end, origin
