"""`ring_attention`: the ring as one operator each way.

torch.compile sees one call, and selective activation checkpointing can keep (out, lse) and never runs the ring twice. As in
`kernels.attention` an op receives tensors, numbers and strings only: the group travels as its name, the layout as its
parts, and the mask as its numbers, twice: on the device for the kernels, and as the CPU knows them for the plan.
"""

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringspan.kernels.attention import cast_for_autocast, derivative, differentiable, sink_carry, sink_gradient
from ringspan.kernels.backends.choose import choose_backend
from ringspan.kernels.mask import Bounds, Mask
from ringspan.kernels.validate import check_head_start, check_mask_batch, check_options, check_qkv, check_sinks, check_tangents
from ringspan.parallel.coordination import progress
from ringspan.parallel.coordination.argument_check import check_same_on_all_ranks, report_rejection
from ringspan.parallel.coordination.process_groups import RingGroups, by_name, ring_groups
from ringspan.parallel.layout import Layout
from ringspan.parallel.plan import make_plan
from ringspan.parallel.ring import ring_backward, ring_forward
from ringspan.parallel.streams import on_device, wait_for_all
from ringspan.parallel.transport.base import SingleRankTransport, Transport
from ringspan.parallel.transport.select import (
    COPIED,
    TRANSPORTS,
    blocks_per_step,
    bytes_of_gradients,
    choose_transport,
    make_transport,
)


