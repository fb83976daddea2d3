"""The ring of `ring`, with kernels that overlap each other as well as transfers.

Kernels of about a thread block per SM leave SMs idle in their last wave. Here the host launches a kernel on another stream
before the previous one has ended, so it starts on those SMs:

    stream      forward                             backward
    kernels 0   half of the heads of each step      local block, step 2, …
    kernels 1   the other half                      step 1, step 3, …
    filler                                          kernels that nothing waits for until the end
    casts       rows that are final in fp32

The price: gradients leave, and a K/V buffer is free, one kernel later. It needs transfers that take no SMs, a backward that
adds to dq atomically (Hopper, not deterministic), and a mask without padding. `streams` has the streams' priorities.
"""

import sys
from collections import deque
from itertools import cycle
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspan.kernels.blocks import block_backward, block_forward, block_view, new_outputs, query_heads
from ringspan.kernels.document_tables import SENTINEL
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import cut
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel import ring
from ringspan.parallel.gradient_return import GradientReturn, Half
from ringspan.parallel.plan import Step
from ringspan.parallel.row_ranges import difference, length, packed, relative_to
from ringspan.parallel.transport.base import KVPrefetch, Transport
from ringspan.parallel.transport.buffers import split_gradients
from ringspan.parallel.transport.streams import CurrentStream, SideStream, Wait

# A forward splits its heads over two kernels per step only if shard rows × steps is larger. Below, kernels are so short that
# the host cannot launch twice as many in time. A window counts by its kernels' time (`equivalent_rows`).
SPLIT_HEADS_ABOVE = 2**14
# A forward without a backward and without a window overlaps kernels only from this many rows on. Below, the GPU waits for the
# host; before a backward it does not, because the backward's kernels take longer. With a window a step has few rows, whose
# kernels leave SMs idle at any length.
OVERLAP_FORWARD_FROM = 2**14


def choose_ring(rows: int, mask: Mask, transport: Transport, adds_dq_atomically: bool, has_backward: bool = True) -> ModuleType:
    """Return this module if it can run a call with shards of these rows and is faster, else `ring`.

    NCCL's transfers need the SMs. With padding in the mask a kernel copies its inputs, and memory allocated on one stream is
    not reused by another.
    """
    can_overlap = adds_dq_atomically and not transport.needs_sms and not mask.has_padding
    has_window = equivalent_rows(rows, mask) < rows
    is_faster = has_backward or has_window or rows >= OVERLAP_FORWARD_FROM
    return sys.modules[__name__] if can_overlap and is_faster else ring


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    transport: Transport,
    sink_lse: Tensor | None,
    head_start: int,
    outputs: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `ring.ring_forward`. A step needs the carry of the previous one, so only kernels of different heads overlap."""
    plan, (out, lse) = transport.plan, outputs or new_outputs(q, v, last=True)
    sums = q.new_empty((q.shape[0], length(plan.carried), *out.shape[2:]), dtype=lse.dtype)
    num_heads, num_steps = k.shape[2], len(plan.steps)
    is_long = equivalent_rows(q.shape[1], mask) * num_steps > SPLIT_HEADS_ABOVE
    if num_steps > 1 and num_heads > 1 and is_long:
        groups = [slice(0, num_heads // 2), slice(num_heads // 2, num_heads)]
        streams, max_in_flight = kernel_streams(q.device), 1
    else:
        groups, streams, max_in_flight = [slice(0, num_heads)], [CurrentStream()], 0
    in_flight: deque[tuple[int, list[Wait]]] = deque()  # steps whose kernels the caller's stream has not waited for
    last_index = max(index for index, parts in enumerate(plan.query_parts) if parts)
    cast_stream = SideStream(q.device, "casts")

    def launch(index: int, k_block: Tensor, v_block: Tensor, kv_heads: slice) -> None:
        """Launch one kernel for each query part of a step, as `ring.ring_forward` does, for some heads."""
        heads = query_heads(q, k, kv_heads)
        kv = block_view(k_block, None, kv_heads), block_view(v_block, None, kv_heads)
        for rows, q_at, is_last in plan.query_parts[index]:
            sum_rows, lse_rows = block_view(sums, relative_to(rows, plan.carried), heads), block_view(lse, heads, rows)
            carry = (sum_rows, lse_rows) if index else None if sink_lse is None else (None, sink_lse[:, heads, rows])
            into = block_view(out, rows, heads) if is_last else sum_rows, lse_rows
            block = block_view(q, rows, heads), *kv, mask, q_at, plan.steps[index].k_at
            block_forward(*block, carry, is_last, head_start + heads.start, into=into, **options)

    prefetch = KVPrefetch(transport, k, v)
    for index in range(num_steps):
        k_block, v_block = prefetch.wait(index)
        for kv_heads, stream in zip(groups, streams, strict=True):
            stream.wait_for_caller()
            with stream.run():
                launch(index, k_block, v_block, kv_heads)
        in_flight.append((index, [stream.completion() for stream in streams]))
        while len(in_flight) > (max_in_flight if index < num_steps - 1 else 0):
            done, waits = in_flight.popleft()
            for wait in waits:
                wait()
            if done > 0:  # its K/V buffer is free
                prefetch.start(done + 2)
        if index == last_index - 1 and plan.unfinished:
            cast_stream.wait_for_caller()
            with cast_stream.run():
                for wait in [wait for _, waits in in_flight for wait in waits]:
                    wait()
    prefetch.finish()
    if plan.unfinished:
        # A kernel before the last one wrote these rows, so the cast overlaps the last one, which writes its own rows.
        with cast_stream.run():
            for rows in plan.unfinished:
                out[:, rows] = sums[:, relative_to(rows, plan.carried)]
        cast_stream.join()
    return out, lse


class LaunchedKernel(NamedTuple):
    """A kernel that the caller's stream has not waited for, and the remote gradients that it writes."""

    completion: Wait
    step: int
    kv_heads: slice
    gradients: Tensor | None  # None for the local block


