"""`ring_attention`: attention over a sequence that the ranks of a group share, as one operator per direction.

    ring_attention           validates, packs the arguments
    ringspan::ring_forward   RingCall: unpack, compare arguments across ranks, plan, transport → ring_forward
    ringspan::ring_backward  the same → ring_backward; both are those of `ring_overlapped` or `ring`

torch.compile sees one call, and selective activation checkpointing can save (out, lse), so the ring never runs twice. Operators
take tensors, numbers and strings only, as in `kernels.attention`. So they receive the group by name, the layout as its fields,
and the mask's bounds twice: on the device for the kernels, and as known to the host for the plan.
On one rank q passes through dtensor.py, validate.py, choose.py, custom_op.py, ring.py, blocks.py, call_cache.py.
"""

import functools
import hashlib
from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ringspan.kernels.attention import derivative, differentiable, sink_carry, sink_gradient
from ringspan.kernels.backends.choose import adds_dq_atomically
from ringspan.kernels.blocks import output_delta
from ringspan.kernels.mask import Bounds, Mask
from ringspan.kernels.tensors import on_device
from ringspan.kernels.validate import (
    AttentionOptions,
    cast_for_autocast,
    check_head_start,
    check_mask_batch,
    check_qkv,
    check_tangents,
)
from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.argument_check import check_same_on_all_ranks, report_rejection
from ringspan.parallel.coordination.process_groups import GroupLike, RingGroups, as_process_group, group_by_name, ring_groups
from ringspan.parallel.dtensor import DTensorShards, has_dtensors
from ringspan.parallel.layout import Layout
from ringspan.parallel.plan import make_plan
from ringspan.parallel.ring_overlapped import choose_ring
from ringspan.parallel.transport.base import SingleRankTransport, Transport
from ringspan.parallel.transport.select import (
    COPY_TRANSPORTS,
    TRANSPORTS,
    blocks_per_step,
    choose_transport,
    gradient_bytes,
    make_transport,
)
from ringspan.parallel.transport.streams import is_capturing, wait_for_all


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    backend: str = "auto",
    *,
    layout: Layout,
    group: GroupLike | None = None,
    transport: str = "auto",
    head_start: int = 0,
    sequence_group: GroupLike | None = None,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    *,
    return_lse: Literal[True],
    deterministic: bool = False,
    backend: str = "auto",
    layout: Layout,
    group: GroupLike | None = None,
    transport: str = "auto",
    head_start: int = 0,
    sequence_group: GroupLike | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    *,
    layout: Layout,
    group: GroupLike | None = None,
    transport: str = "auto",
    head_start: int = 0,
    sequence_group: GroupLike | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    *,
    layout: Layout,
    group: GroupLike | None = None,
    transport: str = "auto",
    head_start: int = 0,
    sequence_group: GroupLike | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence whose shards are on the ranks of a group. Differentiable.

    Every rank of the group must call it, with its own shards and otherwise equal arguments. The result is the shard of what
    `attention` computes for the whole sequence. n is `layout.local_length`.

    q, k and v may be DTensors that are sharded on the sequence, Shard(1), along the ring's mesh dimension. Their local shards
    are the rows of the layout. Results are then DTensors as well. Other mesh dimensions may shard the batch or replicate.

    Args:
        q: (B, n, Hq, D), this rank's shard of the queries. Dtypes and head dims as in `attention`.
        k: (B, n, Hkv, D), this rank's shard of the keys; Hkv divides Hq.
        v: (B, n, Hkv, Dv), this rank's shard of the values.
        mask: Attention mask of the whole sequence; None means that every query attends to every key. `documents` are those of
            the whole sequence, in natural order, on every rank. If they are on the CPU, blocks without visible keys are not
            sent.
        scale: Factor of the scores; the default is D ** −0.5.
        softcap: Cap of the scores, s ← softcap · tanh(s / softcap); 0 means none.
        sinks: (Hq,) scores of a key whose value is 0. Their gradient is this rank's part: sum it over the ranks.
        dropout: Probability of dropping an attention weight.
        seed: Seed of dropout, an int or an int64 tensor () or (B,), equal on every rank. Required if `dropout` > 0.
        return_lse: Also return lse.
        deterministic: Make gradients equal bit for bit in every run. Only backend "hopper" needs it, and is slower with it;
            the ring itself always adds in a fixed order.
        backend: "auto", "reference", "chunked", "triton" or "hopper".
        layout: Layout of the sequence over the ranks of the group, with ulysses = 1.
        group: Process group of the ring, a DeviceMesh of one dimension, or (DeviceMesh, name of a dimension). The default is
            the default group. Without torch.distributed there is one rank.
        transport: "auto", "p2p" (send/recv), "copy" (copy engines, one host), "all_gather" or "copy_all" (the same two, with
            all remote blocks in one step).
        head_start: Index of the first query head among all heads, if this rank has only some of them.
        sequence_group: Group whose ranks compare their arguments; the default is `group`. Larger if ranks split heads too.

    Returns:
        out (B, n, Hq, Dv) in the dtype of q. With `return_lse` a pair of out and lse (B, Hq, n): the natural logarithm of the
        softmax's denominator, sinks included, in fp32 (fp64 for fp64), differentiable. A query that attends to no key has out 0
        and lse = its sink, or −inf without sinks. Padding rows have out 0, lse −inf and zero gradients.

    Raises:
        ValueError: An argument cannot be honoured here, has been rejected on another rank, or differs between ranks. The
            message names the argument.
        RuntimeError: A peer rank has died or did not answer within the group's timeout. The message names rank, operator and
            step.
    """
    options = AttentionOptions(scale, softcap, sinks, dropout, seed, deterministic, backend)
    ring_options: dict[str, Any] = dict(
        layout=layout, transport=transport, head_start=head_start, sequence_group=sequence_group
    )
    if has_dtensors(q, k, v, sinks, seed):
        shards = DTensorShards(q, k, v, sinks, dict(seed=seed), 1, layout, group)
        ring_options |= vars(replace(options, sinks=shards.sinks)) | dict(group=shards.group, return_lse=return_lse)
        return shards.wrap(ring_attention(shards.q, shards.k, shards.v, mask, **ring_options))
    check_tangents(q=q, k=k, v=v, sinks=sinks)  # not reported to peers, which have tangents too; jvp permits no communication
    out, lse = forward_op(*operator_arguments(q, k, v, mask, options, group=group, **ring_options))
    return (out, lse) if return_lse else out


def operator_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    options: AttentionOptions,
    layout: Layout,
    group: GroupLike | None,
    transport: str,
    head_start: int,
    sequence_group: GroupLike | None,
    has_backward: bool = False,
) -> tuple[Any, ...]:
    """Validate the arguments of `ring_attention` and return those of `forward_op`. Reports a rejection to the peer ranks.

    `has_backward` tells of a backward that autograd does not know of.
    """
    group = as_process_group(group)
    size, rank, group_name = (group.size(), group.rank(), group.group_name) if group is not None else (1, 0, "")
    sequence_group = group if sequence_group is None else as_process_group(sequence_group, "sequence_group")
    sequence_name = sequence_group.group_name if sequence_group is not None and sequence_group.size() > 1 else ""
    mask = Mask() if mask is None else mask
    try:
        q, k, v = cast_for_autocast(q, k, v)
        check_qkv(q, k, v)
        check_head_start(head_start)
        _validate_layout(q, k, mask, layout, size)
        if options.dropout and options.seed is None:
            reason = "needs a seed, the same on each rank: seed=step, for instance"
            raise ValueError(f"dropout={options.dropout} {reason}")
        if transport not in TRANSPORTS:
            raise ValueError(f"transport={transport!r}: choose one of {TRANSPORTS}")
        options = options.validated(q, v)
    except ValueError as error:
        if sequence_name and isinstance(q, Tensor):
            report_rejection(sequence_name, q.device, error)
        raise
    left, right, has_padding, *tensors = mask.bounds(q.device)
    _, plan_right, _, *plan_tensors = mask.host_mask().bounds()
    has_backward = has_backward or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    layout_fields = layout.length, layout.ranks, layout.multiple, rank
    integers = RingInts(left, right, has_padding, plan_right, head_start, options.deterministic, has_backward, *layout_fields)
    names = " ".join((options.backend, layout.kind, transport, group_name, sequence_name))
    floats = [options.scale, options.softcap, options.dropout]
    return q, k, v, *tensors, *plan_tensors, options.sinks, options.seed, [int(n) for n in integers], floats, names


cached_layout = functools.lru_cache(maxsize=256)(Layout)  # an operator receives the fields, and checking them takes host time


class RingInts(NamedTuple):
    """The integer arguments of the operators."""

    left: int
    right: int
    has_padding: int
    plan_right: int  # `right` as known to the host
    head_start: int
    deterministic: int
    has_backward: int  # whether autograd records the forward
    length: int  # from here: fields of the layout, and the rank in it
    ranks: int
    multiple: int
    rank: int


def _validate_layout(q: Tensor, k: Tensor, mask: Mask, layout: Layout, size: int) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a ringspan.Mask or None, not {type(mask).__name__}: masks are rules, not matrices")
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be a ringspan.Layout, not {type(layout).__name__}: Layout('zigzag', length=…, ranks=…)")
    if layout.ulysses > 1:
        raise ValueError(f"layout has ulysses={layout.ulysses}: call context_attention with its mesh, or use ulysses=1")
    if layout.ranks != size:
        raise ValueError(f"layout has ranks={layout.ranks}, the group has {size}: make the layout for the group's size")
    layout.check_shards(q=q, k=k)
    layout.check_mask(mask)
    check_mask_batch(q, mask)


class RingCall:
    """One run of an operator: unpacks its arguments into mask, transport and options of the block functions.

    Used as a context manager around the ring. Creating it compares the arguments across ranks, if a comparison is due.
    """

    def __init__(self, op: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> None:
        starts, ends, prefix, plan_starts, plan_ends, plan_prefix, self.sinks, seed, integers, floats, names = args
        n = RingInts(*integers)
        backend, kind, transport, group_name, sequence_name = names.split(" ")
        progress.enter(op)
        has_padding = bool(n.has_padding)
        self.mask = Mask.from_bounds(Bounds(n.left, n.right, has_padding, starts, ends, prefix))
        plan_mask = Mask.from_bounds(Bounds(n.left, n.plan_right, has_padding, plan_starts, plan_ends, plan_prefix))
        layout = cached_layout(kind, n.length, n.ranks, multiple=n.multiple)
        scale, softcap, dropout = floats
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, dropout=dropout, seed=seed, backend=backend)
        options["deterministic"] = bool(n.deterministic)
        self.options = options | dict(head_start=n.head_start)
        self.transport: Transport
        self.device = q.device

        def describe() -> dict[str, Any]:
            """Return the arguments that must be equal on every rank."""
            arguments: dict[str, Any] = {f"{name}'s shape": tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
            arguments |= {"dtype": str(q.dtype), "device type": q.device.type, "layout": str(layout), "transport": transport}
            arguments |= {"mask": dict(left=n.left, right=n.right, documents=starts is not None, prefix=prefix is not None)}
            arguments |= {"documents": (_digest(plan_starts), _digest(plan_ends)), "prefix": _digest(plan_prefix)}
            arguments |= {"factors": dict(scale=scale, softcap=softcap, dropout=dropout), "sinks": self.sinks is not None}
            arguments |= {"deterministic": bool(n.deterministic), "backend": backend}
            arguments |= {"requires_grad of q, k or v": bool(n.has_backward)}
            return arguments | {"seed": None if seed is None else seed.tolist()}

        if sequence_name:
            check_same_on_all_ranks(sequence_name, q.device, describe)
        if n.ranks > 1:
            self.groups: RingGroups | None = ring_groups(group_by_name(group_name), q.device)
            backward = op == "ring backward"
            chosen = choose_transport(transport, self.groups, q.device, k.nbytes + v.nbytes, backward)
            nbytes = gradient_bytes(k.shape[1], k, v)
            blocks = blocks_per_step(chosen, layout, n.plan_right == 0, nbytes, k.shape[2])
            plan = make_plan(layout, plan_mask, n.rank, blocks)
            self.transport = make_transport(chosen, self.groups, plan, q.device)
            self.uses_copy_engines = chosen in COPY_TRANSPORTS
        else:
            self.transport = SingleRankTransport(make_plan(layout, plan_mask, n.rank))
            self.groups, self.uses_copy_engines = None, False
        has_backward = op == "ring backward" or bool(n.has_backward)
        is_atomic = adds_dq_atomically(q, v, **options)
        self.ring = choose_ring(q.shape[1], self.mask, self.transport, is_atomic, has_backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, outputs: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return out and lse, written to `outputs` if given."""
        sink_lse = None if self.sinks is None else sink_carry(self.sinks, q)[1]
        out, lse = self.ring.ring_forward(q, k, v, self.mask, self.transport, sink_lse, outputs=outputs, **self.options)
        return out, lse

    def backward(
        self, dout: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""
        dq, dk, dv = self.ring.ring_backward(dout, delta, q, k, v, lse, self.mask, self.transport, **self.options)
        return dq, dk, dv

    def __enter__(self) -> "RingCall":
        return self

    def __exit__(self, error: type | None, *_: Any) -> None:
        """After an error, wait for side streams and abort the transport. Else watch the GPU, whose work is now enqueued."""
        if error is not None and not is_capturing(self.device):  # a capture runs nothing
            wait_for_all(self.device)  # transfers and sums still use this call's memory
            self.transport.abort()
        elif self.groups is not None and self.device.type == "cuda":
            progress.expect(self.groups.peers, self.groups.timeout_s, end=self.uses_copy_engines)


@differentiable("ring_forward", lambda: backward_op)
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    prefix: Tensor | None,
    plan_starts: Tensor | None,
    plan_ends: Tensor | None,
    plan_prefix: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    integers: list[int],  # RingInts
    floats: list[float],  # scale, softcap, dropout
    names: str,  # backend, layout kind, transport, ring group, sequence group, separated by blanks
) -> tuple[Tensor, Tensor]:
    args = starts, ends, prefix, plan_starts, plan_ends, plan_prefix, sinks, seed, integers, floats, names
    with on_device(q.device), RingCall("ring forward", q, k, v, *args) as call:
        return call.forward(q, k, v)


@derivative("ring_backward")
def backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    prefix: Tensor | None,
    plan_starts: Tensor | None,
    plan_ends: Tensor | None,
    plan_prefix: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    integers: list[int],
    floats: list[float],
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # dq, dk, dv, dsinks (empty without sinks)
    args = starts, ends, prefix, plan_starts, plan_ends, plan_prefix, sinks, seed, integers, floats, names
    with on_device(q.device), RingCall("ring backward", q, k, v, *args) as call:
        q_at = call.transport.plan.steps[0].q_at
        delta = output_delta(dout, out, dlse, backend=call.options["backend"], mask=call.mask, q_at=q_at)
        dq, dk, dv = call.backward(dout, delta, q, k, v, lse)
    return dq, dk, dv, lse.new_empty(0) if sinks is None else sink_gradient(sinks, lse, delta)


def _digest(x: Tensor | None) -> str | None:
    return None if x is None else hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]
