"""Arguments of the Hopper kernels: TMA descriptors, grid size, and the number of heads processed concurrently.

`runtime.launch.Launch` calls forward_arguments and backward_arguments once per signature and caches the result. So they
depend on nothing but their arguments.
"""

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan.kernels.backends.hopper.argument_tuples import Stagger
from ringspan.kernels.backends.hopper.common import WARPGROUP_ROWS
from ringspan.kernels.backends.triton.arguments import Tiles, strides_argument
from ringspan.kernels.backends.triton.common import MaskArgument
from ringspan.kernels.backends.triton.sum_gradients import MAX_SUMMANDS
from ringspan.kernels.runtime.launch import Arguments
from ringspan.kernels.runtime.triton_compat import STORE_GRADIENTS_BY_TMA
from ringspan.kernels.tensors import is_aligned, num_sms

# Bytes of L2 cache for the heads in progress. In the forward 8 and 32 MiB are no faster, and all heads at once are slower.
L2_BUDGET = 16 * 2**20
MAX_CONCURRENT = 16  # KV heads of a backward with 512 tokens; 32 are slower
STAGGER_BYTES = 8 * 2**20  # of L2 cache for the windows of staggered tiles; 4 MiB are as fast, 32 slower with 4k × 16k
PIECES_PER_START = 8  # pieces of work that begin at the same tile; 4 are as fast, 16 slower with 4k × 8k and 4k × 16k
FULL_WAVE = 0.95  # of the SMs have a thread block
MIN_SPLIT_ROWS = 2**11  # keys below which the host takes longer than the backward's kernels
# Bytes per position that a thread block streams over all of its query heads; 5 KB are as fast as less, 8 slower.
MAX_GROUP_BYTES = 6 * 2**10
MAX_SPLIT_WAVES = 4  # of thread blocks, above which that is no reason to split heads: the parts would take more than 128 MiB
LONG_ROWS = 2**17  # streamed rows above which two groups in progress evict each other's rows from the cache


