"""`context_attention`: the one attention that a model calls, however many ranks share its sequence.

    mesh   = Mesh(data=1, ring=2, ulysses=2)
    layout = mesh.layout("zigzag", length=S)
    out    = context_attention(q, k, v, mask=Mask(causal=True), layout=layout, mesh=mesh)       shards in, shards out

One rank: the plain kernel. Otherwise the Ulysses exchange gathers the tokens of its group for some heads, the ring spans
the groups, and the exchange back follows. Either may be of size 1 and then is not there.
"""

from typing import Any

from torch import Tensor

from ringspan.kernels.attention import attention, cast_for_autocast
from ringspan.kernels.mask import Mask
from ringspan.kernels.validate import check_qkv, check_sinks, check_tangents
from ringspan.parallel.coordination.argument_check import FIRST, report_rejection
from ringspan.parallel.layout import Layout
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.ring_attention import ring_attention
from ringspan.parallel.transport.select import TRANSPORTS
from ringspan.parallel.ulysses import EXCHANGES, check_heads, to_heads, to_tokens


def context_attention(
    q: Tensor,  # (B, n, Hq, D): the shard of mesh.context_rank
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
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    transport: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`kernels.attention` of a sequence that mesh.context_size ranks share; see `ring_attention` for what that asks for."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a parallel.Mesh, not {type(mesh).__name__}")
    size, ulysses = (1, 1) if mesh is None else (mesh.context_size, mesh.ulysses)
    try:
        _check_place(layout, size, ulysses, transport)
    except ValueError as error:
        _tell(mesh, q, error)
        raise
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, dropout=dropout, seed=seed, deterministic=deterministic, backend=backend
    )
    if mesh is None or size == 1:
        if layout is not None and isinstance(q, Tensor) and q.ndim == 4 and q.shape[1] != layout.length:
            raise ValueError(f"q has {q.shape[1]} tokens, the layout has length={layout.length}: make a layout of that length")
        return attention(q, k, v, mask, sinks=sinks, return_lse=return_lse, **options)
    assert layout is not None
    options |= dict(layout=layout.ring, group=mesh.ring_group, transport=transport)
    if ulysses == 1:
        return ring_attention(q, k, v, mask, sinks=sinks, return_lse=return_lse, **options)

    check_tangents(q=q, k=k, v=v, sinks=sinks)  # the exchange would lose them
    q, k, v = cast_for_autocast(q, k, v)
    assert mesh.ulysses_group is not None and mesh.context_group is not None
    try:
        check_qkv(q, k, v)
        check_heads(q.shape[2], ulysses, size)
        for name, x in (("q", q), ("k", k)):
            if x.shape[1] != layout.local_length:
                shard = f"a shard of {layout} has {layout.local_length}"
                raise ValueError(f"{name} has {x.shape[1]} tokens, but {shard}: use layout.shard")
        if sinks is not None:
            check_sinks(q, sinks)
    except ValueError as error:
        _tell(mesh, q, error)
        raise
    heads = q.shape[2] // ulysses
    head_start = heads * mesh.ulysses_rank
    sinks = None if sinks is None else sinks[head_start : head_start + heads]
    options |= dict(head_start=head_start, among=mesh.context_group)
    trip = ulysses, mesh.ulysses_group.group_name, mesh.context_group.group_name
    q, k, v = (to_heads(x, *trip) for x in (q, k, v))
    out, lse = ring_attention(q, k, v, mask, sinks=sinks, return_lse=True, **options)
    out = to_tokens(out, *trip)
    if not return_lse:
        return out
    lse = to_tokens(lse.transpose(1, 2).unsqueeze(-1), *trip)  # (B, U · n, h, 1) → (B, n, Hq, 1)
    return out, lse.squeeze(-1).transpose(1, 2)


def _check_place(layout: Layout | None, size: int, ulysses: int, transport: str) -> None:
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(f"layout must be a parallel.Layout, not {type(layout).__name__}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: choose one of {TRANSPORTS}")
    if layout is None and size > 1:
        raise ValueError("layout is None: which tokens a rank has must be known; make it with mesh.layout(kind, length)")
    if layout is not None and (layout.ranks, layout.ulysses) != (size, ulysses):
        raise ValueError(f"{layout} does not fit ring · ulysses = {size}: make it with mesh.layout(kind, length)")


def _tell(mesh: Mesh | None, q: Tensor, error: ValueError) -> None:
    """The others, who would wait for this rank where they compare what they were given: an exchange's first, or the ring's."""
    if mesh is None or mesh.context_size == 1 or not isinstance(q, Tensor):
        return
    group, first = (mesh.context_group, EXCHANGES) if mesh.ulysses > 1 else (mesh.ring_group, FIRST)
    assert group is not None
    report_rejection(group.group_name, q.device, error, first)
