"""What the Hopper kernels are given: descriptors for the TMA, how many programs, and which heads they work on together.

From tensors and rules to a kernel's arguments, as `launches.Launch` wants it: these functions look at nothing else.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringspan.kernels.backends.hopper.common import WARPGROUP_ROWS
from ringspan.kernels.backends.triton.arguments import Tiles, mask_argument
from ringspan.kernels.mask import Mask
from ringspan.kernels.runtime.launch import Arguments
from ringspan.kernels.runtime.triton_compat import GRADIENTS_LEAVE_BY_TMA
from ringspan.kernels.tensors import is_aligned

# Bytes of the L2 cache that the heads in work may fill; in a forward 8 and 32 MiB were no faster, all at once was slower.
CACHE = 16 * 2**20


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, out_tiles: Tensor, lse: Tensor, carry_out: Tensor | None,
    carry_lse: Tensor | None, mask: tuple[Any, ...], taken: Tensor, tiles: Tiles, **rules: Any,
) -> Arguments:  # fmt: skip
    batch, q_rows, heads, width = q.shape
    _, k_rows, kv_heads, v_width = v.shape
    options = dict(tiles)
    block_d, block_dv, block_n = options["BLOCK_D"], options["BLOCK_DV"], options["BLOCK_N"]
    staged = options.pop("STAGED")  # through shared memory, where there is room for it: for half the columns in fp32
    out_columns = 2 * block_dv // out.element_size()
    num_tiles, num_sequences, group = -(-q_rows // (WARPGROUP_ROWS * options["CONSUMERS"])), batch * heads, heads // kv_heads
    of_keys = k_rows * (width + v_width) * k.element_size()
    given = dict(
        q=descriptor(q, q_rows, WARPGROUP_ROWS, block_d),
        k=descriptor(k, k_rows, block_n, block_d),
        v=descriptor(v, k_rows, block_n, block_dv),
        out=out,
        out_tiles=descriptor(out_tiles, q_rows, WARPGROUP_ROWS, out_columns) if staged else None,
        lse=lse,
        carry_out=carry_out,
        carry_lse=carry_lse,
        out_strides=out.stride()[:3],
        lse_strides=lse.stride(),
        carry_out_strides=None if carry_out is None else carry_out.stride()[:3],
        carry_lse_strides=None if carry_lse is None else carry_lse.stride(),
        taken=taken,
        mask=mask,
        num_tiles=num_tiles,
        num_sequences=num_sequences,
        num_heads=heads,
        group=group,
        together=min(num_sequences, heads_together("forward", mask, width, of_keys, group)),
        DV=v_width,
        **rules,
        **options,
    )
    return min(num_programs(q.device), num_tiles * num_sequences), given


def backward_arguments(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dk_tiles: Tensor, dv: Tensor, dv_tiles: Tensor,
    turns: Tensor | None, mask: tuple[Any, ...], tiles: Tiles, accumulate: bool | str, **rules: Any,
) -> Arguments:  # fmt: skip
    batch, q_rows, heads, width = q.shape
    _, k_rows, kv_heads, v_width = v.shape
    options = dict(tiles)
    block_d, block_dv, block_n = options["BLOCK_D"], options["BLOCK_DV"], options["BLOCK_N"]
    num_tiles, num_sequences, group = -(-k_rows // block_n), batch * kv_heads, heads // kv_heads
    # through shared memory, dk through a place of q or dout: where there is room, and what is written replaces what was there
    staged = GRADIENTS_LEAVE_BY_TMA and accumulate is not True and block_n == 128 and block_d == block_dv
    staged &= all(x.dtype == q.dtype and is_aligned(x) for x in (dk, dv))
    # but not 64 rows among which another document begins; unless programs take turns tiles begin where documents do
    in_rows = not staged or (mask[2] is not None and turns is None)
    if turns is None:
        of_queries = q_rows * group * (2 * q.element_size() + 4) * width
        together = heads_together("backward", mask, width, of_queries, 1)
    else:  # all heads at once: the fewer programs of one are at work, the less they wait for each other
        together = num_sequences
    given = dict(
        dout=descriptor(dout, q_rows, 64, block_dv),
        q=descriptor(q, q_rows, 64, block_d),
        k=descriptor(k, k_rows, block_n, block_d),
        v=descriptor(v, k_rows, 64, block_dv),
        dq=descriptor(dq, q_rows, 64, options["DQ_WIDTH"]),
        lse=lse,
        delta=delta,
        turns=turns,
        mask=mask,
        dk=dk if in_rows else None,
        dk_tiles=descriptor(dk_tiles, k_rows, 64, block_d) if staged else None,
        dv=dv if in_rows else None,
        dv_tiles=descriptor(dv_tiles, k_rows, 64, block_dv) if staged else None,
        lse_strides=lse.stride(),
        delta_strides=delta.stride(),
        dk_strides=dk.stride()[:3],
        dv_strides=dv.stride()[:3],
        turns_strides=None if turns is None else turns.stride()[:2],
        num_tiles=num_tiles,
        num_sequences=num_sequences,
        num_heads=kv_heads,
        together=min(num_sequences, together),
        D=width,
        DV=v_width,
        GROUP=group,
        ADD=accumulate is True,
        **rules,
        **options,
    )
    return num_tiles * num_sequences, given


def descriptor(x: Tensor, rows: int, block_rows: int, block_columns: int) -> TensorDescriptor:
    """(B, S, H, D) as (batch, head, row, column). Rows from `rows` on, and columns from D on, are read as zeros."""
    batch, _, heads, width = x.shape
    # the stride of a dimension of size 1 can be anything, which the TMA would not take
    strides = [x.stride(dim) if x.shape[dim] > 1 else block_columns for dim in (0, 2, 1)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=x.element_size() * 8, rank=4)
    return TensorDescriptor(x, [batch, heads, rows, width], [*strides, 1], [1, 1, block_rows, block_columns], layout)


def heads_together(way: str, mask: tuple[Any, ...], width: int, streamed: int, group: int) -> int:
    """How many heads to work on at a time: as many groups as have what they stream, `streamed` bytes each, in the L2 cache.

    But not fewer than were as fast though they do not all fit: eight with documents, of which each reads only its own, and in a
    backward above head dim 128, as with two the last heads' longest tiles begin when nothing else is left to do; one in a
    forward if not even one fits; else two.
    Without a mask no tile is longer than others: one group, whose keys all multiprocessors read at about the same time.
    """
    if hides_nothing(mask):
        return group
    if mask[2] is not None or (way == "backward" and width > 128):
        least = 8
    else:
        least = 1 if way == "forward" and streamed > CACHE else 2
    return group * max(least, CACHE // max(1, streamed))


def most_keys(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> int | None:
    """How many keys a forward's launch is to go through, None for all.

    Without a mask, if not all of a head's are in the L2 cache, programs that are no longer abreast each read them from DRAM.
    Under a causal mask pieces gained next to nothing; and where a head's queries are one tile nothing is read twice.
    """
    if q.shape[1] <= 2 * WARPGROUP_ROWS or not hides_nothing(mask_argument(mask.bounds(k.device))):
        return None
    return CACHE // ((k.shape[3] + v.shape[3]) * k.element_size())


def hides_nothing(mask: tuple[Any, ...]) -> bool:
    """Of a mask as kernels are given it: no end on the left or on the right, no documents. (A prefix needs a right end.)"""
    return all(bound is None for bound in mask[:3])


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(device: torch.device) -> int:
    """One for each multiprocessor."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 132