def forward_arguments(
    q: Tensor, q_tail: Tensor, k: Tensor, k_tail: Tensor, v: Tensor, v_tail: Tensor, out: Tensor, out_tiles: Tensor,
    lse: Tensor, carry_out: Tensor | None, carry_lse: Tensor | None, mask: MaskArgument, work_counter: Tensor,
    tiles: Tiles, **common: Any,
) -> Arguments:  # fmt: skip
    """Return the grid size and arguments of `forward.attention_forward`."""
    batch, q_rows, heads, width = q.shape
    _, k_rows, kv_heads, v_width = v.shape
    options = dict(tiles)
    block_d, tail_d = options.pop("BLOCK_D"), options.pop("TAIL_D")
    block_dv, tail_dv, block_n = options["BLOCK_DV"], options["TAIL_DV"], options["BLOCK_N"]
    staged = options.pop("STAGED")  # store out through shared memory, if it fits: half of the columns in fp32
    out_columns = 2 * block_dv // out.element_size()
    num_tiles, num_sequences, group = -(-q_rows // (WARPGROUP_ROWS * options["CONSUMERS"])), batch * heads, heads // kv_heads
    key_bytes = (width + v_width) * k.element_size()
    sizes = num_sequences // group, num_tiles * group, k_rows, k_rows * key_bytes
    concurrent_groups = num_concurrent_groups("forward", mask, block_n, *sizes, num_thread_blocks(q.device))
    args = dict(
        q=descriptor(q, q_rows, WARPGROUP_ROWS, block_d),
        q_tail=tail_descriptor(q_tail, q_rows, WARPGROUP_ROWS, tail_d),
        k=descriptor(k, k_rows, block_n, block_d),
        k_tail=tail_descriptor(k_tail, k_rows, block_n, tail_d),
        v=descriptor(v, k_rows, block_n, block_dv),
        v_tail=tail_descriptor(v_tail, k_rows, block_n, tail_dv),
        out=out,
        out_tiles=descriptor(out_tiles, q_rows, WARPGROUP_ROWS, out_columns) if staged else None,
        lse=lse,
        carry_out=carry_out,
        carry_lse=carry_lse,
        out_strides=strides_argument(out),
        lse_strides=strides_argument(lse),
        carry_out_strides=strides_argument(carry_out),
        carry_lse_strides=strides_argument(carry_lse),
        work_counter=work_counter,
        mask=mask,
        num_tiles=num_tiles,
        num_sequences=num_sequences,
        num_heads=heads,
        group=group,
        concurrent_heads=group * concurrent_groups,
        stagger=stagger(num_tiles * group, block_n * key_bytes, q.device) if is_unmasked(mask) else None,
        D=width,
        DV=v_width,
        **common,
        **options,
    )
    return min(num_thread_blocks(q.device), num_tiles * num_sequences), args


def backward_arguments(
    dout: Tensor, dout_tail: Tensor, q: Tensor, q_tail: Tensor, k: Tensor, k_tail: Tensor, v: Tensor, v_tail: Tensor,
    lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dk_tiles: Tensor, dv: Tensor, dv_tiles: Tensor,
    turns: Tensor | None, mask: MaskArgument, tiles: Tiles, accumulate: bool | str, **common: Any,
) -> Arguments:  # fmt: skip
    """Return the grid size and arguments of `backward.attention_backward`."""
    batch, q_rows, heads, width = q.shape
    _, k_rows, kv_heads, v_width = v.shape
    options = dict(tiles)
    block_d, block_dv, block_n = options["BLOCK_D"], options["BLOCK_DV"], options["BLOCK_N"]
    tail_d, tail_dv = options["TAIL_D"], options["TAIL_DV"]
    num_tiles, num_sequences, group = -(-k_rows // block_n), batch * dk.shape[2], heads // dk.shape[2]
    # store through shared memory (dk through a slot of q or dout) where it fits and the result overwrites dk and dv
    staged = STORE_GRADIENTS_BY_TMA and accumulate is not True and block_n == 128 and block_d == block_dv
    staged &= tail_d == tail_dv == 0
    staged &= all(x.dtype == q.dtype and is_aligned(x) for x in (dk, dv))
    # The TMA always stores 64 rows. Tiles follow document borders unless dq is ordered (turns); a tile that ends within
    # 64 rows is stored from registers.
    direct = not staged or (mask.starts is not None and turns is None)
    row_bytes = bytes_per_query(q)
    is_staggered = is_unmasked(mask) and turns is None and width > 128  # below, that order is slower
    if turns is None:
        sizes = num_sequences, num_tiles, q_rows, q_rows * group * row_bytes
        concurrent_heads = num_concurrent_groups("backward", mask, block_n, *sizes, num_thread_blocks(q.device))
    else:  # all heads at once: fewer thread blocks of one head run concurrently, so fewer wait for their turn
        concurrent_heads = num_sequences
    args = dict(
        dout=descriptor(dout, q_rows, 64, block_dv),
        dout_tail=tail_descriptor(dout_tail, q_rows, 64, tail_dv),
        q=descriptor(q, q_rows, 64, block_d),
        q_tail=tail_descriptor(q_tail, q_rows, 64, tail_d),
        k=descriptor(k, k_rows, block_n, block_d),
        k_tail=tail_descriptor(k_tail, k_rows, block_n, tail_d),
        v=descriptor(v, k_rows, 64, block_dv),
        v_tail=tail_descriptor(v_tail, k_rows, 64, tail_dv),
        dq=descriptor(dq, q_rows, 64, options["DQ_WIDTH"]),
        lse=lse,
        delta=delta,
        turns=turns,
        mask=mask,
        dk=dk if direct else None,
        dk_tiles=descriptor(dk_tiles, k_rows, 64, block_d) if staged else None,
        dv=dv if direct else None,
        dv_tiles=descriptor(dv_tiles, k_rows, 64, block_dv) if staged else None,
        lse_strides=strides_argument(lse),
        delta_strides=strides_argument(delta),
        dk_strides=strides_argument(dk),
        dv_strides=strides_argument(dv),
        turns_strides=strides_argument(turns),
        num_tiles=num_tiles,
        num_sequences=num_sequences,
        num_heads=dk.shape[2],
        group=None if heads == kv_heads else group,
        head_splits=None if dk.shape[2] == kv_heads else dk.shape[2] // kv_heads,
        concurrent_heads=concurrent_heads,
        stagger=stagger(num_tiles, 64 * row_bytes, q.device) if is_staggered else None,
        D=width,
        DV=v_width,
        ADD=accumulate is True,
        **common,
        **options,
    )
    return num_tiles * num_sequences, args


def descriptor(x: Tensor, rows: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe (B, S, H, D) as (batch, head, row, column) to the TMA. Rows ≥ `rows` and columns ≥ D are read as zeros."""
    batch, _, heads, width = x.shape
    # the stride of a dimension of size 1 is arbitrary, and the TMA rejects some values
    strides = [x.stride(dim) if x.shape[dim] > 1 else block_columns for dim in (0, 2, 1)]
    swizzle = min(128, block_columns * x.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=x.element_size() * 8, rank=4)
    return TensorDescriptor(x, [batch, heads, rows, width], [*strides, 1], [1, 1, block_rows, block_columns], layout)


def tail_descriptor(x: Tensor, rows: int, block_rows: int, block_columns: int) -> TensorDescriptor | None:
    """Describe the columns of the second chunk; None if there is none."""
    return descriptor(x, rows, block_rows, block_columns) if block_columns else None


def num_concurrent_groups(
    direction: str,
    mask: MaskArgument,
    block_n: int,
    num_groups: int,
    num_tiles: int,
    streamed_rows: int,
    streamed_bytes: int,
    wave: int,
) -> int:
    """Return how many groups to process at a time. A group is a KV head, in the forward with its query heads.

        no mask                       1: all tiles take equally long, and all SMs read the same keys
        more than LONG_ROWS           1: with 2, the backward of 512k tokens has 376 instead of 618 TFLOP/s (H100)
        documents                     as many as fit into L2_BUDGET, at least 8: a tile reads only the rows of its documents
        backward, tiles of 64 keys    the same: with 2, the longest tiles of the last heads start when nothing else is left
        backward                      as many as have a tile for each SM, at least 2
        forward                       as many as fit into L2_BUDGET, at least 2, or 1 if one does not fit

    There may be up to twice as many, so that the last ones are about as many as the others: fewer tiles would leave SMs idle.

    Args:
        direction: "forward" or "backward".
        mask: The kernel's mask.
        block_n: Keys of a tile.
        num_groups: All groups.
        num_tiles: Tiles of a group.
        streamed_rows: Rows of each head that the thread blocks stream.
        streamed_bytes: Bytes that the thread blocks of one group stream.
        wave: Thread blocks that run concurrently.
    """
    fitting = L2_BUDGET // max(1, streamed_bytes)
    if is_unmasked(mask) or streamed_rows > LONG_ROWS:
        return 1
    if mask.starts is not None or (direction == "backward" and block_n == 64):
        wanted = max(8, fitting)
    elif direction == "backward":
        wanted = min(MAX_CONCURRENT, max(2, math.ceil(FULL_WAVE * wave / max(1, num_tiles))))
    else:
        wanted = max(2, fitting) if fitting else 1
    num_groups = max(1, num_groups)
    counts = range(min(wanted, num_groups), min(2 * wanted, num_groups + 1))
    return min(counts, key=lambda count: -num_groups % count / count)


def num_head_splits(q: Tensor, k: Tensor, mask: MaskArgument, block_n: int) -> int:
    """Return how many thread blocks of the backward share a tile of `block_n` keys, each with as many query heads.

    The fewest that give each SM a thread block, or the most there can be. Under a causal mask the longest thread block takes
    twice as long as the average, so there are two for each SM. Thread blocks of too many heads evict each other's queries from
    the cache.
    """
    batch, q_rows, heads, _ = q.shape
    _, k_rows, kv_heads, _ = k.shape
    group = heads // kv_heads
    num_blocks, wave = batch * kv_heads * -(-k_rows // block_n), num_thread_blocks(q.device)
    is_causal = (mask.left is None) != (mask.right is None) and mask.starts is None
    wanted = FULL_WAVE * wave * (2 if is_causal else 1)
    if k_rows < MIN_SPLIT_ROWS:
        return 1
    max_heads = group
    if is_causal and q_rows <= wave * block_n and num_blocks <= MAX_SPLIT_WAVES * wave:
        max_heads = MAX_GROUP_BYTES // bytes_per_query(q)
    counts = head_split_counts(group)
    return next((n for n in counts if num_blocks * n >= wanted and group // n <= max_heads), counts[-1])


def head_split_counts(group: int) -> list[int]:
    """Return how many thread blocks can share a tile of keys, in ascending order, if a KV head has `group` query heads."""
    return [n for n in range(1, min(group, MAX_SUMMANDS) + 1) if group % n == 0]


def bytes_per_query(q: Tensor) -> int:
    """Return the bytes of one head's row of q, dout and dq, which thread blocks of the backward stream."""
    return (2 * q.element_size() + 4) * q.shape[3]


def stagger(num_pieces: int, tile_bytes: int, device: torch.device) -> Stagger:
    """Return the order of tiles of `tile_bytes` each that `num_pieces` pieces of work read.

    If these are fewer than the SMs, several KV heads are in progress at a time, each with a window in the L2 cache.
    """
    num_running = min(num_pieces, num_thread_blocks(device))
    window = max(1, STAGGER_BYTES * num_running // (num_thread_blocks(device) * tile_bytes))
    return Stagger(1 << (window.bit_length() - 1), max(1, num_running // PIECES_PER_START), PIECES_PER_START)


def is_unmasked(mask: MaskArgument) -> bool:
    """Return whether a mask hides no key: no left or right bound, no documents. A prefix has a right bound."""
    return mask.left is mask.right is mask.starts is None


def num_thread_blocks(device: torch.device) -> int:
    """Return the grid size of the persistent forward: one thread block per SM (132 if there is no GPU)."""
    return num_sms(device) or 132
