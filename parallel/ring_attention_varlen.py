"""`ring_attention_varlen`: attention over a packed sequence, (tokens, heads, head dim), that the ranks of a group share.

    cu_seqlens      [0, 5, 6, 20]            of the whole packed batch, on every rank
    rank 0, 1       rows 0–9, rows 10–19     documents may begin and end anywhere, and span ranks

It is `ring_attention` of a batch of one with a document mask. If the host has the boundaries, the plan leaves out the rows that
no query attends to. Boundaries on a GPU are not read, so every block that the causal rule and the window leave is sent.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from ringspan.kernels.varlen import Boundaries, check_packed, packed_mask
from ringspan.parallel.coordination.argument_check import report_rejection
from ringspan.parallel.coordination.process_groups import GroupLike, as_process_group
from ringspan.parallel.dtensor import DTensorShards, has_dtensors
from ringspan.parallel.layout import Layout
from ringspan.parallel.ring_attention import ring_attention


@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
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
) -> Tensor: ...
@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
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
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
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
) -> Tensor | tuple[Tensor, Tensor]: ...
def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention within the documents of a packed sequence whose shards are on the ranks of a group.

    It is differentiable. Every rank of the group must call it, with its own shards and otherwise equal arguments. The result
    is the shard of what `attention_varlen` computes for the whole packed sequence. n is `layout.local_length`.

    Args:
        q: (n, Hq, D), this rank's shard of the queries; a tensor, or a DTensor with Shard(0) as for `ring_attention`.
        k: (n, Hkv, D), this rank's shard of the keys; Hkv divides Hq.
        v: (n, Hkv, Dv), this rank's shard of the values.
        cu_seqlens: Boundaries of the documents, (documents + 1,), from 0 to `layout.length`, in natural order and equal on
            every rank: an int32 tensor on the CPU or on q's device, or a list of ints. Documents may have any length, also 0,
            and may span ranks. With a list or a CPU tensor, blocks without visible keys are not sent.
        causal: Let a query attend to no later key.
        window: As in `attention_varlen`.
        scale: Factor of the scores; the default is D ** −0.5.
        softcap: Cap of the scores, s ← softcap · tanh(s / softcap); 0 means none.
        sinks: (Hq,) scores of a key whose value is 0. Their gradient is this rank's part: sum it over the ranks.
        dropout: Probability of dropping an attention weight.
        seed: Seed of dropout, an int or an int64 tensor (), equal on every rank. Required if `dropout` > 0.
        return_lse: Also return lse.
        deterministic: Make gradients equal bit for bit in every run. Only backend "hopper" needs it, and is slower with it.
        backend: "auto", "reference", "chunked", "triton" or "hopper".
        layout: Layout of the packed sequence, of the length of all documents together, with ulysses = 1.
        group: Process group of the ring, a DeviceMesh of one dimension, or (DeviceMesh, name of a dimension). The default is
            the default group.
        transport: "auto", "p2p", "copy", "all_gather" or "copy_all". See `ring_attention`.

    Returns:
        out (n, Hq, Dv) in the dtype of q. With `return_lse` a pair of out and lse (Hq, n), differentiable, in fp32 (fp64 for
        fp64). Padding rows have out 0, lse −inf and zero gradients.

    Raises:
        ValueError: An argument cannot be honoured here, has been rejected on another rank, or differs between ranks. The
            message names the argument.
        RuntimeError: A peer rank has died or did not answer within the group's timeout. The message names rank, operator and
            step.
    """
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, return_lse=return_lse)
    options |= dict(deterministic=deterministic, backend=backend, layout=layout, group=group, transport=transport)
    if has_dtensors(q, k, v, sinks, seed, cu_seqlens):
        shards = DTensorShards(q, k, v, sinks, dict(seed=seed, cu_seqlens=cu_seqlens), 0, layout, group)
        options |= dict(sinks=shards.sinks, group=shards.group)
        return shards.wrap(ring_attention_varlen(shards.q, shards.k, shards.v, cu_seqlens, causal, window, **options))
    options["group"] = ring = as_process_group(group)
    try:
        check_packed(q=q, k=k, v=v)
        if not isinstance(layout, Layout):
            made = "Layout('zigzag', length=…, ranks=…) of all tokens"
            raise ValueError(f"layout must be a ringspan.Layout, not {type(layout).__name__}: {made}")
        mask = packed_mask(Boundaries("cu_seqlens", cu_seqlens, layout.length), None, q, causal, window)
    except ValueError as error:
        if ring is not None and ring.size() > 1 and isinstance(q, Tensor):
            report_rejection(ring.group_name, q.device, error)
        raise
    result: Any = ring_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, **options)
    return (result[0].squeeze(0), result[1].squeeze(0)) if return_lse else result.squeeze(0)
