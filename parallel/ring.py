"""The ring: every rank keeps its queries and carries one softmax over the blocks of all ranks.

    forward     for each block:   (out, lse) ← block_forward(q, block, carry = (out, lse))
    backward    for each block:   dq += …,   dk and dv of the block → to their owner

Nothing is merged afterwards: out, lse, dq, dk and dv stay in fp32 (fp64 for fp64) until the last block, so the result is the
one a single device computes, on any number of ranks. While a block is used the next one travels, and the gradients of the one
before go home, to their owner (`homeward`). The plan (`plan`) says which rows of whom a step needs; each kernel is told where
its rows stand.

Where others' blocks concern few rows of the own one, as with a window, these alone are carried in fp32; the rest of the own
block goes straight into results. (In the backward where kernels may add to dq at the same time, see below.)

A kernel begins on the SMs that the last wave of the one ahead leaves idle, where it does not need what that one makes: in the
forward it is of other heads, in the backward kernels may add to dq at the same time.

In the backward the own block, which waits for nobody, hides what travels: half of it stands at the beginning and half at the
end, so the first K/V come while one is computed, and the last gradients go home behind the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.choose import adds_in_memory
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import cut
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel.gradient_return import GradientReturn, Region
from ringspan.parallel.plan import Step
from ringspan.parallel.row_ranges import length, packed, within, without
from ringspan.parallel.streams import CurrentStream, SideStream, StreamRotation
from ringspan.parallel.transport.base import Transport, prefetched_steps
from ringspan.parallel.transport.buffers import unpack
from ringspan.parallel.transport.select import num_parts

LONG = 2**14  # rows of a shard times steps. Up to here a forward's kernels are so short that twice as many would come late


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    transport: Transport,
    sink_lse: Tensor | None,
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse of this rank's queries over everybody's keys."""
    plan, dtype = transport.plan, accumulation_dtype(q.dtype)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    acc = q.new_empty((q.shape[0], length(plan.carried), *out.shape[2:]), dtype=dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    # A step's kernel is two, of half of the heads each, where these may be at work at the same time.
    in_two = len(plan.steps) > 1 and may_overlap(transport, mask) and k.shape[2] > 1 and q.shape[1] * len(plan.steps) > LONG
    half = k.shape[2] // 2 if in_two else 0
    groups = [slice(begin, end) for begin, end in ((0, half), (half, k.shape[2])) if begin < end]
    kernels = StreamRotation(kernel_streams(q.device) if in_two else [CurrentStream()])
    final = max(index for index, parts in enumerate(plan.parts) if parts)
    casts = SideStream(q.device, "casts")

    def block(index: int, step: Step, k_block: Tensor, v_block: Tensor, kv_heads: slice) -> None:
        """The kernel of some KV heads; or one for each part of the queries, or none where others alone need the step."""
        heads = query_heads(q, k, kv_heads)
        its_k, its_v = take(k_block, None, kv_heads), take(v_block, None, kv_heads)
        for rows, q_at, last in plan.parts[index]:
            # (for rows that no other step has, `sums` is of other rows or none, and nobody looks at it)
            sums, stats = take(acc, within(rows, plan.carried), heads), take(lse, heads, rows)
            carry = (sums, stats) if index else None if sink_lse is None else (None, sink_lse[:, heads, rows])
            where = q_at, step.k_at, carry, last, head_start + heads.start
            into = take(out, rows, heads) if last else sums, stats
            block_forward(take(q, rows, heads), its_k, its_v, mask, *where, into=into, **options)

    for index, step, k_block, v_block, used in prefetched_steps(transport, k, v):
        for kv_heads in groups:
            stream = kernels.next()
            stream.follow()
            with stream.run():
                block(index, step, k_block, v_block, kv_heads)
            kernels.given(used if kv_heads is groups[-1] else lambda: None)
        kernels.drain_to(len(groups) if in_two and index < len(plan.steps) - 1 else 0)
        if index == final - 1 and plan.unfinished:
            kernels.before(casts)
    if plan.unfinished:  # these had seen their last key before the last kernel, which wrote its rows in the final dtype
        with casts.run():
            for rows in plan.unfinished:
                out[:, rows] = acc[:, within(rows, plan.carried)]
        casts.join()
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
    transport: Transport,
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's shard, and delta."""
    own, *others = transport.plan.steps
    delta = output_delta(dout, out, dlse, backend=options["backend"], mask=mask, q_at=own.q_at)
    if not others:  # nobody needs anything of anybody: a single device's backward
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        where = mask, own.q_at, own.k_at
        block_backward(dout, q, k, v, lse, delta, *where, dq, dk, dv, head_start, accumulate=False, **options)
        return dq, dk, dv, delta

    acc, width = accumulation_dtype(q.dtype), k.shape[3]
    sum_q = torch.zeros_like(q, dtype=acc, memory_format=torch.contiguous_format)

    def final_gradients(rows: int) -> tuple[Tensor, Tensor]:
        dk, dv = (x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (k, v))
        return dk, dv

    together = may_overlap(transport, mask) and adds_in_memory(q, v, **options)  # then kernels may add to dq at the same time
    # "Block" is then of the keys that others have gradients for, if these are few: the rest's gradients need no sums, and their
    # kernels fill whatever others leave idle. (Elsewhere there would be less to hide behind, or a kernel more that goes over
    # all queries.)
    shared = transport.plan.shared if together else [slice(0, k.shape[1])]
    apart = without([slice(0, own.num_keys)], shared)
    rows_shared = sum(map(length, shared))
    keys_shared = min(rows_shared, own.num_keys)
    if few_are_shared := rows_shared < k.shape[1]:
        dk, dv = final_gradients(k.shape[1])
        for padded in (dk, dv):
            padded[:, own.num_keys :] = 0
    # dK/dV of the block: of its first half, and what others return; those of its second half come to it at the end
    own_sums = k.new_empty((rows_shared, k.shape[0], k.shape[2], width + v.shape[3]), dtype=acc)
    kernels = StreamRotation(kernel_streams(q.device) if together else [CurrentStream()])
    filling = SideStream(q.device, "filling", priority=0) if together else CurrentStream()
    first, second = halves(own_sums.shape[2], keys_shared, keys_shared)

    def block(
        step: Step,
        k_block: Tensor,
        v_block: Tensor,
        into: tuple[Tensor, Tensor],
        kv_heads: slice,
        keys: slice,
        stream: SideStream,
    ) -> None:
        """One kernel: all queries of the step, some KV heads, some of the step's keys. dk and dv go into two tensors."""
        rows, heads = step.queries, query_heads(q, k, kv_heads)
        stream.follow()
        with stream.run():
            block_backward(
                take(dout, rows, heads),
                take(q, rows, heads),
                take(k_block, keys, kv_heads),
                take(v_block, keys, kv_heads),
                take(lse, heads, rows),
                take(delta, heads, rows),
                mask,
                step.q_at,
                cut(step.k_at, keys.start, keys.stop),
                take(sum_q, rows, heads),
                *into,
                head_start + heads.start,
                accumulate="dq",
                **options,
            )

    def own_block(half: Region, sums: Tensor, stream: SideStream) -> None:
        kv_heads, its = half
        for run, at in packed(shared):
            begin, end = max(at.start, its.start), min(at.stop, its.stop)
            if begin < end:
                keys = slice(run.start + begin - at.start, run.start + end - at.start)
                into = sums[begin - its.start : end - its.start]
                block(own, k, v, unpack(into, width), kv_heads, keys, stream)

    def second_half() -> Tensor:
        second_sums = torch.empty_like(own_sums[second[1], :, second[0]])
        own_block(second, second_sums, filling)
        return second_sums

    def hand_on(index: int, kv_heads: slice, part: Tensor, used: Callable[[], None]) -> None:
        """What a kernel made is sent, and behind a step's last one others' keys may come to where its keys are."""
        home.send(index, kv_heads, part)
        if kv_heads.stop == k.shape[2]:
            used()

    free, last = halves(own_sums.shape[2], keys_shared, rows_shared)
    if rows_shared > keys_shared:
        own_sums[keys_shared:, :, free[0]] = 0  # padding, for which there is no kernel
    parts, priority = num_parts(transport.plan, k, v), -1 if together else 0
    home = GradientReturn(transport, own_sums, shared, free, last, parts, width, options["backend"], priority)
    for index, step, k_block, v_block, used in prefetched_steps(transport, k, v):
        if index == 0:
            home.follow()
            own_block(first, own_sums[first[1], :, first[0]], kernels.next())
            kernels.given(used)
            for keys in apart:
                block(own, k, v, (dk[:, keys], dv[:, keys]), slice(0, k.shape[2]), keys, filling)
            continue
        for kv_heads in home.head_parts():
            part, stream = home.part(index, kv_heads), kernels.next()
            if step.pieces:
                block(step, k_block, v_block, unpack(part, width), kv_heads, slice(0, step.num_keys), stream)
            if together and index == len(others) and kv_heads.stop == k.shape[2]:
                second_sums = second_half()
            kernels.given(partial(hand_on, index, kv_heads, part, used))
            kernels.drain_to(1 if together else 0)
        if index == len(others):  # before the transport waits for late readers: what was made is sent all the same
            kernels.drain_to(0)
    home.settle()
    # not earlier: while gradients travel memory is short
    dq = sum_q if acc == q.dtype else torch.empty_like(sum_q, dtype=q.dtype)
    dk_shared, dv_shared = final_gradients(rows_shared)
    home.follow()
    if not together:
        second_sums = second_half()
    home.finish(second_sums, filling.done(), dk_shared, dv_shared)
    if not few_are_shared:
        dk, dv = dk_shared, dv_shared
    else:
        for run, at in packed(shared):
            dk[:, run], dv[:, run] = dk_shared[:, at], dv_shared[:, at]
    if dq is not sum_q:
        dq.copy_(sum_q)
    return dq, dk, dv, delta


def may_overlap(transport: Transport, mask: Mask) -> bool:
    """Whether kernels may be at work at the same time. (Where a mask has padding a kernel copies what it reads, and what a
    stream has of memory serves no other.)"""
    return not transport.needs_sms and not mask.has_padding


def kernel_streams(device: torch.device) -> list[SideStream]:
    return [SideStream(device, use, priority=-2) for use in ("kernels", "more kernels")]


def query_heads(q: Tensor, k: Tensor, kv_heads: slice) -> slice:
    group = q.shape[2] // k.shape[2]
    return slice(kv_heads.start * group, kv_heads.stop * group)


def take(x: Tensor, one: slice | None, two: slice | None = None) -> Tensor:
    """x[:, one, two], of runs that lie in x, where None is all; x itself if that is all of it, which takes no time."""
    x = x if one is None or one.stop - one.start == x.shape[1] else x[:, one]
    return x if two is None or two.stop - two.start == x.shape[2] else x[:, :, two]


def halves(heads: int, keys: int, end: int) -> list[Region]:
    """(KV heads, rows) of the two halves of a block: half of the heads each, or half of the keys if there is one head. Rows end
    with the keys, or behind the padding."""
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, end)), (slice(heads // 2, heads), slice(0, end))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, end))]
