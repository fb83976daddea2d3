"""The ring: each rank keeps its queries and carries one online softmax over the K/V blocks of all ranks.

    forward     for each step:   (out, lse) ← block_forward(q, k, v, carry = (out, lse))
    backward    for each step:   dq += …;   dk, dv of the step → their owner ranks (`gradient_return`)

out, lse, dq, dk and dv stay in fp32 (fp64 for fp64) until the last step, and nothing is merged. So the result is the one that a
single device computes, on any number of ranks. The plan (`plan`) names the rows of each step. Transfers overlap kernels:

    K/V         step 1        step 2        step 3
    kernels     local block   step 1        step 2        step 3
    dK/dV                                   step 1        step 2        step 3

Independent kernels overlap each other: in the forward those of two halves of the heads, in the backward all, if the backend
adds to dq atomically. A kernel then starts on the SMs that the last wave of the previous one leaves idle.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.choose import adds_dq_atomically
from ringspan.kernels.blocks import block_backward, block_forward
from ringspan.kernels.document_tables import SENTINEL
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import cut
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel.gradient_return import GradientReturn, Region
from ringspan.parallel.plan import Step
from ringspan.parallel.row_ranges import difference, length, packed, relative_to
from ringspan.parallel.streams import CurrentStream, SideStream, StreamRotation
from ringspan.parallel.transport.base import Transport, prefetched_steps
from ringspan.parallel.transport.buffers import split_gradients
from ringspan.parallel.transport.select import num_parts

# A forward splits its heads over two kernels per step only if shard rows × steps is larger. Below, kernels are so short that
# the host cannot launch twice as many in time. A window counts by its kernels' time (`equivalent_rows`).
SPLIT_HEADS_ABOVE = 2**14


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
    """Compute attention of this rank's queries over the keys of all ranks.

    Only rows that a later step reads (`plan.carried`) are accumulated in fp32; the local block's other rows are written to the
    output at once. With a window this leaves few fp32 rows.

    Args:
        q: (B, n, Hq, D), this rank's shard.
        k: (B, n, Hkv, D).
        v: (B, n, Hkv, Dv).
        mask: Attention mask of the whole sequence.
        transport: Transport with this rank's plan.
        sink_lse: (B, Hq, n), lse of the sinks, from which the softmax starts; None without sinks.
        head_start: Index of the first query head among all heads, for dropout.
        outputs: Tensors that out and lse are written to; None allocates them.
        options: Options of `block_forward`.

    Returns:
        out (B, n, Hq, Dv) in the dtype of q, and lse (B, Hq, n) in the accumulation dtype.
    """
    plan, dtype = transport.plan, accumulation_dtype(q.dtype)
    if outputs is None:
        outputs = q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    out, lse = outputs
    acc_out = q.new_empty((q.shape[0], length(plan.carried), *out.shape[2:]), dtype=dtype)
    # A step needs the carry of the previous one, so only kernels of different heads are independent.
    split_heads = (
        len(plan.steps) > 1
        and can_overlap_kernels(transport, mask)
        and k.shape[2] > 1
        and equivalent_rows(q.shape[1], mask) * len(plan.steps) > SPLIT_HEADS_ABOVE
    )
    middle = k.shape[2] // 2 if split_heads else 0
    head_groups = [slice(start, end) for start, end in ((0, middle), (middle, k.shape[2])) if start < end]
    rotation = StreamRotation(kernel_streams(q.device) if split_heads else [CurrentStream()])
    last_index = max(index for index, parts in enumerate(plan.query_parts) if parts)
    cast_stream = SideStream(q.device, "casts")

    def launch_step(index: int, step: Step, k_block: Tensor, v_block: Tensor, kv_heads: slice) -> None:
        """Launch one kernel for each query part of the step; none if the step is empty on this rank."""
        heads = query_heads(q, k, kv_heads)
        k_heads, v_heads = slice_dims(k_block, None, kv_heads), slice_dims(v_block, None, kv_heads)
        for rows, q_at, is_last in plan.query_parts[index]:
            # For rows that only this step has, `sums` has unrelated rows or none. It is then not read: `index` is 0 or the
            # output goes into `out`.
            sums, stats = slice_dims(acc_out, relative_to(rows, plan.carried), heads), slice_dims(lse, heads, rows)
            carry = (sums, stats) if index else None if sink_lse is None else (None, sink_lse[:, heads, rows])
            into = slice_dims(out, rows, heads) if is_last else sums, stats
            block_forward(
                slice_dims(q, rows, heads),
                k_heads,
                v_heads,
                mask,
                q_at,
                step.k_at,
                carry,
                is_last,
                head_start + heads.start,
                into=into,
                **options,
            )

    for index, step, k_block, v_block, release in prefetched_steps(transport, k, v):
        for kv_heads in head_groups:
            stream = rotation.next()
            stream.wait_for_caller()
            with stream.run():
                launch_step(index, step, k_block, v_block, kv_heads)
            rotation.submit(release if kv_heads is head_groups[-1] else lambda: None)
        rotation.drain_to(len(head_groups) if split_heads and index < len(plan.steps) - 1 else 0)
        if index == last_index - 1 and plan.unfinished:
            rotation.order_before(cast_stream)
    if plan.unfinished:
        # The kernel of step last_index - 1 or an earlier one was the last with a visible key for these rows. The cast overlaps
        # the last kernel, which writes its own rows in the output dtype.
        with cast_stream.run():
            for rows in plan.unfinished:
                out[:, rows] = acc_out[:, relative_to(rows, plan.carried)]
        cast_stream.join()
    return out, lse


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
    """Compute the gradients of this rank's shard.

    The local block waits for no transfer, so it overlaps them: its first half runs while the first K/V arrive, its last half
    while the last gradients are returned.

    Args:
        dout: (B, n, Hq, Dv), gradient of out.
        delta: (B, Hq, n), from `output_delta`.
        q, k, v, mask, transport, head_start, options: As for `ring_forward`.
        lse: Result of `ring_forward`.

    Returns:
        dq, dk, dv of the shapes and dtype of q, k, v.
    """
    local_step, *remote_steps = transport.plan.steps
    if not remote_steps:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        at = local_step.q_at, local_step.k_at
        block_backward(dout, q, k, v, lse, delta, mask, *at, dq, dk, dv, head_start, accumulate=False, **options)
        return dq, dk, dv

    acc_dtype, width = accumulation_dtype(q.dtype), k.shape[3]
    acc_dq = torch.zeros_like(q, dtype=acc_dtype, memory_format=torch.contiguous_format)

    def new_gradients(rows: int) -> tuple[Tensor, Tensor]:
        dk, dv = (x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (k, v))
        return dk, dv

    overlap = can_overlap_kernels(transport, mask) and adds_dq_atomically(q, v, **options)
    # With overlap, local keys without remote gradients are computed apart if the others are few: they need no fp32 sums, and
    # their kernels fill SMs that other kernels leave idle. Without overlap this would leave less to overlap transfers with, or
    # add a kernel that reads all queries again.
    shared = transport.plan.shared if overlap else [slice(0, k.shape[1])]
    unshared = difference([slice(0, local_step.num_keys)], shared)
    num_shared = sum(map(length, shared))
    num_shared_keys = min(num_shared, local_step.num_keys)
    if few_shared := num_shared < k.shape[1]:
        dk, dv = new_gradients(k.shape[1])
        if local_step.num_keys < k.shape[1]:
            for gradient in (dk, dv):
                gradient[:, local_step.num_keys :] = 0
    # dK/dV of the shared local keys: local contribution of the first half, and remote ones. See GradientReturn.
    local_sums = k.new_empty((num_shared, k.shape[0], k.shape[2], width + v.shape[3]), dtype=acc_dtype)
    rotation = StreamRotation(kernel_streams(q.device) if overlap else [CurrentStream()])
    filler_stream = SideStream(q.device, "filler", priority=0) if overlap else CurrentStream()
    # The kernels of unshared keys are enough to overlap transfers with; then one kernel computes the shared ones.
    split = whole_region if few_shared else half_regions
    first_half, last_half = split(local_sums.shape[2], num_shared_keys, num_shared_keys)

    def launch_kernel(
        step: Step,
        k_block: Tensor,
        v_block: Tensor,
        gradients: tuple[Tensor, Tensor],
        kv_heads: slice,
        keys: slice,
        stream: SideStream,
    ) -> None:
        """Launch the kernel of all queries of the step, and some KV heads and keys. Writes dk and dv into `gradients`."""
        rows, heads = step.queries, query_heads(q, k, kv_heads)
        stream.wait_for_caller()
        with stream.run():
            block_backward(
                slice_dims(dout, rows, heads),
                slice_dims(q, rows, heads),
                slice_dims(k_block, keys, kv_heads),
                slice_dims(v_block, keys, kv_heads),
                slice_dims(lse, heads, rows),
                slice_dims(delta, heads, rows),
                mask,
                step.q_at,
                cut(step.k_at, keys.start, keys.stop),
                slice_dims(acc_dq, rows, heads),
                *gradients,
                head_start + heads.start,
                accumulate="dq",
                **options,
            )

    def launch_local_half(half: Region, sums: Tensor, stream: SideStream) -> None:
        """Launch the kernels of one half of the shared local keys, one for each range of them."""
        kv_heads, half_rows = half
        for rows, packed_rows in packed(shared):
            start, end = max(packed_rows.start, half_rows.start), min(packed_rows.stop, half_rows.stop)
            if start < end:
                keys = slice(rows.start + start - packed_rows.start, rows.start + end - packed_rows.start)
                target = sums[start - half_rows.start : end - half_rows.start]
                launch_kernel(local_step, k, v, split_gradients(target, width), kv_heads, keys, stream)

    def launch_last_half() -> Tensor:
        sums = torch.empty_like(local_sums[last_half[1], :, last_half[0]])
        launch_local_half(last_half, sums, filler_stream)
        return sums

    def return_part(index: int, kv_heads: slice, part: Tensor, release: Callable[[], None]) -> None:
        """Send a part after its kernel. After the step's last part, release the K/V buffer to the next transfer."""
        returns.send(index, kv_heads, part)
        if kv_heads.stop == k.shape[2]:
            release()

    first_region, last_region = split(local_sums.shape[2], num_shared_keys, num_shared)
    if num_shared > num_shared_keys:
        local_sums[num_shared_keys:, :, first_region[0]] = 0  # padding rows, which no kernel writes
    parts, priority = num_parts(transport.plan, k, v), -1 if overlap else 0
    returns = GradientReturn(
        transport, local_sums, shared, first_region, last_region, parts, width, options["backend"], priority
    )
    for index, step, k_block, v_block, release in prefetched_steps(transport, k, v):
        if index == 0:
            returns.wait_for_caller()
            launch_local_half(first_half, local_sums[first_half[1], :, first_half[0]], rotation.next())
            rotation.submit(release)
            for keys in unshared:
                launch_kernel(local_step, k, v, (dk[:, keys], dv[:, keys]), slice(0, k.shape[2]), keys, filler_stream)
            continue
        for kv_heads in returns.head_parts():
            part, stream = returns.send_buffer(index, kv_heads), rotation.next()
            if step.pieces:
                keys = slice(0, step.num_keys)
                launch_kernel(step, k_block, v_block, split_gradients(part, width), kv_heads, keys, stream)
            if overlap and index == len(remote_steps) and kv_heads.stop == k.shape[2]:
                last_sums = launch_last_half()
            rotation.submit(partial(return_part, index, kv_heads, part, release))
            rotation.drain_to(1 if overlap else 0)
        if index == len(remote_steps):  # sends the last gradients before the transport waits for late reader ranks
            rotation.drain_to(0)
    returns.wait_for_sums()
    # Allocated only here, because memory use peaks while gradients are in transfer.
    dq = acc_dq if acc_dtype == q.dtype else torch.empty_like(acc_dq, dtype=q.dtype)
    is_one_range = few_shared and len(shared) == 1
    dk_shared, dv_shared = (dk[:, shared[0]], dv[:, shared[0]]) if is_one_range else new_gradients(num_shared)
    returns.wait_for_caller()
    if not overlap:
        last_sums = launch_last_half()
    returns.finish(last_sums, filler_stream.completion(), dk_shared, dv_shared)
    if not few_shared:
        dk, dv = dk_shared, dv_shared
    elif not is_one_range:
        for rows, packed_rows in packed(shared):
            dk[:, rows], dv[:, rows] = dk_shared[:, packed_rows], dv_shared[:, packed_rows]
    if dq is not acc_dq:
        dq.copy_(acc_dq)
    return dq, dk, dv