def ring_backward(
    dout: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    mask: Mask,
    transport: Transport,
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `ring.ring_backward`. All kernels add to dq atomically, so all of them overlap.

    Local keys without remote gradients are computed apart if the others are few, as with a window: they need no fp32 sums, and
    their kernels fill SMs that other kernels leave idle.
    """
    local_step, *remote_steps = transport.plan.steps
    if not remote_steps:
        return ring.ring_backward(dout, delta, q, k, v, lse, mask, transport, head_start, **options)
    num_rows, num_heads, width = *k.shape[1:3], k.shape[3]
    sums = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)  # of dq
    shared = transport.plan.shared
    num_shared = sum(map(length, shared))
    unshared = difference([slice(0, local_step.num_keys)], shared)
    if few_shared := num_shared < num_rows:
        dk, dv = new_gradients(k, v, num_rows)
        for gradient in (dk, dv):
            gradient[:, local_step.num_keys :] = 0
    returns = GradientReturn(transport, q, k, v, options["backend"], shared, priority=-1)
    streams, filler_stream = kernel_streams(q.device), SideStream(q.device, "filler", priority=0)
    for stream in (*streams, filler_stream):
        stream.wait_for_caller()  # adds it to a CUDA graph, even if this rank launches nothing on it
    next_streams = cycle(streams)

    def launch(
        step: Step, k_block: Tensor, v_block: Tensor, kv_heads: slice, keys: slice, dk: Tensor, dv: Tensor, stream: SideStream
    ) -> None:
        """Launch the kernel of some KV heads and keys of a step. It adds to dq and overwrites dk and dv."""
        rows, heads = step.queries, query_heads(q, k, kv_heads)
        queries = block_view(dout, rows, heads), block_view(q, rows, heads)
        kv = block_view(k_block, keys, kv_heads), block_view(v_block, keys, kv_heads)
        stats = block_view(lse, heads, rows), block_view(delta, heads, rows)
        k_at, acc_dq = cut(step.k_at, keys.start, keys.stop), block_view(sums, rows, heads)
        inputs = *queries, *kv, *stats, mask, step.q_at, k_at
        stream.wait_for_caller()
        with stream.run():
            block_backward(*inputs, acc_dq, dk, dv, head_start + heads.start, accumulate="dq", **options)

    def launch_half(half: Half, target: Tensor, stream: SideStream) -> None:
        """Launch the kernels of one half of the shared local keys, one for each range of them."""
        kv_heads, half_rows = half
        for rows, packed_rows in packed(shared):
            start, end = max(packed_rows.start, half_rows.start), min(packed_rows.stop, half_rows.stop)
            if start < end:
                keys = slice(rows.start + start - packed_rows.start, rows.start + end - packed_rows.start)
                gradients = split_gradients(target[start - half_rows.start : end - half_rows.start], width)
                launch(local_step, k, v, kv_heads, keys, *gradients, stream)

    def retire(kernel: LaunchedKernel) -> None:
        """Wait for a kernel and return its gradients. After the last one of a step, start the next transfer into its buffer."""
        kernel.completion()
        if kernel.gradients is not None:
            returns.send(kernel.step, kernel.kv_heads, kernel.gradients)
            if kernel.kv_heads.stop == num_heads:
                prefetch.start(kernel.step + 2)

    prefetch = KVPrefetch(transport, k, v)
    returns.wait_for_caller()
    stream = next(next_streams)
    launch_half(returns.first_half, returns.first_buffer(), stream)
    in_flight = LaunchedKernel(stream.completion(), 0, slice(0, num_heads), None)
    for keys in unshared:
        launch(local_step, k, v, slice(0, num_heads), keys, dk[:, keys], dv[:, keys], filler_stream)
    for index, step in enumerate(remote_steps, 1):
        k_block, v_block = prefetch.wait(index)
        for kv_heads in returns.head_parts():
            part, stream = returns.send_buffer(index, kv_heads), next(next_streams)
            if step.pieces:
                launch(step, k_block, v_block, kv_heads, slice(0, step.num_keys), *split_gradients(part, width), stream)
            if index == len(remote_steps) and kv_heads.stop == num_heads:
                last_sums = returns.last_buffer()
                launch_half(returns.last_half, last_sums, filler_stream)
            retire(in_flight)
            in_flight = LaunchedKernel(stream.completion(), index, kv_heads, part)
    retire(in_flight)
    prefetch.finish()
    returns.wait_for_sums()
    # Allocated only here, because memory use peaks while gradients are in transfer.
    dq = sums if sums.dtype == q.dtype else torch.empty_like(sums, dtype=q.dtype)
    is_one_range = few_shared and len(shared) == 1
    dk_shared, dv_shared = (dk[:, shared[0]], dv[:, shared[0]]) if is_one_range else new_gradients(k, v, num_shared)
    returns.wait_for_caller()
    returns.finish(last_sums, dk_shared, dv_shared, filler_stream.completion())
    if not few_shared:
        dk, dv = dk_shared, dv_shared
    elif not is_one_range:
        for rows, packed_rows in packed(shared):
            dk[:, rows], dv[:, rows] = dk_shared[:, packed_rows], dv_shared[:, packed_rows]
    return dq if dq is sums else dq.copy_(sums), dk, dv


def new_gradients(k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    dk, dv = (x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (k, v))
    return dk, dv


def kernel_streams(device: torch.device) -> list[SideStream]:
    return [SideStream(device, name, priority=-2) for name in ("kernels 0", "kernels 1")]


def equivalent_rows(rows: int, mask: Mask) -> float:
    """Return the rows of a block without a window that takes as long as these rows with it: the root of rows × window."""
    bounds = mask.bounds()
    window = rows if SENTINEL in (bounds.left, bounds.right) else bounds.left + bounds.right + 1
    return (rows * min(rows, window)) ** 0.5
