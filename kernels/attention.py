"""`attention`: exact attention on one device, as one operator for autograd, torch.compile and checkpointing.

    out = attention(q, k, v, mask=Mask(causal=True))            q (B, S, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)

The function validates its arguments, chooses a backend and calls `block_forward` once, on a block that holds all rows.
A sink is the carry of that block. Two operators do the work: `ringspan::attention_forward` and
`ringspan::attention_backward`. torch.compile(fullgraph=True) therefore sees one call per direction, and selective
activation checkpointing can save (out, lse) instead of recomputing attention. No call synchronises with the device.
"""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Carry
from ringspan.kernels.blocks import block_backward, block_forward, find_forward, new_outputs, output_delta
from ringspan.kernels.mask import Bounds, Mask
from ringspan.kernels.runtime.call_cache import FULL_MASK, Replay
from ringspan.kernels.runtime.custom_op import may_bypass_dispatcher, operator, without_dispatcher
from ringspan.kernels.runtime.precompile import precompile
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.kernels.validate import AttentionOptions, cast_for_autocast, check_mask, check_qkv, check_tangents


@overload
def attention(
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
) -> Tensor: ...


@overload
def attention(
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
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
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
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    """Compute exact attention, softmax(q kᵀ · scale) v, over the keys that the mask makes visible to each query.

    If S != Sk, the last query is at the position of the last key. Under torch.autocast, q, k and v are cast to its dtype.

    Args:
        q: Queries, (B, S, Hq, D), in float64, float32, bfloat16 or float16. D is 16 to 256 in steps of 8.
        k: Keys, (B, Sk, Hkv, D), in q's dtype. Hq is a multiple of Hkv; groups of Hq / Hkv query heads share a key head.
        v: Values, (B, Sk, Hkv, Dv), in q's dtype. Dv may differ from D, with the same limits.
        mask: Visible keys of each query. None: all keys.
        scale: Factor of the scores. None: D ** −0.5.
        softcap: Bound the scores: s ← softcap · tanh(s / softcap). 0: off.
        sinks: (Hq,) floats: for each query head, the score of one extra key whose value is 0.
        dropout: Probability, in [0, 1), that an attention weight is set to 0; the others are divided by 1 − dropout. The
            pattern is a function of the seed and of global coordinates, so it is the same for every backend.
        seed: Seed of the dropout pattern: an int of 64 bits or an int64 tensor of shape () or (B,). None: drawn from
            torch's generator.
        return_lse: Also return lse.
        deterministic: Accumulate gradients in a fixed order, so that they are bit-equal in every run. All backends but
            `hopper` always do; there the backward is slower with it.
        backend: "auto", "reference", "chunked", "triton" or "hopper". "auto" chooses by device and inputs.

    Returns:
        out, (B, S, Hq, Dv), in q's dtype. With `return_lse`, (out, lse): lse, (B, Hq, S), is the natural log of the
        softmax's denominator, sinks included, in float32 (float64 for float64 inputs), and is differentiable. A query
        without visible keys has out 0, lse = its sink or −inf, and zero gradients.

    Raises:
        ValueError: An argument has a wrong type, shape, dtype, device or range, an input has a forward-mode tangent, or
            the named backend cannot run these inputs. The message names the argument and a value that works.

    Example:
        >>> out = attention(q, k, v, mask=Mask(causal=True, window=4096))
        >>> out, lse = attention(q, k, v, return_lse=True)
    """
    q, k, v = cast_for_autocast(q, k, v)
    mask = FULL_MASK if mask is None else mask
    options = AttentionOptions(scale, softcap, sinks, dropout, seed, deterministic, backend)
    replay = _find_replay(q, k, v, mask, options)
    if replay is None:
        check_qkv(q, k, v)
        check_mask(q, k, mask)
        options = options.validated(q, v)
    check_tangents(q=q, k=k, v=v, sinks=sinks)
    left, right, has_padding, *tensors = mask.bounds(q.device)
    numbers, factors = [left, right, int(has_padding), int(deterministic)], [options.scale, options.softcap, options.dropout]
    args = q, k, v, *tensors, sinks, options.seed, numbers, factors, backend
    out, lse = without_dispatcher["attention_forward"](*args, run=replay) if replay else attention_forward(*args)
    return (out, lse) if return_lse else out


def _find_replay(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: AttentionOptions) -> Replay | None:
    """Return a function that repeats an earlier call with the same signatures, mask and options; it needs no validation.

    Fills in options.scale if it returns one.
    """
    sinks = options.sinks
    if not (isinstance(q, Tensor) and q.ndim == 4 and isinstance(mask, Mask) and mask.key_length is None):
        return None
    if options.seed is not None or not (sinks is None or (isinstance(sinks, Tensor) and sinks.is_floating_point())):
        return None
    if (sinks is not None and sinks.ndim != 1) or not may_bypass_dispatcher((q, k, v, sinks)):
        return None
    scale = (q.shape[3] or 1) ** -0.5 if options.scale is None else options.scale  # a head dim of 0 is rejected later
    carry = None if sinks is None else sink_carry(sinks, q)
    factors = scale, options.softcap, options.dropout, options.deterministic, options.backend
    replay = find_forward(q, k, v, mask, carry, *factors)
    if replay is not None:
        options.scale = scale
    return replay


Operator = Callable[[Callable[..., Any]], Callable[..., Any]]  # a decorator that turns a function into an operator


def differentiable(name: str, backward: Callable[[], Callable[..., Any]]) -> Operator:
    """Return a decorator for an attention forward: run(q, k, v, *tensors, sinks, seed, numbers, factors, names) → (out, lse).

    `backward()` returns the operator of the gradients. It takes (dout, dlse, out, lse) and then all arguments of the forward.
    """

    def shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        batch, rows, heads = q.shape[:3]
        lse = q.new_empty((batch, heads, rows), dtype=accumulation_dtype(q.dtype))
        return q.new_empty((batch, rows, heads, v.shape[-1])), lse

    def save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, numbers, factors, names = args
        ctx.options = numbers, factors, names
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *other_tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dsinks = backward()(dout, dlse, out, lse, q, k, v, *other_tensors, *ctx.options)
        *mask_tensors, sinks, _seed = other_tensors
        no_gradients = [None] * len(ctx.options)
        return dq, dk, dv, *[None] * len(mask_tensors), None if sinks is None else dsinks, None, *no_gradients

    return operator(name, fake=shapes, save=save, differentiate=differentiate)


def derivative(name: str) -> Operator:
    """Return a decorator for an attention backward: run(dout, dlse, out, lse, …) → (dq, dk, dv, dsinks or an empty tensor)."""

    def shapes(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *tensors, sinks, _seed, _numbers, _factors, _names = args
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:3])
        return dq, dk, dv, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)

    return operator(name, fake=shapes)


