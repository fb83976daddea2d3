"""`context_attention`: the attention call of a model, for any number of ranks per sequence.

mesh   = Mesh(data=1, ring=2, ulysses=2)
layout = mesh.layout("zigzag", length=S)
out    = context_attention(q, k, v, mask=Mask(causal=True), layout=layout, mesh=mesh)     shards in, shards out

1 rank     attention
N ranks    Ulysses exchange → ring_attention → Ulysses exchange back; an axis of size 1 is skipped
"""

from typing import Any, Literal, overload

from torch import Tensor

from ringspan.kernels.attention import attention
from ringspan.kernels.mask import Mask
from ringspan.kernels.validate import cast_for_autocast, check_qkv, check_sinks, check_tangents
from ringspan.parallel.coordination.argument_check import COMPARED_CALLS, report_rejection
from ringspan.parallel.coordination.process_groups import check_group_exists
from ringspan.parallel.dtensor import DTensorShards, has_dtensors
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.ring_attention import ring_attention
from ringspan.parallel.transport.select import TRANSPORTS
from ringspan.parallel.ulysses import COMPARED_EXCHANGES, check_heads, to_heads, to_tokens


@overload
def context_attention(
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
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    transport: str = "auto",
) -> Tensor: ...
@overload
def context_attention(
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
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    transport: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def context_attention(
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
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    transport: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def context_attention(
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
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    transport: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence that `mesh.context_size` ranks share. Differentiable.

    Every rank of the mesh's context group must call it, with its own shards and otherwise equal arguments. The result is the
    shard of what `attention` computes for the whole sequence. With one rank this is `attention`; without Ulysses ranks it is
    `ring_attention`. n is `layout.local_length`. DTensors work as in `ring_attention`.

    Args:
        q: (B, n, Hq, D), the shard of `mesh.context_rank`. `mesh.ulysses` divides Hq.
        k: (B, n, Hkv, D), likewise; Hkv divides Hq. KV heads are repeated if `mesh.ulysses` does not divide Hkv.
        v: (B, n, Hkv, Dv), likewise.
        mask: Attention mask of the whole sequence; None means that every query attends to every key. `documents` are those of
            the whole sequence, in natural order, on every rank. If they are on the CPU, the ring does not send blocks without
            visible keys.
        scale: Factor of the scores; the default is D ** −0.5.
        softcap: Cap of the scores, s ← softcap · tanh(s / softcap); 0 means none.
        sinks: (Hq,) scores of a key whose value is 0. Their gradient is this rank's part: sum it over the ranks.
        dropout: Probability of dropping an attention weight.
        seed: Seed of dropout, an int or an int64 tensor () or (B,), equal on every rank. Required if `dropout` > 0 on several
            ranks; on one rank the default is drawn from torch's generator.
        return_lse: Also return lse.
        deterministic: Make gradients equal bit for bit in every run. Only backend "hopper" needs it, and is slower with it.
        backend: "auto", "reference", "chunked", "triton" or "hopper".
        layout: Layout of the sequence, from `mesh.layout`. Required on several ranks.
        mesh: Mesh of the job; None means one rank.
        transport: Transport of the ring: "auto", "p2p", "copy", "all_gather" or "copy_all". See `ring_attention`.

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
    if mesh is not None and not isinstance(mesh, Mesh):
        made = "make it with Mesh(data, ring, ulysses) or Mesh.from_device_mesh"
        raise ValueError(f"mesh must be a ringspan.Mesh, not {type(mesh).__name__}: {made}")
    if has_dtensors(q, k, v, sinks, seed):
        if mesh is None:
            raise ValueError("mesh=None with DTensors: pass Mesh.from_device_mesh(device_mesh, ring=…), or call ring_attention")
        shards = DTensorShards(q, k, v, sinks, dict(seed=seed), 1, layout, mesh)
        local_options: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=shards.sinks, dropout=dropout, seed=seed)
        local_options |= dict(return_lse=return_lse, deterministic=deterministic, backend=backend, transport=transport)
        return shards.wrap(context_attention(shards.q, shards.k, shards.v, mask, layout=layout, mesh=mesh, **local_options))
    size, ulysses = (1, 1) if mesh is None else (mesh.context_size, mesh.ulysses)
    try:
        _validate_layout(layout, size, ulysses, transport)
    except ValueError as error:
        _report_rejection(mesh, q, error)
        raise
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, dropout=dropout, seed=seed, deterministic=deterministic, backend=backend
    )
    if mesh is None or size == 1:
        if layout is not None and layout.local_length != layout.length:  # padding rows, which `attention` does not know
            group = None if mesh is None else mesh.ring_group
            return ring_attention(
                q, k, v, mask, sinks=sinks, return_lse=return_lse, layout=layout, group=group, transport=transport, **options
            )
        if layout is not None:
            layout.check_shards(**{name: x for name, x in (("q", q), ("k", k)) if isinstance(x, Tensor) and x.ndim == 4})
        return attention(q, k, v, mask, sinks=sinks, return_lse=return_lse, **options)
    assert layout is not None and mesh.context_group is not None
    check_group_exists(mesh.context_group, "mesh's context group")
    options |= dict(layout=layout.ring, group=mesh.ring_group, transport=transport)
    if ulysses == 1:
        return ring_attention(q, k, v, mask, sinks=sinks, return_lse=return_lse, **options)

    check_tangents(q=q, k=k, v=v, sinks=sinks)  # before the exchange, which would drop them
    q, k, v = cast_for_autocast(q, k, v)
    assert mesh.ulysses_group is not None and mesh.context_group is not None
    try:
        check_qkv(q, k, v)
        check_heads(q.shape[2], ulysses, size)
        layout.check_shards(q=q, k=k)
        if sinks is not None:
            check_sinks(q, sinks)
    except ValueError as error:
        _report_rejection(mesh, q, error)
        raise
    num_heads = q.shape[2] // ulysses
    head_start = num_heads * mesh.ulysses_rank
    sinks = None if sinks is None else sinks[head_start : head_start + num_heads]
    options |= dict(head_start=head_start, sequence_group=mesh.context_group)
    exchange_args = ulysses, mesh.ulysses_group.group_name, mesh.context_group.group_name, return_lse
    q, k, v = (to_heads(x, *exchange_args) for x in (q, k, v))
    out, lse = ring_attention(q, k, v, mask, sinks=sinks, return_lse=True, **options)
    out = to_tokens(out, *exchange_args)
    if not return_lse:
        return out
    lse = to_tokens(lse.transpose(1, 2).unsqueeze(-1), *exchange_args)  # (B, U · n, h, 1) → (B, n, Hq, 1)
    return out, lse.squeeze(-1).transpose(1, 2)


def _validate_layout(layout: Layout | None, size: int, ulysses: int, transport: str) -> None:
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(
            f"layout must be a ringspan.Layout, not {type(layout).__name__}: make it with mesh.layout(kind, length)"
        )
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: choose one of {TRANSPORTS}")
    if layout is None and size > 1:
        raise ValueError(
            f"layout=None with {size} ranks per sequence: a layout says which tokens a rank has; "
            "make it with mesh.layout(kind, length)"
        )
    if layout is not None and (layout.ranks, layout.ulysses) != (size, ulysses):
        raise ValueError(f"{layout} does not fit ring · ulysses = {size}: make it with mesh.layout(kind, length)")


def _report_rejection(mesh: Mesh | None, q: Tensor, error: ValueError) -> None:
    """Report an error to the peer ranks, which wait in the comparison of the first Ulysses exchange or of the ring."""
    if mesh is None or mesh.context_size == 1 or not isinstance(q, Tensor):
        return
    if mesh.ulysses > 1:
        group, compared_calls = mesh.context_group, COMPARED_EXCHANGES
    else:
        group, compared_calls = mesh.ring_group, COMPARED_CALLS
    assert group is not None
    report_rejection(group.group_name, q.device, error, compared_calls)
