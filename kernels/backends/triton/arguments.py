"""Kernel arguments for a block: segments, mask, dropout, strides and tile sizes (see common.py)."""

from typing import Any

from torch import Tensor

from ringspan.kernels.backends.block import Block
from ringspan.kernels.backends.triton.common import DropoutArgument, MaskArgument, SegmentsArgument, StatsStrides, Strides
from ringspan.kernels.dropout import threshold
from ringspan.kernels.mask import SENTINEL, Bounds
from ringspan.kernels.runtime.launch import Arguments
from ringspan.kernels.segments import Segments

Tiles = tuple[tuple[str, Any], ...]  # (name, value) of BLOCK_* and launch options


def common_arguments(block: Block, tiles: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that every kernel takes: segments, scale, softcap and tiles."""
    positions = dict(q_at=segments_argument(block.q_at), k_at=segments_argument(block.k_at))
    return positions | dict(scale=block.scale, softcap=block.softcap or None, tiles=tuple(tiles.items()))


def grid_arguments(owner: str, tile_option: str, tiles: Tiles, args: dict[str, Any]) -> Arguments:
    """Add strides and sizes to `args`; return the grid size and the arguments.

    One thread block owns one tile of `owner`'s rows ("q" or "k"); `tile_option` names its size ("BLOCK_M" or "BLOCK_N").
    """
    batch, rows, heads, _ = args[owner].shape
    options = dict(tiles)
    strides = {f"{name}_strides": strides_argument(x) for name, x in args.items() if isinstance(x, Tensor)}
    sizes: dict[str, Any] = dict(rows=rows, num_sequences=batch * heads, num_heads=heads)
    sizes |= dict(D=args["q"].shape[-1], DV=args["v"].shape[-1])
    sizes |= dict(PRESCALED=args["scale"] <= 0)
    return -(-rows // options[tile_option]) * batch * heads, args | strides | sizes | options


def strides_argument(x: Tensor | None) -> Strides | StatsStrides | None:
    """Return the strides of a (B, S, H, D) or (B, H, S) tensor."""
    if x is None:
        return None
    return Strides(*x.stride()[:3]) if x.ndim == 4 else StatsStrides(*x.stride())


def segments_argument(segments: Segments) -> SegmentsArgument:
    """Return one or two segments.

    In the second one position = origin + row · step. The host computes this origin because Hopper's backward has no register
    left for it. It may exceed 32 bits if the steps differ, and so may row · step: both wrap modulo 2³², so the sum is right.
    """
    assert 1 <= len(segments) <= 2
    if len(segments) == 1:
        return SegmentsArgument(*segments[0], None, None, None, None)
    first, (start, step, count) = segments
    return SegmentsArgument(*first, start, step, count, (start - first[2] * step + 2**31) % 2**32 - 2**31)


def mask_argument(bounds: Bounds) -> MaskArgument:
    """Return a mask's bounds for kernels."""
    _, _, _, starts, ends, prefix = bounds
    left, right = (None if x == SENTINEL else x for x in bounds[:2])
    if not bounds.has_tensors:
        return MaskArgument(left, right, None, None, None, None, None, None)
    return MaskArgument(
        left,
        right,
        starts,
        ends,
        None if starts is None else starts.shape[-1],
        prefix,
        None if starts is None else batch_stride(starts, 2),
        None if prefix is None else batch_stride(prefix, 1),
    )


def mask_and_dropout_arguments(block: Block) -> dict[str, Any]:
    """Return the arguments `mask` and `drop`."""
    return dict(mask=mask_argument(block.mask.bounds(block.q.device)), drop=dropout_argument(block))


def dropout_argument(block: Block) -> DropoutArgument | None:
    """Return the dropout for kernels; None without dropout."""
    if block.seed is None:
        return None
    seed = block.seed.contiguous()  # an expanded seed has stride 0, like a single seed
    return DropoutArgument(seed, batch_stride(seed, 1), 1 - block.dropout, threshold(block.dropout), block.head_start)


def batch_stride(tensor: Tensor, dims: int) -> int:
    """Return the stride of the batch dimension; 0 if all sequences share one row."""
    return tensor.stride(0) if tensor.ndim == dims and tensor.shape[0] > 1 else 0


def keys_in_quads(block: Block, size: int) -> bool:
    """Return whether each tile of `size` keys is consecutive and starts at a multiple of 4 (see dropout.keep_tile).

    False without dropout, so that positions do not select the kernel.
    """
    k_at = block.k_at
    aligned = all(step == 1 and start % 4 == 0 for start, step, _ in k_at) and (len(k_at) == 1 or k_at[0][2] % size == 0)
    return block.seed is not None and aligned
