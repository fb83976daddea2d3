"""Memory that a ring allocates in addition to the local K/V and gradients. Imports no torch."""

import math

# Copies of constants in ringspan/parallel: bytes above which a block's dK/dV are sent in parts, and rows of a short shard
# (transport/select.py); bytes between which arriving ones are kept, and that are kept at most (gradient_return.py).
# tests/trainer/planning/test_memory.py compares them.
PART_BYTES, SHORT_SHARD, SMALL_BYTES, LARGE_BYTES, KEPT_BYTES = 2**28, 2**15, 2**26, 2**29, 2**29


def ring_backward_buffers(
    batch: int, rows: int, heads: int, width: int, ring: int, b: int, copied: bool = False, several_blocks: bool = False
) -> float:
    """Return the bytes that a ring's backward allocates in addition to the local K/V and gradients, for blocks of equal size.

    p2p sends directly from the K/V of one sequence; for several sequences it copies them first. Copy engines use the
    buffers of `symmetric_memory`, which are not counted here.

    Args:
        batch: sequences.
        rows: rows of all sequences of the batch on one rank.
        heads: KV heads.
        width: head_dim of K plus that of V.
        ring: ranks of the ring.
        b: bytes per element of K and V.
        copied: copy engines move the blocks, not p2p.
        several_blocks: steps may take several blocks.
    """
    elements = rows * heads * width
    steps = _blocks_per_step(ring, elements, heads, rows // batch, copied and several_blocks)
    blocks = (0 if copied else min(2, len(steps))) + (batch > 1)  # receive buffers (double buffering), and a packed copy
    parts = _num_parts(elements, heads, rows // batch)
    sizes = [4 * elements * step / parts for step in steps for _ in range(parts)]
    is_kept = SMALL_BYTES < 4 * elements < LARGE_BYTES
    max_kept = max(1, int(KEPT_BYTES // sizes[0])) if is_kept else 1  # the first is the largest
    sums = _returned_bytes(sizes, max_kept, copied)
    # Copy engines: half of the local block, kept apart from the remote gradients, or none if the block is computed at once.
    # With p2p it exists only at the end.
    half = (heads - heads // 2) / heads if heads > 1 else 1 / 2
    separate = half if copied else 0
    return blocks * b * elements + separate * 4 * elements + sums


def _returned_bytes(sizes: list[float], max_kept: int, copied: bool) -> float:
    """Return the most bytes of dK/dV buffers that exist at once. `sizes`: of the parts, in the order of sending.

    Every part has a receive buffer until it is added. With p2p it has a send buffer, too, from its kernel on.
    """
    peak, being_added, kept, buffers = 0.0, list[float](), list[float](), 1 if copied else 2
    for size in sizes:
        if not copied:
            peak = max(peak, 2 * sum(being_added + kept) + size)
        if len(kept) == max_kept:
            being_added, kept = kept, []
        kept.append(size)
        peak = max(peak, buffers * sum(being_added + kept))
    return peak


def symmetric_memory(batch: int, rows: int, heads: int, width: int, ring: int, b: int, several_blocks: bool = False) -> float:
    """Return the bytes of symmetric memory of copy engines: K/V of two steps and two parts of dK/dV.

    The arguments are those of `ring_backward_buffers`.
    """
    elements = rows * heads * width
    steps = _blocks_per_step(ring, elements, heads, rows // batch, several_blocks)
    parts = _num_parts(elements, heads, rows // batch)
    return max(steps) * elements * (min(2, len(steps)) * b + min(2, parts * len(steps)) * 4 / parts)


def _blocks_per_step(ring: int, elements: int, heads: int, rows: int, several_blocks: bool) -> list[int]:
    """The blocks of each step, as in parallel/transport/select.py; `rows` of one sequence."""
    limit = max(1, PART_BYTES * _num_parts(elements, heads, rows) // (4 * elements)) if several_blocks else 1
    steps, left = list[int](), ring - 1
    while left:
        steps.append(min(2 ** len(steps), left, limit))
        left -= steps[-1]
    return steps[::-1]


def _num_parts(elements: int, heads: int, rows: int) -> int:
    """The parts in which a block's dK/dV are sent, an upper bound for a larger step; `rows` of one sequence."""
    return math.gcd(heads, 4) if 4 * elements > PART_BYTES * (2 if rows <= SHORT_SHARD else 1) else 1
