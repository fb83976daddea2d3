"""The dq warpgroup of Hopper's backward: dq = dS k, accumulated in fp32 by TMA reduce-add (see backward.py).

    ds_full ──▶ dq = dS k, 64 columns at a time ──▶ dq_tile, a ring of DQ_STAGES slots ──▶ TMA reduce-add to memory

Thread blocks add in any order. In a deterministic backward they take turns at each tile of queries, in the order of their
keys: `turns` in memory holds the number of the key tile whose turn it is. Begin and end of the visible queries never decrease
with the keys, so the key tiles that see a query tile are consecutive. A thread block waits for the previous one, unless that
one's queries end before the tile. None waits for a later one, and GPUs start thread blocks in the order of their index. CUDA
does not guarantee this order; on a GPU with another order the kernel would hang.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringspan.kernels.backends.hopper.chunks import select, zero_accumulators
from ringspan.kernels.backends.hopper.common import accumulator_layout, arrive_per_thread, load_int, num_steps, wait_full
from ringspan.kernels.runtime.triton_compat import barrier, tma_add, with_layout


@gluon.jit
def collect_dq(dq_out, memory, barriers, dq_turns, tile, scale, flags: gl.constexpr):
    """Accumulate dq of each query tile. The slot of q is freed at once, because only its head and row are needed.

    With 64 keys dS fits into registers (HOLDS_DS): matmuls read only k from shared memory, dS's slot is free earlier, and the
    matmul of the next 64 columns overlaps the store of the current ones.
    """
    turns, own_turn = dq_turns.counters, dq_turns.own_turn
    BLOCK_D: gl.constexpr = flags.BLOCK_D
    TAIL_D: gl.constexpr = flags.TAIL_D
    DQ_WIDTH: gl.constexpr = flags.DQ_WIDTH
    LAYOUT: gl.constexpr = accumulator_layout(64)
    HOLDS_DS: gl.constexpr = flags.BLOCK_N == 64
    PARTS: gl.constexpr = BLOCK_D // 64 if TAIL_D == 0 else BLOCK_D // 64 + 1  # the last part may be the second chunk
    NUM_PIECES: gl.constexpr = BLOCK_D // DQ_WIDTH + (TAIL_D + DQ_WIDTH - 1) // DQ_WIDTH
    zero = zero_accumulators(64, TAIL_D)
    mbarrier.wait(barriers.kv_full.index(0), 0)
    prev_h, prev_row = 0, 0
    for i in range(num_steps(tile)):
        slot = wait_full(barriers.q_full, i, flags.STAGES)
        h, row = load_int(memory.tile_info, 3 * slot), load_int(memory.tile_info, 3 * slot + 1)
        arrive_per_thread(barriers.q_free.index(slot))
        if turns is not None:
            current_turn = read_turn(dq_turns, h, row)
        ds_slot = wait_full(barriers.ds_full, i, flags.DS_STAGES)
        k_all = select(memory.k, i >> 30)  # opaque 0, see backward_consumer.py
        ds = memory.ds.index(ds_slot).permute((1, 0))
        if HOLDS_DS:
            ds = ds.load(gl.DotOperandLayout(0, LAYOUT, 2))
            arrive_per_thread(barriers.ds_free.index(ds_slot))
        for part in gl.static_range(PARTS):
            if part == 0 or not HOLDS_DS:
                dq = dq_matmul(ds, k_all, part, zero, BLOCK_D)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == PARTS - 1 and not HOLDS_DS:
                arrive_per_thread(barriers.ds_free.index(ds_slot))
            pieces = split_pieces(dq * scale, DQ_WIDTH)
            if turns is not None and part == 0:
                if i > 0:
                    pass_turn(dq_turns, prev_h, prev_row)
                prev_h, prev_row = h, row
                while current_turn != own_turn:  # a barrier of all four warps precedes the next reduce-add
                    current_turn = read_turn(dq_turns, h, row)
            for piece in gl.static_range((64 if part < BLOCK_D // 64 else max(TAIL_D, DQ_WIDTH)) // DQ_WIDTH):
                piece_index = part * (64 // DQ_WIDTH) + piece
                if NUM_PIECES % flags.DQ_STAGES != 0:  # otherwise every tile starts at slot 0
                    piece_index += i * NUM_PIECES
                piece_tile = memory.dq.index(piece_index % flags.DQ_STAGES)
                tma.store_wait(flags.DQ_STAGES - 1)  # the TMA has read the slot's previous contents
                store_staggered(pieces[piece], piece_tile, DQ_WIDTH)
                if HOLDS_DS and part < PARTS - 1 and piece == 64 // DQ_WIDTH - 1:
                    dq = dq_matmul(ds, k_all, part + 1, zero, BLOCK_D)
                fence_async_shared()
                tma_add(dq_out, [tile.b, h, row, part * 64 + piece * DQ_WIDTH], piece_tile)
    if turns is not None and tile.begin < tile.end:
        pass_turn(dq_turns, prev_h, prev_row)
    tma.store_wait(0)


@gluon.jit
def dq_matmul(ds, k_all, part, zero, BLOCK_D: gl.constexpr):
    """Start dS k for the 64 columns of `part`, or for the second chunk after those of the first."""
    if part < BLOCK_D // 64:
        return warpgroup_mma(ds, k_all[0].slice(part * 64, 64, dim=1), zero[0], use_acc=False, is_async=True)
    else:
        return warpgroup_mma(ds, k_all[1], zero[1], use_acc=False, is_async=True)


@gluon.jit
def split_pieces(dq, WIDTH: gl.constexpr):
    """Split columns of dq into pieces of WIDTH. A narrow second chunk gets zeros, past the head dim: the TMA drops them."""
    if dq.shape[1] > WIDTH:
        return dq.reshape([64, 2, WIDTH]).permute((0, 2, 1)).split()
    elif dq.shape[1] == WIDTH:
        return (dq,)
    else:
        return split_pieces(gl.join(dq, gl.zeros_like(dq)).permute((0, 2, 1)).reshape([64, 2 * dq.shape[1]]), WIDTH)


@gluon.jit
def read_turn(dq_turns, h, row):
    """Load the turn at a tile of queries; own_turn if there is no previous key tile to wait for.

    Each thread loads it for itself, so no thread waits for the value before it needs it.
    """
    turns = dq_turns.counters + h * dq_turns.stride
    return gl.load(turns + row // 64, mask=row < dq_turns.prev_end, other=dq_turns.own_turn, volatile=True)


@gluon.jit
def pass_turn(dq_turns, h, row):
    """Hand the turn at a tile of queries to the next key tile."""
    # wait until the sums are in memory; tma.store_wait only waits until shared memory has been read
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [row], gl.int32, is_pure=False, pack=1)
    barrier()
    gl.atomic_xchg(dq_turns.counters + h * dq_turns.stride + row // 64, dq_turns.own_turn + 1, sem="release")


@gluon.constexpr_function
def staggered_layout(width):
    """Shared layout in the TMA's order, except that odd rows swap columns 0 … 15 with 16 … 31 of every 32."""
    row_bits = [[1, 4 ^ 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    bits = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], *row_bits, [0, 32]]
    return gl.SharedLinearLayout(bits[: 11 + width // 64], alignment=1024)


@gluon.jit
def store_staggered(piece, tile, WIDTH: gl.constexpr):
    """Store a piece of dq into the tile that the TMA adds from, without bank conflicts.

    A thread holds two adjacent columns of every eight. In the TMA's order half a warp, four rows of eight columns, would use
    half of the banks. So odd rows store their columns in another order.
    """
    low, high = piece.reshape([64, WIDTH // 32, 2, 16]).permute((0, 1, 3, 2)).split()
    odd = (gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout))) & 1 != 0)[:, None, None]
    swapped = gl.join(gl.where(odd, high, low), gl.where(odd, low, high)).permute((0, 1, 3, 2)).reshape([64, WIDTH])
    with_layout(tile.reshape([64, WIDTH]), staggered_layout(WIDTH)).store(swapped)
