"""Host half of the portable kernels: a block's segments, mask and dropout as kernel arguments."""

from typing import Any

from torch import Tensor

from ringspan.kernels.backends.block import Block
from ringspan.kernels.dropout import threshold
from ringspan.kernels.mask import SENTINEL, Bounds
from ringspan.kernels.runtime.launch import Arguments
from ringspan.kernels.segments import Segments

Tiles = tuple[tuple[str, Any], ...]  # BLOCK_* and launch options with their values


def rules(block: Block, tiles: dict[str, Any]) -> dict[str, Any]:
    """What every kernel takes of a block beside its tensors, and its tiles."""
    at = dict(q_at=at_argument(block.q_at), k_at=at_argument(block.k_at))
    return at | dict(scale=block.scale, softcap=block.softcap or None, tiles=tuple(tiles.items()))


def shared_out(owner: str, block: str, tiles: Tiles, given: dict[str, Any]) -> Arguments:
    """A portable kernel's arguments, with strides and sizes. Programs share out the rows of `owner`, by tiles of `block`."""
    batch, rows, heads, _ = given[owner].shape
    options = dict(tiles)
    strides = {f"{name}_strides": x.stride()[:3] for name, x in given.items() if isinstance(x, Tensor)}
    sizes = dict(rows=rows, num_sequences=batch * heads, num_heads=heads, D=given["q"].shape[-1], DV=given["v"].shape[-1])
    return -(-rows // options[block]) * batch * heads, given | strides | sizes | dict(PRESCALED=given["scale"] <= 0) | options


def at_argument(segments: Segments) -> tuple[int | None, ...]:
    """Start, step and count of one or two segments, and where the second would start if it had all rows: a kernel that works
    this out holds it, and Hopper's backward has no register left for it. It may be far outside of 32 bits if steps differ, as
    may its product with a row, which is taken from it: so both wrap, and the difference is right."""
    assert 1 <= len(segments) <= 2
    if len(segments) == 1:
        return (*segments[0], None, None, None, None)
    (*first, count), (start, step, rest) = segments
    return (*first, count, start, step, rest, (start - count * step + 2**31) % 2**32 - 2**31)


def mask_argument(bounds: Bounds) -> tuple[int | Tensor | None, ...]:
    left, right, _, starts, ends, prefix = bounds
    return (
        None if left == SENTINEL else left,
        None if right == SENTINEL else right,
        starts,
        ends,
        None if starts is None else starts.shape[-1],
        prefix,
        None if starts is None else batch_stride(starts, 2),
        None if prefix is None else batch_stride(prefix, 1),
    )


def of_mask_and_dropout(block: Block) -> dict[str, Any]:
    return dict(mask=mask_argument(block.mask.bounds(block.q.device)), drop=drop_argument(block))


def drop_argument(block: Block) -> tuple[Any, ...] | None:
    if block.seed is None:
        return None
    seed = block.seed.contiguous()  # an expanded one would have the stride of a single one
    return seed, batch_stride(seed, 1), 1 - block.dropout, threshold(block.dropout), block.head_start


def batch_stride(tensor: Tensor, dims: int) -> int:
    """0 where one row serves the whole batch."""
    return tensor.stride(0) if tensor.ndim == dims and tensor.shape[0] > 1 else 0


def quads(k_at: Segments, block: int) -> bool:
    """Whether every tile of keys is consecutive and starts at a multiple of 4 (see philox.keep_tile)."""
    return all(step == 1 and start % 4 == 0 for start, step, _ in k_at) and (len(k_at) == 1 or k_at[0][2] % block == 0)