def can_overlap_kernels(transport: Transport, mask: Mask) -> bool:
    """Whether kernels on several streams may run concurrently.

    With padding in the mask a kernel copies its inputs, and memory allocated on one stream is not reused by another. NCCL's
    transfers need the SMs.
    """
    return not transport.needs_sms and not mask.has_padding


def equivalent_rows(rows: int, mask: Mask) -> float:
    """Return the rows of a block without a window that takes as long as these rows with it: the root of rows × window."""
    bounds = mask.bounds()
    window = rows if SENTINEL in (bounds.left, bounds.right) else bounds.left + bounds.right + 1
    return (rows * min(rows, window)) ** 0.5


def kernel_streams(device: torch.device) -> list[SideStream]:
    return [SideStream(device, name, priority=-2) for name in ("kernels 0", "kernels 1")]


def query_heads(q: Tensor, k: Tensor, kv_heads: slice) -> slice:
    """Return the query heads of these KV heads."""
    group = q.shape[2] // k.shape[2]
    return slice(kv_heads.start * group, kv_heads.stop * group)


def slice_dims(x: Tensor, dim_1: slice | None, dim_2: slice | None = None) -> Tensor:
    """Return x[:, dim_1, dim_2], where None is the whole dimension; x itself if that is all of it, which saves host time."""
    x = x if dim_1 is None or dim_1.stop - dim_1.start == x.shape[1] else x[:, dim_1]
    return x if dim_2 is None or dim_2.stop - dim_2.start == x.shape[2] else x[:, :, dim_2]


def whole_region(heads: int, keys: int, end: int) -> list[Region]:
    """Return (KV heads, rows) of a whole block, and of a second half without rows."""
    return [(slice(0, heads), slice(0, end)), (slice(0, heads), slice(end, end))]


def half_regions(heads: int, keys: int, end: int) -> list[Region]:
    """Return (KV heads, rows) of the two halves of a block: half of the heads each, or half of the keys if there is one head.

    Rows end at `end`: at the last key, or after the padding.
    """
    if heads > 1:
        return [(slice(0, heads // 2), slice(0, end)), (slice(heads // 2, heads), slice(0, end))]
    return [(slice(0, 1), slice(0, keys // 2)), (slice(0, 1), slice(keys // 2, end))]