def _mask_and_options(*args: Any) -> tuple[Mask, dict[str, Any]]:
    """Unpack an operator's arguments into the mask and the options of the block functions."""
    starts, ends, prefix, seed, (left, right, has_padding, deterministic), (scale, softcap, dropout), backend = args
    mask = Mask.from_bounds(Bounds(left, right, bool(has_padding), starts, ends, prefix))
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
    numbers: list[int],  # left, right, has_padding, deterministic
    factors: list[float],  # scale, softcap, dropout
    backend: str,
) -> tuple[Tensor, Tensor]:
    mask, options = _mask_and_options(starts, ends, prefix, seed, numbers, factors, backend)
    carry = None if sinks is None else sink_carry(sinks, q)
    if q.device.type != "cpu" and (q.requires_grad or k.requires_grad or v.requires_grad):
        precompile(_backward_on_meta, q, k, v, starts, ends, prefix, sinks, seed, numbers, factors, backend)
    return block_forward(q, k, v, mask, *mask.joint_segments(q.shape[1], k.shape[1]), carry=carry, **options)


def _backward_on_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    """Compile the kernels of a backward from the forward's arguments on meta."""
    out, lse = new_outputs(q, v, last=True)
    without_dispatcher["attention_backward"](out, None, out, lse, q, k, v, *rest)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # dq, dk, dv, dsinks (empty without sinks)
    mask, options = _mask_and_options(starts, ends, prefix, seed, numbers, factors, backend)
    q_at, k_at = mask.joint_segments(q.shape[1], k.shape[1])
    delta = output_delta(dout, out, dlse, backend=backend, mask=mask, q_at=q_at)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    block_backward(dout, q, k, v, lse, delta, mask, q_at, k_at, dq, dk, dv, accumulate=False, **options)
    return dq, dk, dv, sink_gradient(sinks, lse, delta) if sinks is not None else lse.new_empty(0)


def sink_carry(sinks: Tensor, q: Tensor) -> Carry:
    """Return the carry of a sink, the softmax over one key with value 0: out 0 (None) and lse = sink."""
    return None, sinks.to(accumulation_dtype(q.dtype))[None, :, None].expand(q.shape[0], -1, q.shape[1])


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsinks: a sink is a key with value 0, so its dp is 0 and ds = p (0 − delta)."""
    weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -torch.where(lse == -float("inf"), 0, weight * delta).sum((0, 2)).to(sinks.dtype)
