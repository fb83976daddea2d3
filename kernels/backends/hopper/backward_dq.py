"""The party of Hopper's backward that collects dS and adds dq = dS k up in memory (see hopper_backward.py).

In a deterministic backward programs take turns at each tile of queries, in the order of their keys: `turns` in memory says
whose turn it is. Where a program's queries begin and end never decreases with its keys, so those that see a tile follow one
upon the other: a program waits for the one before, unless that one's queries end before the tile. None waits for a later one,
and GPUs start programs in the order of their numbers (which CUDA does not promise; a GPU that did not would hang here).
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

from ringspan.kernels.backends.hopper.common import arrive_each, number, product_layout, wait_full
from ringspan.kernels.runtime.triton_compat import barrier, tma_add, with_layout


@gluon.jit
def collect(
    dq_to, k_tile, ds_tile, dq_tile, facts, flags, taking_turns, b, begin, end, scale,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    DQ_WIDTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """dq of tile after tile, 64 columns at a time. Of q it needs only head and row, so that place is given back at once.

    Where a program has 64 keys dS fits into its registers: then each of many columns' products reads only k, dS's place is free
    sooner, and columns' products run while those before are handed on.
    """
    kv_full, _between, full_at, free_at, ds_full, ds_free = flags
    turns, _stride, turn, _before_end = taking_turns
    LAYOUT: gl.constexpr = product_layout(64)
    HOLDS_DS: gl.constexpr = BLOCK_N == 64
    PARTS: gl.constexpr = BLOCK_D // 64
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    last_h, last_row = 0, 0
    for i in range(GROUP * (end - begin)):
        place = wait_full(full_at, i, STAGES)
        h, row = number(facts, 3 * place), number(facts, 3 * place + 1)
        arrive_each(free_at.index(place))
        if turns is not None:
            seen = turn_at(taking_turns, h, row)
        ds_place = wait_full(ds_full, i, DS_STAGES)
        k_all = k_tile.index(i >> 30).reshape([BLOCK_N, BLOCK_D])  # 0, which the compiler must not know: see hopper_keys.py
        ds = ds_tile.index(ds_place).permute((1, 0))
        if HOLDS_DS:
            ds = ds.load(gl.DotOperandLayout(0, LAYOUT, 2))
            arrive_each(ds_free.index(ds_place))
        for part in gl.static_range(PARTS):
            if part == 0 or not HOLDS_DS:
                dq = columns(ds, k_all, part, zero)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == PARTS - 1 and not HOLDS_DS:
                arrive_each(ds_free.index(ds_place))
            pieces = (dq * scale,)
            if DQ_WIDTH == 32:
                pieces = (dq * scale).reshape([64, 2, 32]).permute((0, 2, 1)).split()
            if turns is not None and part == 0:
                if i > 0:
                    pass_turn(taking_turns, last_h, last_row)
                last_h, last_row = h, row
                while seen != turn:  # what is added next comes behind a barrier of all four warps: see store_apart
                    seen = turn_at(taking_turns, h, row)
            for piece in gl.static_range(64 // DQ_WIDTH):
                nth = part * (64 // DQ_WIDTH) + piece
                if BLOCK_D // DQ_WIDTH % DQ_STAGES != 0:  # else every tile begins at the same place
                    nth += i * (BLOCK_D // DQ_WIDTH)
                out = dq_tile.index(nth % DQ_STAGES)
                tma.store_wait(DQ_STAGES - 1)  # what stood there has been read
                store_apart(pieces[piece], out, DQ_WIDTH)
                if HOLDS_DS and part < PARTS - 1 and piece == 64 // DQ_WIDTH - 1:
                    dq = columns(ds, k_all, part + 1, zero)
                fence_async_shared()
                tma_add(dq_to, [b, h, row, part * 64 + piece * DQ_WIDTH], out)
    if turns is not None and begin < end:
        pass_turn(taking_turns, last_h, last_row)
    tma.store_wait(0)


@gluon.jit
def columns(ds, k_all, part, zero):
    return warpgroup_mma(ds, k_all.slice(part * 64, 64, dim=1), zero, use_acc=False, is_async=True)


@gluon.jit
def turn_at(taking_turns, h, row):
    """Whose turn it is at a tile of queries. Each thread looks for itself, so none waits for it before it needs to know."""
    turns, stride, turn, before_end = taking_turns
    return gl.load(turns + h * stride + row // 64, mask=row < before_end, other=turn, volatile=True)


@gluon.jit
def pass_turn(taking_turns, h, row):
    turns, stride, turn, _before_end = taking_turns
    # until what was added is in memory; tma.store_wait ends when it has been read
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [row], gl.int32, is_pure=False, pack=1)
    barrier()
    gl.atomic_xchg(turns + h * stride + row // 64, turn + 1, sem="release")


@gluon.constexpr_function
def apart(width):
    """Where the TMA reads which (row, column), as bits of the address, but in odd rows for columns 16 further, or back."""
    row_bits = [[1, 4 ^ 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    bits = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], *row_bits, [0, 32]]
    return gl.SharedLinearLayout(bits[: 11 + width // 64], alignment=1024)


@gluon.jit
def store_apart(piece, out, WIDTH: gl.constexpr):
    """A piece of dq into the tile that the TMA adds from, without conflicts of banks.

    A thread has two columns that lie side by side in every eight. In the TMA's order half a warp, four rows of eight columns,
    would meet in half the banks. So odd rows write their columns in another order.
    """
    low, high = piece.reshape([64, WIDTH // 32, 2, 16]).permute((0, 1, 3, 2)).split()
    odd = (gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, low.type.layout))) & 1 != 0)[:, None, None]
    turned = gl.join(gl.where(odd, high, low), gl.where(odd, low, high)).permute((0, 1, 3, 2)).reshape([64, WIDTH])
    with_layout(out.reshape([64, WIDTH]), apart(WIDTH)).store(turned)
