"""The ring: every rank keeps its queries and carries one softmax over the blocks of all ranks.

    forward     for each block:   (out, lse) ← block_forward(q, block, carry = (out, lse))
    backward    for each block:   dq += …,   dk and dv of the block → to their owner

Nothing is merged afterwards: out, lse, dq, dk and dv stay in fp32 until the last block, so the result is the one a single
device computes, on any number of ranks. While a block is used the next one travels, and the gradients of the one before go
home (`transport`). The plan (`plan`) says which rows of whom a step needs; each kernel is told where its rows stand.

Heads go in one lane, or in two side by side (`lanes`). In the backward half of the own blocks stands at the end, and the other
half at the beginning: the first K/V come while one half is computed, the last gradients go home behind the other, so that no
kernel waits for either. With two lanes these are the first one's own block and the second one's.
"""

import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import Mask, block_backward, block_forward, output_delta
from kernels.reference import accumulation_dtype
from kernels.segments import cut

from .beside import Beside
from .lanes import side_by_side
from .mover import Mover
from .packed import unpack
from .plan import Step
from .transport import Homeward, Region, num_parts, travel


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    movers: list[Mover],  # one for each lane
    start: Tensor | None,  # lse of a sink
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse of this rank's queries over everybody's keys."""
    steps = movers[0].plan.steps
    final = max(index for index, step in enumerate(steps) if step.pieces or index == 0)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    acc = out if final == 0 else torch.empty_like(out, dtype=accumulation_dtype(q.dtype))
    lse = acc.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    everything, done = slice(0, q.shape[1]), steps[final].queries
    early = [run for run in (slice(0, done.start), slice(done.stop, q.shape[1])) if run.start < run.stop]

    def lane(index: int, kv_heads: slice, heads: slice) -> Iterator[None]:
        mover, casts = movers[index], Beside(q.device, "casts")
        begin = None if start is None else (None, take(start, heads, everything))
        given = take(k, everything, kv_heads), take(v, everything, kv_heads)
        yield from published(mover, *given)
        for number, step, k_block, v_block in travel(mover, *given):
            if step.pieces or number == 0:  # others may need a step that this rank does not
                rows, last = step.queries, number == final
                so_far = (take(acc, rows, heads), take(lse, heads, rows)) if number else begin
                into = take(out if last else acc, rows, heads), take(lse, heads, rows)
                where = step.q_at, step.k_at, so_far, last, head_start + heads.start
                if last and early:
                    casts.follow()
                block_forward(take(q, rows, heads), k_block, v_block, mask, *where, into=into, **options)
            yield
        if early:  # the last block wrote its rows in the final dtype; these saw their last key before it
            with casts.run():
                for rows in early:
                    take(out, rows, heads).copy_(take(acc, rows, heads))
            casts.done()()

    side_by_side([lane(*each) for each in split(len(movers), q.shape[2], k.shape[2])], q.device)
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
    movers: list[Mover],  # one for each lane
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's shard, and delta."""
    own, *others = movers[0].plan.steps
    delta = output_delta(dout, out, dlse, backend=options["backend"], mask=mask, q_at=own.q_at)
    if not others:  # nobody needs anything of anybody: a single device's backward
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        where = mask, own.q_at, own.k_at
        block_backward(dout, q, k, v, lse, delta, *where, dq, dk, dv, head_start, accumulate=False, **options)
        return dq, dk, dv, delta

    acc, width, group = accumulation_dtype(q.dtype), k.shape[3], q.shape[2] // k.shape[2]
    everything = slice(0, k.shape[1])
    sum_q = torch.zeros_like(q, dtype=acc, memory_format=torch.contiguous_format)
    sum_kv = k.new_empty((k.shape[1], k.shape[0], k.shape[2], width + v.shape[3]), dtype=acc)  # of the own block
    lanes = split(len(movers), q.shape[2], k.shape[2])
    parts = math.gcd(num_parts(movers[0].plan, k, v), *(kv_heads.stop - kv_heads.start for _, kv_heads, _ in lanes))

    @cache
    def gradients() -> tuple[Tensor, Tensor, Tensor]:
        """No memory is taken for them before a lane comes to its end: the first one, on the caller's stream, as all take
        equally many steps."""
        dq = sum_q if sum_q.dtype == q.dtype else torch.empty_like(sum_q, dtype=q.dtype)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        return dq, dk, dv

    def lane(index: int, kv_heads: slice, heads: slice) -> Iterator[None]:
        given = take(k, everything, kv_heads), take(v, everything, kv_heads)
        mine = take(sum_kv, slice(0, k.shape[0]), kv_heads)

        def block(
            step: Step, k_block: Tensor, v_block: Tensor, sums: Tensor, some: slice, keys: slice, add: bool | str
        ) -> None:
            """One kernel: all queries of the step, some of the lane's KV heads, some of the step's keys."""
            rows, of_q = step.queries, slice(heads.start + some.start * group, heads.start + some.stop * group)
            block_backward(
                take(dout, rows, of_q),
                take(q, rows, of_q),
                take(k_block, keys, some),
                take(v_block, keys, some),
                take(lse, of_q, rows),
                take(delta, of_q, rows),
                mask,
                step.q_at,
                cut(step.k_at, keys.start, keys.stop),
                take(sum_q, rows, of_q),
                *unpack(sums, width),
                head_start + of_q.start,
                accumulate=add,
                **options,
            )

        def own_block(part: Region, add: bool | str) -> None:
            some, keys = part
            if some.start < some.stop:
                block(own, *given, mine[keys, :, some], some, keys, add)

        of_own = partial(own_parts, index, len(movers), mine.shape[2], own.num_keys)
        first, second = of_own(end=own.num_keys)
        mover, home = movers[index], Homeward(movers[index], mine, parts)
        yield from published(mover, *given)
        for number, step, k_block, v_block in travel(mover, *given):
            if number == 0:
                own_block(first, add="dq")
                home.begin(mine[own.num_keys :], mine[second[1], :, second[0]])
                yield
                continue
            for some in home.head_parts():
                part = home.part(number, some)
                if step.pieces:
                    block(step, k_block, v_block, part, some, slice(0, step.num_keys), add="dq")
                home.send(number, some, part)
                yield
        dq, dk, dv = gradients()
        home.close()
        own_block(second, add=True)
        casts = Beside(q.device, "casts")
        casts.follow()
        free, last = of_own(end=len(mine))
        home.finish(free, last, take(dk, everything, kv_heads), take(dv, everything, kv_heads))
        if dq is not sum_q:
            with casts.run():
                take(dq, everything, heads).copy_(take(sum_q, everything, heads))
            casts.done()()

    side_by_side([lane(*each) for each in lanes], q.device)
    return *gradients(), delta


