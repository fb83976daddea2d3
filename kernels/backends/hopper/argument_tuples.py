"""Named tuples of the values that the device functions of the Hopper kernels share.

Fields are scalars, pointers, TMA descriptors, shared memory, mbarriers and, in upper case, compile-time constants. q, k, v and
dout are tuples of one or two chunks (chunks.py). For each pair of mbarriers see common.py.
"""

from typing import Any, NamedTuple


class ForwardInputs(NamedTuple):
    """TMA descriptors."""

    q: Any
    k: Any
    v: Any


class ForwardMemory(NamedTuple):
    """Shared memory of the forward."""

    q: Any  # 64 rows per consumer and slot
    k: Any
    v: Any
    out: Any  # 64 rows per consumer; not read without Outputs.out_tiles
    q_full: Any
    q_free: Any
    kv_full: Any
    kv_free: Any
    columns: Any  # 0 … BLOCK_N - 1


class Queue(NamedTuple):
    """Two slots in which the producer publishes query tiles."""

    tiles: Any
    full: Any
    free: Any


class QueryTile(NamedTuple):
    """A query tile, and the tile_range of its visible keys."""

    end_row: Any  # 0 after the last tile
    b: Any
    h: Any
    first_row: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    origin: Any  # first row of key tile 0


class LoadedKeys(NamedTuple):
    """Position of the forward's producer in the keys."""

    count: Any  # slots filled
    b: Any  # of the last slot's keys, whose values follow in the next slot
    h: Any
    first_key: Any


class Stagger(NamedTuple):
    """Order of tiles without a mask: of keys, in the backward of queries (common.staggered_tile)."""

    window: Any  # tiles, a power of two
    num_starts: Any  # different first tiles within a window
    pieces_per_start: Any


class QueryWork(NamedTuple):
    """What determines the query tiles of a thread block."""

    mask: Any
    q_at: Any
    k_at: Any
    num_tiles: Any
    num_sequences: Any
    num_heads: Any
    group: Any
    concurrent_heads: Any
    stagger: Any  # None with a mask


class Outputs(NamedTuple):
    """Outputs of the forward, and the carry."""

    out: Any
    out_tiles: Any
    lse: Any
    carry_out: Any
    carry_lse: Any
    out_strides: Any
    lse_strides: Any
    carry_out_strides: Any
    carry_lse_strides: Any


class ForwardFlags(NamedTuple):
    """Compile-time constants of the forward (tile_sizes.py)."""

    D: Any
    DV: Any
    BLOCK_DV: Any
    TAIL_DV: Any
    BLOCK_N: Any
    CONSUMERS: Any
    Q_STAGES: Any
    STAGES: Any
    IN_STEP: Any


class BackwardInputs(NamedTuple):
    """TMA descriptors and statistics."""

    dout: Any
    q: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    turns: Any
    lse_strides: Any
    delta_strides: Any
    turns_strides: Any


class BackwardOutputs(NamedTuple):
    """Gradients. dq, dk_tiles and dv_tiles are TMA descriptors."""

    dq: Any
    dk: Any
    dk_tiles: Any
    dv: Any
    dv_tiles: Any
    dk_strides: Any
    dv_strides: Any


class BackwardMemory(NamedTuple):
    """Shared memory of the backward; for the slots of a query tile see backward_producer.py."""

    k: Any
    v: Any
    q: Any
    dout: Any
    ds: Any
    dq: Any
    stats: Any
    lse: Any
    tile_info: Any
    row_offsets: Any  # 0 … 63


class Barriers(NamedTuple):
    """Mbarriers of the backward."""

    kv_full: Any  # k and v are loaded once
    exchange: Any  # one ring for each consumer
    q_full: Any
    q_free: Any
    ds_full: Any  # and ds_free: a tuple of one for each consumer where they compute dq
    ds_free: Any


class Turns(NamedTuple):
    """Order of the thread blocks that add to dq (backward_dq.py)."""

    counters: Any  # of the sequence
    stride: Any  # of a head
    own_turn: Any
    prev_end: Any  # end of the rows that the previous tile sees


class Rules(NamedTuple):
    """What determines the weights."""

    mask: Any
    q_at: Any
    k_at: Any
    scale: Any
    softcap: Any
    stagger: Any  # None with a mask, with turns, and up to head dim 128


class KeyTile(NamedTuple):
    """A tile of keys, and the tile_range of the queries that see it."""

    b: Any
    kv_head: Any  # of dk and dv, which have several heads for each head of k and v if thread blocks share a tile
    group: Any  # query heads of that head; None if each head of k and v has one, which saves registers
    first_key: Any
    end_key: Any
    origin: Any  # first row of query tile 0
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


class BackwardFlags(NamedTuple):
    """Compile-time constants of the backward (tile_sizes.py)."""

    D: Any
    DV: Any
    BLOCK_D: Any
    TAIL_D: Any
    BLOCK_DV: Any
    TAIL_DV: Any
    BLOCK_N: Any
    STAGES: Any
    DS_STAGES: Any
    DQ_STAGES: Any
    DQ_WIDTH: Any
    DQ_WARPGROUP: Any
    TIGHT: Any
    BIAS: Any
    ADD: Any
