"""The ring: each rank keeps its queries and carries one online softmax over the K/V blocks of all ranks.

    forward     for each step:   (out, lse) ← block_forward(q, k, v, carry = (out, lse))
    backward    for each step:   dq += …;   dk, dv of the step → their owner ranks (`gradient_return`)

out, lse, dq, dk and dv stay in fp32 (fp64 for fp64) until the last step, and nothing is merged. So the result is the one that a
single device computes, on any number of ranks. The plan (`plan`) names the rows of each step. K/V of the next two steps, and
gradients of the previous one, are in transfer while a kernel runs:

    K/V         step 1        step 2        step 3
    kernels     local block   step 1        step 2        step 3        local block
    dK/dV                                   step 1        step 2        step 3

This is the definition. `ring_overlapped` has the same signatures, and also overlaps kernels with each other where it can.
"""

from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.blocks import block_backward, block_forward, block_view, new_outputs, query_heads
from ringspan.kernels.mask import Mask
from ringspan.kernels.segments import cut
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.parallel.gradient_return import GradientReturn
from ringspan.parallel.plan import Step
from ringspan.parallel.row_ranges import length, relative_to
from ringspan.parallel.transport.base import Transport, prefetched_steps
from ringspan.parallel.transport.buffers import split_gradients


def ring_forward(
    q: Tensor,  # (B, n, Hq, D), this rank's shard
    k: Tensor,  # (B, n, Hkv, D)
    v: Tensor,  # (B, n, Hkv, Dv)
    mask: Mask,  # of the whole sequence
    transport: Transport,  # with this rank's plan
    sink_lse: Tensor | None,  # (B, Hq, n): the softmax starts from the sinks
    head_start: int,  # index of the first query head among all heads, for dropout
    outputs: tuple[Tensor, Tensor] | None = None,  # tensors that out and lse are written to
    **options: Any,  # of block_forward
) -> tuple[Tensor, Tensor]:
    """Compute attention of this rank's queries: out (B, n, Hq, Dv) in the dtype of q, lse (B, Hq, n) in the accumulation dtype.

    Only rows that a later step reads (`plan.carried`) are accumulated in fp32; the local block's other rows are written to the
    output at once. With a window this leaves few fp32 rows.
    """
    plan, (out, lse) = transport.plan, outputs or new_outputs(q, v, last=True)
    sums = q.new_empty((q.shape[0], length(plan.carried), *out.shape[2:]), dtype=lse.dtype)
    for index, step, k_block, v_block in prefetched_steps(transport, k, v):
        for rows, q_at, is_last in plan.query_parts[index]:
            # Rows of the local block alone have unrelated sums or none: they begin with the sinks and end in `out`.
            sum_rows, lse_rows = block_view(sums, relative_to(rows, plan.carried)), block_view(lse, None, rows)
            carry = (sum_rows, lse_rows) if index else None if sink_lse is None else (None, sink_lse[:, :, rows])
            into = block_view(out, rows) if is_last else sum_rows, lse_rows
            block = block_view(q, rows), k_block, v_block, mask, q_at, step.k_at
            block_forward(*block, carry, is_last, head_start, into=into, **options)
    for rows in plan.unfinished:  # their last kernel did not know that it was
        out[:, rows] = sums[:, relative_to(rows, plan.carried)]
    return out, lse


def ring_backward(
    dout: Tensor,  # (B, n, Hq, Dv)
    delta: Tensor,  # (B, Hq, n), from output_delta
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,  # from ring_forward
    mask: Mask,
    transport: Transport,
    head_start: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv of this rank's shard, in the dtype of q. The local block: in halves, first and last, or at once."""
    local_step, *remote_steps = transport.plan.steps
    if not remote_steps:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        at = local_step.q_at, local_step.k_at
        block_backward(dout, q, k, v, lse, delta, mask, *at, dq, dk, dv, head_start, accumulate=False, **options)
        return dq, dk, dv
    sums = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)  # of dq
    returns = GradientReturn(transport, q, k, v, options["backend"])

    def launch(step: Step, k_block: Tensor, v_block: Tensor, kv_heads: slice, keys: slice, gradients: Tensor) -> None:
        """Launch the kernel of some KV heads and keys of a step. It adds to dq and overwrites `gradients`."""
        if keys.start == keys.stop:
            return
        rows, heads = step.queries, query_heads(q, k, kv_heads)
        queries = block_view(dout, rows, heads), block_view(q, rows, heads)
        kv = block_view(k_block, keys, kv_heads), block_view(v_block, keys, kv_heads)
        stats = block_view(lse, heads, rows), block_view(delta, heads, rows)
        k_at, at_heads = cut(step.k_at, keys.start, keys.stop), head_start + heads.start
        outputs = block_view(sums, rows, heads), *split_gradients(gradients, k.shape[3])
        block_backward(*queries, *kv, *stats, mask, step.q_at, k_at, *outputs, at_heads, accumulate="dq", **options)

    for index, step, k_block, v_block in prefetched_steps(transport, k, v):
        if index == 0:
            returns.wait_for_caller()
            launch(step, k_block, v_block, *returns.first_half, returns.first_buffer())
            continue
        for kv_heads in returns.head_parts():
            gradients = returns.send_buffer(index, kv_heads)
            launch(step, k_block, v_block, kv_heads, slice(0, step.num_keys), gradients)
            returns.send(index, kv_heads, gradients)
    returns.wait_for_sums()
    # Allocated only here, because memory use peaks while gradients are in transfer.
    dq = sums if sums.dtype == q.dtype else torch.empty_like(sums, dtype=q.dtype)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    returns.wait_for_caller()
    last_sums = returns.last_buffer()
    launch(local_step, k, v, *returns.last_half, last_sums)
    returns.finish(last_sums, dk, dv)
    return dq if dq is sums else dq.copy_(sums), dk, dv