def split(lanes: int, heads: int, kv_heads: int) -> list[tuple[int, slice, slice]]:
    """Each lane's number, KV heads and query heads."""
    group = heads // kv_heads
    ends = [index * kv_heads // lanes for index in range(lanes + 1)]
    return [(index, slice(*run), slice(run[0] * group, run[1] * group)) for index, run in enumerate(pairwise(ends))]


def published(mover: Mover, k: Tensor, v: Tensor) -> Iterator[None]:
    """Shows them, and lets the other lane do so: behind a kernel that takes all SMs its copies would come late."""
    if len(mover.plan.steps) > 1:
        mover.publish(k, v)
        yield


def own_parts(lane: int, lanes: int, heads: int, keys: int, end: int) -> list[Region]:
    """(KV heads, rows) of what a lane does of its own block at the beginning, and at the end; one lane alone does half each."""
    if lanes == 1:
        return halves(heads, keys, end)
    whole, nothing = (slice(0, heads), slice(0, end)), (slice(0, 0), slice(0, end))
    return [whole, nothing] if lane == 0 else [nothing, whole]


def take(x: Tensor, one: slice, two: slice) -> Tensor:
    """x[:, one, two]; x itself if that is all of it, which takes no time."""
    x = x if one.stop - one.start == x.shape[1] else x[:, one]
    return x if two.stop - two.start == x.shape[2] else x[:, :, two]


def halves(heads: int, keys: int, end: int) -> list[Region]:
    """(KV heads, rows) of the two halves of a block: half of the heads each, or half of the keys if there is one head. Rows end
    with the keys, or behind the padding."""
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, end)), (slice(heads // 2, heads), slice(0, end))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, end))]