def ring_attention(
    q: Tensor,  # (B, n, Hq, D): this rank's shard
    k: Tensor,  # (B, n, Hkv, D)
    v: Tensor,  # (B, n, Hkv, Dv)
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
    group: ProcessGroup | None = None,
    transport: str = "auto",
    head_start: int = 0,
    among: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`kernels.attention` over a sequence that the ranks of a group share; shards in, shards out.

    mask.documents are those of the whole sequence, in natural order, on every rank; on the CPU they also say which blocks
    need not travel. Dropout needs a seed, the same on every rank. The gradient of sinks is this rank's part of it: sum it
    over the ranks, as that of any weight. Rows of padding give 0, lse -inf, and no gradient. `head_start` is the index of
    the first query head among all heads, where a rank has only some; `among` are then all ranks of the sequence, which
    compare their arguments. `deterministic` is the kernels' choice; what the ring itself adds up has a fixed order.
    """
    group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
    size, rank, name = (group.size(), group.rank(), group.group_name) if group is not None else (1, 0, "")
    among = group if among is None else among
    everyone = among.group_name if among is not None and among.size() > 1 else ""
    mask = Mask() if mask is None else mask
    check_tangents(q=q, k=k, v=v, sinks=sinks)  # not told to the others, who have them too: under jvp nothing can be sent
    try:
        q, k, v = cast_for_autocast(q, k, v)
        check_head_start(head_start)
        _check(q, k, v, mask, scale, softcap, sinks, dropout, seed, deterministic, layout, size, transport)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        choose_backend(backend, q, v, scale=scale, dropout=dropout)  # complains of a backend that cannot
    except ValueError as error:
        if everyone and isinstance(q, Tensor):
            report_rejection(everyone, q.device, error)
        raise
    if isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)
    left, right, padded, *tensors = mask.bounds(q.device)
    _, known_right, _, *known = mask.coarse().bounds()
    parts = layout.length, layout.ranks, layout.multiple, rank
    numbers = RingInts(left, right, padded, known_right, head_start, deterministic, *parts)
    names = " ".join((backend, layout.kind, transport, name, everyone))
    seed = seed if dropout else None
    factors = [scale, float(softcap), float(dropout)]
    out, lse = forward_op(q, k, v, *tensors, *known, sinks, seed, [int(n) for n in numbers], factors, names)
    return (out, lse) if return_lse else out


class RingInts(NamedTuple):
    """The integers that an op is given."""

    left: int
    right: int
    padded: int
    known_right: int
    head_start: int
    deterministic: int
    length: int
    ranks: int
    multiple: int
    rank: int


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dropout: float,
    seed: int | Tensor | None,
    deterministic: bool,
    layout: Layout,
    size: int,
    transport: str,
) -> None:
    check_qkv(q, k, v)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a kernels.Mask or None, not {type(mask).__name__}: masks here are rules, not matrices")
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be a parallel.Layout, not {type(layout).__name__}: Layout('zigzag', length=…, ranks=…)")
    if layout.ulysses > 1:
        raise ValueError(f"layout has ulysses={layout.ulysses}: call context_attention with its mesh, or use ulysses=1")
    if layout.ranks != size:
        raise ValueError(f"layout has ranks={layout.ranks}, the group has {size}: make the layout for the group's size")
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != layout.local_length:
            raise ValueError(
                f"{name} has {x.shape[1]} tokens, but a shard of {layout} has {layout.local_length}: "
                "cut the sequence with layout.shard, or make a layout of its length"
            )
    layout.check_mask(mask)
    check_mask_batch(q, mask)
    if dropout and seed is None:
        raise ValueError(f"dropout={dropout} over several ranks needs a seed, the same on each: seed=step, for instance")
    check_options(q, scale, softcap, dropout, seed, deterministic)
    if sinks is not None:
        check_sinks(q, sinks)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: choose one of {TRANSPORTS}")


class RingCall:
    """What an op's arguments mean: the mask, how blocks move, and the options of the block functions."""

    def __init__(self, what: str, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> None:
        starts, ends, prefix, known_starts, known_ends, known_prefix, self.sinks, seed, integers, factors, names = given
        n = RingInts(*integers)
        backend, kind, transport, group, everyone = names.split(" ")
        progress.enter(what)
        padded = bool(n.padded)
        self.mask = Mask.from_bounds(Bounds(n.left, n.right, padded, starts, ends, prefix))
        known = Mask.from_bounds(Bounds(n.left, n.known_right, padded, known_starts, known_ends, known_prefix))
        layout = Layout(kind, n.length, n.ranks, multiple=n.multiple)
        scale, softcap, dropout = factors
        self.options: dict[str, Any] = dict(scale=scale, softcap=softcap, dropout=dropout, seed=seed, backend=backend)
        self.options |= dict(head_start=n.head_start, deterministic=bool(n.deterministic))
        self.transport: Transport
        self.pair: RingGroups | None
        self.device = q.device

        def describe() -> dict[str, Any]:
            """What has to be the same on every rank."""
            said: dict[str, Any] = {f"{name}'s shape": tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
            said |= {"dtype": str(q.dtype), "device type": q.device.type, "layout": str(layout), "transport": transport}
            said |= {"mask": dict(left=n.left, right=n.right, documents=starts is not None, prefix=prefix is not None)}
            said |= {"documents": (_digest(known_starts), _digest(known_ends)), "prefix": _digest(known_prefix)}
            said |= {"factors": dict(scale=scale, softcap=softcap, dropout=dropout), "sinks": self.sinks is not None}
            return said | {"seed": None if seed is None else seed.tolist()}

        if everyone:
            check_same_on_all_ranks(everyone, q.device, describe)
        if n.ranks > 1:
            pair = ring_groups(by_name(group), q.device)
            backward = what == "ring backward"
            moves_by = choose_transport(transport, pair, q.device, k.nbytes + v.nbytes, backward)
            gradients = bytes_of_gradients(k.shape[1], k, v)
            blocks = blocks_per_step(moves_by, layout, n.known_right == 0, gradients, k.shape[2], backward)
            plan = make_plan(layout, known, n.rank, blocks)
            self.transport = make_transport(moves_by, pair, plan, q.device)
            self.pair, self.by_engines = pair, moves_by in COPIED
        else:
            self.transport = SingleRankTransport(make_plan(layout, known, n.rank))
            self.pair, self.by_engines = None, False

    def __enter__(self) -> "RingCall":
        return self

    def __exit__(self, error: type | None, *_: Any) -> None:
        """The device has been told everything: from here on it is watched, where it is a GPU with others to wait for."""
        if error is not None:
            wait_for_all(self.device)  # what is still on its way into this call's memory, or adds up there
            self.transport.abort()
        elif self.pair is not None and self.device.type == "cuda":
            progress.expect(self.pair.others, self.pair.seconds, end=self.by_engines)


@differentiable("ring_forward", lambda: backward_op)
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    prefix: Tensor | None,
    known_starts: Tensor | None,
    known_ends: Tensor | None,
    known_prefix: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    numbers: list[int],  # Numbers
    factors: list[float],  # scale, softcap, dropout
    names: str,  # backend, layout, transport, the ring's group, and that of all ranks of the sequence
) -> tuple[Tensor, Tensor]:
    given = starts, ends, prefix, known_starts, known_ends, known_prefix, sinks, seed, numbers, factors, names
    with on_device(q.device), RingCall("ring forward", q, k, v, *given) as call:
        start = None if sinks is None else sink_carry(sinks, q)[1]
        return ring_forward(q, k, v, call.mask, call.transport, start, **call.options)


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
    known_starts: Tensor | None,
    known_ends: Tensor | None,
    known_prefix: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    numbers: list[int],
    factors: list[float],
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # of q, k, v and sinks (empty without)
    given = starts, ends, prefix, known_starts, known_ends, known_prefix, sinks, seed, numbers, factors, names
    with on_device(q.device), RingCall("ring backward", q, k, v, *given) as call:
        dq, dk, dv, delta = ring_backward(dout, dlse, q, k, v, out, lse, call.mask, call.transport, **call.options)
    return dq, dk, dv, lse.new_empty(0) if sinks is None else sink_gradient(sinks, lse, delta)


def _digest(x: Tensor | None) -> str | None:
    return None if x is None else hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]
