"""The ring: every rank keeps its queries and carries one softmax over the blocks of all ranks.

    forward     for each block:   (out, lse) ← block_forward(q, block, carry = (out, lse))
    backward    for each block:   dq += …,   dk and dv of the block → to their owner

Nothing is merged afterwards: out, lse, dq, dk and dv stay in fp32 until the last block, so the result is the one a single
device computes, on any number of ranks. While a block is used the next one travels, and the gradients of the one before go
home (`transport`). The plan (`plan`) says which rows of whom a step needs; each kernel is told where its rows stand.

In the backward half of the own block stands at the end, and the other half at the beginning: the first K/V come while one
half is computed, the last gradients go home behind the other, so that no kernel waits for either.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import Mask, block_backward, block_forward, output_delta
from kernels.block import Carry
from kernels.reference import accumulation_dtype
from kernels.segments import cut

from .beside import Beside
from .mover import Mover
from .packed import unpack
from .plan import Step
from .transport import Homeward, travel


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    mover: Mover,
    start: Carry | None,  # a sink, or nothing
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse of this rank's queries over everybody's keys."""
    steps = mover.plan.steps
    final = max(index for index, step in enumerate(steps) if step.pieces or index == 0)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    acc = out if final == 0 else torch.empty_like(out, dtype=accumulation_dtype(q.dtype))
    lse = acc.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    heads, done = slice(0, q.shape[2]), steps[final].queries
    early = [run for run in (slice(0, done.start), slice(done.stop, q.shape[1])) if run.start < run.stop]
    casts = Beside(q.device, "sums")
    for index, step, k_block, v_block in travel(mover, k, v):
        if index and not step.pieces:
            continue  # others need this step
        rows, last = step.queries, index == final
        so_far = (take(acc, rows, heads), take(lse, heads, rows)) if index else start
        into = take(out if last else acc, rows, heads), take(lse, heads, rows)
        at = step.q_at, step.k_at
        if last and early:
            casts.follow()
        block_forward(take(q, rows, heads), k_block, v_block, mask, *at, so_far, last, head_start, into=into, **options)
    if early:  # the last block wrote its rows in the final dtype; these saw their last key before it
        with casts.run():
            for rows in early:
                out[:, rows] = acc[:, rows]
        casts.done()()
    return out, lse


def ring_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    mover: Mover,
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's shard, and delta."""
    own = mover.plan.steps[0]
    delta = output_delta(dout, out, dlse, backend=options["backend"], mask=mask, q_at=own.q_at)
    group = q.shape[2] // k.shape[2]

    def block(
        step: Step, k_block: Tensor, v_block: Tensor, dk: Tensor, dv: Tensor, heads: slice, keys: slice, add: bool | str
    ) -> None:
        """One kernel: all queries of the step, some KV heads, some of its keys."""
        rows, query_heads = step.queries, slice(heads.start * group, heads.stop * group)
        block_backward(
            take(dout, rows, query_heads),
            take(q, rows, query_heads),
            take(k_block, keys, heads),
            take(v_block, keys, heads),
            take(lse, query_heads, rows),
            take(delta, query_heads, rows),
            mask,
            step.q_at,
            cut(step.k_at, keys.start, keys.stop),
            take(dq, rows, query_heads),
            dk,
            dv,
            head_start + query_heads.start,
            accumulate=add,
            **options,
        )

    all_heads = slice(0, k.shape[2])
    if len(mover.plan.steps) == 1:  # nobody needs anything of anybody: a single device's backward
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        block(mover.plan.steps[0], k, v, dk, dv, all_heads, slice(0, k.shape[1]), add=False)
        return dq, dk, dv, delta

    acc, width = accumulation_dtype(q.dtype), k.shape[3]
    dq = torch.zeros_like(q, dtype=acc, memory_format=torch.contiguous_format)
    mine = k.new_empty((k.shape[1], k.shape[0], k.shape[2], width + v.shape[3]), dtype=acc)
    home = Homeward(mover, mine)
    first, second = halves(k.shape[2], own.num_keys, own.num_keys)

    def own_block(heads: slice, keys: slice, add: bool | str) -> None:
        block(own, k, v, *unpack(mine[keys, :, heads], width), heads, keys, add)

    for index, step, k_block, v_block in travel(mover, k, v):
        if index == 0:
            own_block(*first, add="dq")
            home.begin(mine[own.num_keys :], mine[second[1], :, second[0]])
            continue
        for heads in home.head_parts():
            part = home.part(index, heads)
            if step.pieces:
                block(step, k_block, v_block, *unpack(part, width), heads, slice(0, step.num_keys), add="dq")
            home.send(index, heads, part)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    home.close()
    own_block(*second, add=True)
    free, last = halves(k.shape[2], own.num_keys, len(mine))
    home.finish(free, last, dk, dv)
    return dq.to(q.dtype), dk, dv, delta


def take(x: Tensor, one: slice, two: slice) -> Tensor:
    """x[:, one, two]; x itself if that is all of it, which takes no time."""
    x = x if one.stop - one.start == x.shape[1] else x[:, one]
    return x if two.stop - two.start == x.shape[2] else x[:, :, two]


def halves(heads: int, keys: int, end: int) -> list[tuple[slice, slice]]:
    """(KV heads, rows) of the two halves of a block: half of the heads each, or half of the keys if there is one head. Rows end
    with the keys, or behind the padding."""
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, end)), (slice(heads // 2, heads), slice(0, end))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, end))]
