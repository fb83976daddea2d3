"""`attention`: exact attention on one device, as one operator that torch.compile and checkpointing understand.

    out = attention(q, k, v, mask=Mask(causal=True))            q (B, S, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)

It checks its arguments, picks a backend, and calls `block_forward` once, for the one block that is everything. A sink is
the carry that this block starts from. Two operators, `ringspan::attention_forward` and `ringspan::attention_backward`, hold
the work, so that torch.compile(fullgraph=True) sees one call each way, and selective activation checkpointing can keep
(out, lse) and never run attention twice. Nothing waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Carry
from ringspan.kernels.backends.choose import BACKENDS, choose_backend
from ringspan.kernels.blocks import block_backward, block_forward, output_delta
from ringspan.kernels.mask import Bounds, Mask
from ringspan.kernels.runtime.custom_op import operator
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.kernels.validate import check_mask, check_options, check_qkv, check_sinks, check_tangents

__all__ = ["BACKENDS", "attention"]


def attention(
    q: Tensor,  # (B, S, Hq, D)
    k: Tensor,  # (B, Sk, Hkv, D)
    v: Tensor,  # (B, Sk, Hkv, Dv)
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v over the keys that the mask lets each query see.

    out is (B, S, Hq, Dv); with return_lse also lse (B, Hq, S): the natural log of the softmax's denominator, sinks included,
    in fp32 (fp64 for fp64), differentiable. Query heads share key heads in groups of Hq / Hkv. If S != Sk, the last query
    stands at the last key. `sinks` (Hq,) are scores of a key whose value is 0. Dropout is Philox of the coordinates, so a
    seed fixes it on any backend; without one it is drawn from torch's generator. A query that sees no key gives 0, and lse
    its sink or -inf. `deterministic` asks for bit-equal gradients in every run, which all backends but hopper always give;
    there the backward takes longer.
    """
    q, k, v = cast_for_autocast(q, k, v)
    check_qkv(q, k, v)
    mask = Mask() if mask is None else mask
    check_mask(q, k, mask)
    check_options(q, scale, softcap, dropout, seed, deterministic, may_draw=True)
    if sinks is not None:
        check_sinks(q, sinks)
    check_tangents(q=q, k=k, v=v, sinks=sinks)
    if dropout and seed is None:
        seed = torch.randint(2**63 - 1, (), device=q.device)
    if isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    choose_backend(backend, q, v, scale=scale, dropout=dropout)  # complains of a backend that cannot
    left, right, padded, *tensors = mask.bounds(q.device)
    numbers, factors = [left, right, int(padded), int(deterministic)], [scale, float(softcap), float(dropout)]
    out, lse = attention_forward(q, k, v, *tensors, sinks, seed, numbers, factors, backend)
    return (out, lse) if return_lse else out


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast in its dtype, as SDPA does."""
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    if not all(isinstance(x, Tensor) for x in (k, v)):
        return q, k, v  # check_qkv complains of these
    low = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


Operator = Callable[[Callable[..., Any]], Callable[..., Any]]  # what makes one of a function


def differentiable(name: str, backward: Callable[[], Callable[..., Any]]) -> Operator:
    """An attention as an operator: run(q, k, v, *tensors, sinks, seed, numbers, factors, names) → (out, lse).

    What is called `backward()` gives its gradients: it takes (dout, dlse, out, lse) and all that the forward takes.
    """

    def shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        batch, rows, heads = q.shape[:3]
        lse = q.new_empty((batch, heads, rows), dtype=accumulation_dtype(q.dtype))
        return q.new_empty((batch, rows, heads, v.shape[-1])), lse

    def save(ctx: Any, given: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, numbers, factors, names = given
        ctx.rest = numbers, factors, names
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *others = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dsinks = backward()(dout, dlse, out, lse, q, k, v, *others, *ctx.rest)
        *tensors, sinks, _seed = others
        return dq, dk, dv, *[None] * len(tensors), None if sinks is None else dsinks, None, *[None] * len(ctx.rest)

    return operator(name, fake=shapes, save=save, differentiate=differentiate)


def derivative(name: str) -> Operator:
    """The backward of one: (dq, dk, dv, dsinks), the last empty without sinks."""

    def shapes(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *tensors, sinks, _seed, _numbers, _factors, _names = given
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:3])
        return dq, dk, dv, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)

    return operator(name, fake=shapes)


def _call(*given: Any) -> tuple[Mask, dict[str, Any]]:
    """What an op's arguments mean: the mask, and the options of the block functions."""
    starts, ends, prefix, seed, (left, right, padded, deterministic), (scale, softcap, dropout), backend = given
    mask = Mask.from_bounds(Bounds(left, right, bool(padded), starts, ends, prefix))
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, dropout=dropout, seed=seed, backend=backend)
    return mask, options | dict(deterministic=bool(deterministic))


@differentiable("attention_forward", lambda: attention_backward)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    prefix: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    numbers: list[int],  # left, right, padded, deterministic
    factors: list[float],  # scale, softcap, dropout
    backend: str,
) -> tuple[Tensor, Tensor]:
    mask, options = _call(starts, ends, prefix, seed, numbers, factors, backend)
    carry = None if sinks is None else sink_carry(sinks, q)
    return block_forward(q, k, v, mask, carry=carry, **options)


@derivative("attention_backward")
def attention_backward(
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
    sinks: Tensor | None,
    seed: Tensor | None,
    numbers: list[int],
    factors: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # of q, k, v and sinks (empty without)
    mask, options = _call(starts, ends, prefix, seed, numbers, factors, backend)
    delta = output_delta(dout, out, dlse, backend=backend, mask=mask)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    block_backward(dout, q, k, v, lse, delta, mask, None, None, dq, dk, dv, accumulate=False, **options)
    return dq, dk, dv, sink_gradient(sinks, lse, delta) if sinks is not None else lse.new_empty(0)


def sink_carry(sinks: Tensor, q: Tensor) -> Carry:
    """A sink is the softmax of one key with value 0, before any other: out 0 and lse = sink."""
    return None, sinks.to(accumulation_dtype(q.dtype))[None, :, None].expand(q.shape[0], -1, q.shape[1])


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key with value 0, so its dp is 0 and ds = p (0 - delta)."""
    weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -torch.where(lse == -float("inf"), 0, weight * delta).sum((0, 2)).to(sinks.dtype)
