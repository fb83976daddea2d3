"""The block functions, from which a ring is built, for any backend: `block_forward`, `output_delta`, `block_backward`.

    out, lse = block_forward(q, k, v, mask, q_at=[(start, step, count), …], k_at=[…], carry=None, last=True, …)
    delta    = output_delta(dout, out, dlse)
    block_backward(dout, q, k, v, lse, delta, mask, q_at, k_at, dq, dk, dv, …)       accumulates in place

A block is some rows of queries, some rows of keys, and their positions in the whole sequence. The forward continues the
online softmax of the carry (out, lse) of earlier blocks. Carry, lse, delta and gradient sums are fp32, or fp64 for fp64
inputs. Arguments are validated before a kernel is launched, and no call synchronises with the device.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.backends.choose import backend_module, choose_backend
from ringspan.kernels.mask import Mask
from ringspan.kernels.runtime.call_cache import (
    FULL_MASK,
    CachedCall,
    Positions,
    call_key,
    find,
    freeze_segments,
    lookup,
    tensor_signatures,
)
from ringspan.kernels.segments import Segment, check_segments, one_segment, positions
from ringspan.kernels.tensors import accumulation_dtype
from ringspan.kernels.validate import (
    check_address,
    check_block,
    check_gradients,
    check_head_start,
    check_like,
    check_mask,
    check_mask_batch,
    check_options,
    check_qkv,
)


def block_forward(
    q: Tensor,  # (B, S, Hq, D)
    k: Tensor,  # (B, Sk, Hkv, D)
    v: Tensor,  # (B, Sk, Hkv, Dv)
    mask: Mask | None,
    q_at: list[Segment] | None = None,
    k_at: list[Segment] | None = None,
    carry: Carry | None = None,
    last: bool = True,
    head_start: int = 0,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one block of keys, continuing the softmax of earlier blocks.

    Without `q_at` and `k_at`, both are whole sequences, aligned at their ends. Rows past the end of the segments are
    padding: they get out 0 and lse −inf.

    Args:
        q: Queries, (B, S, Hq, D), in float64, float32, bfloat16 or float16. D is 16 to 256 in steps of 8.
        k: Keys of the block, (B, Sk, Hkv, D), in q's dtype. Hq is a multiple of Hkv.
        v: Values of the block, (B, Sk, Hkv, Dv), in q's dtype.
        mask: Visible keys, by global position. None: all keys.
        q_at: Segments (start, step, count) with the global positions of q's rows. Passed with `k_at` or not at all.
        k_at: Segments of the rows of k and v. Key positions are ≥ 0.
        carry: (out, lse) of earlier blocks in the accumulation dtype: out (B, S, Hq, Dv), or None for zeros, and lse
            (B, Hq, S). A sink is the carry (None, sink). None: no earlier block.
        last: Whether this is the last block of these rows. If not, out keeps the accumulation dtype.
        head_start: Global number of q's first head, for dropout.
        scale: Factor of the scores. None: D ** −0.5.
        softcap: Bound the scores: s ← softcap · tanh(s / softcap). 0: off.
        dropout: Probability, in [0, 1), that an attention weight is set to 0.
        seed: Seed of the dropout pattern, an int of 64 bits or an int64 tensor () or (B,), the same for every block.
        deterministic: Accepted for symmetry with `block_backward`; a forward always is.
        backend: "auto", "reference", "chunked", "triton" or "hopper".
        into: (out, lse) tensors to write. They may be the carry's own, because each tile reads its rows before it writes
            them. If its lse is the carry's, the carry's out may be overwritten too.

    Returns:
        out, (B, S, Hq, Dv), in q's dtype if `last`, else in the accumulation dtype; and lse, (B, Hq, S), in the
        accumulation dtype: the results over the keys of the carry and of this block.

    Raises:
        ValueError: An argument has a wrong type, shape, dtype, device, stride or range, or the named backend cannot run
            these inputs.
    """
    check_head_start(head_start)
    segments = freeze_segments(q_at), freeze_segments(k_at)

    def validate() -> Positions:
        at = _validated_positions(q, k, v, *segments)
        check_block(q, v, carry, last, into)
        return at

    bounds, rules = call_key(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    call = lookup(
        (tensor_signatures((q, k, v)), tensor_signatures(carry), tensor_signatures(into), last, segments, rules), validate
    )
    if rules and call.replay:
        out, lse = into or new_outputs(q, v, last)
        call.replay(q, k, v, call.bounds or bounds, carry, out, lse)
        return out, lse
    scale, softcap, dropout, seed = block_options(q, scale, softcap, dropout, seed, deterministic)
    block_mask = _block_mask(q, k, mask, q_at, call)
    block = Block(q, k, v, block_mask, *call.at, head_start, scale, softcap, dropout, seed)
    if into is not None:
        check_address("into's out", into[0])
    module = backend_module(choose_backend(backend, q, v, scale=scale, dropout=dropout), backward=False)
    out, lse = into or new_outputs(q, v, last)
    if lse.numel():
        with _without_autocast(q):
            call.replay = module.block_forward(block, carry, out, lse)
    return out, lse


def find_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, carry: Carry | None, *options: Any
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return a function that repeats an earlier block_forward of whole sequences with these signatures; None if there was none.

    Args:
        options: scale, softcap, dropout, deterministic and backend.
    """
    bounds, rules = call_key(q, mask, None, *options)
    if not rules:
        return None
    call = find((tensor_signatures((q, k, v)), tensor_signatures(carry), None, True, (None, None), rules))
    if call is None or call.replay is None:
        return None
    replay, bounds = call.replay, call.bounds or bounds

    def repeat(*_: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_outputs(q, v, True)
        replay(q, k, v, bounds, carry, out, lse)
        return out, lse

    return repeat


def output_delta(
    dout: Tensor,
    out: Tensor,
    dlse: Tensor | None = None,
    *,
    backend: str = "auto",
    mask: Mask | None = None,
    q_at: list[Segment] | None = None,
) -> Tensor:
    """Compute delta = rowsum(dout · out) − dlse, from which `block_backward` needs no out.

    Args:
        dout: Gradient of out, (B, S, Hq, Dv).
        out: Result of the last block, (B, S, Hq, Dv).
        dlse: Gradient of lse, (B, Hq, S), in the accumulation dtype. None: zeros.
        backend: Backend of the call; "triton" and "hopper" use a fused kernel.
        mask: With a mask, padding rows count as 0 in the row sum, because their dout may be uninitialised memory.
        q_at: Segments of the rows, used with `mask`. None: one whole sequence.

    Returns:
        delta, (B, Hq, S), in the accumulation dtype.

    Raises:
        ValueError: dout and out differ in shape, dlse does not match, or the named backend cannot run these inputs.
    """
    if dout.ndim != 4 or dout.shape != out.shape:
        raise ValueError(f"dout has shape {tuple(dout.shape)}, out {tuple(out.shape)}: they must agree and be (B, S, Hq, Dv)")
    if choose_backend(backend, out, out) in ("triton", "hopper"):
        delta = backend_module("triton", backward=True).output_delta(dout, out)
    else:
        acc = accumulation_dtype(out.dtype)
        with _without_autocast(out):
            delta = torch.einsum("bshd,bshd->bhs", dout.to(acc), out.to(acc))
    if mask is not None and mask.has_padding:
        q_at = q_at or mask.joint_segments(out.shape[1], mask.key_length or 0)[0] or one_segment(out.shape[1])
        lo, hi = mask.interval(positions(q_at, out.device))
        padding = lo > hi  # (rows,) or (B, rows)
        delta[:, :, : lo.shape[-1]].masked_fill_(padding[:, None] if padding.ndim == 2 else padding, 0)
    if dlse is not None:
        check_like("dlse", dlse, delta.shape, delta.dtype, delta.device)
    return delta if dlse is None else delta.sub_(dlse)


def block_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: Mask | None,
    q_at: list[Segment] | None,
    k_at: list[Segment] | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    head_start: int = 0,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    accumulate: bool | str = True,
) -> None:
    """Accumulate the gradients of one block of keys in dq, dk and dv, in place.

    Args:
        dout: Gradient of out, (B, S, Hq, Dv), in q's dtype.
        q: Queries, (B, S, Hq, D).
        k: Keys of the block, (B, Sk, Hkv, D).
        v: Values of the block, (B, Sk, Hkv, Dv).
        lse: Final lse over all blocks, (B, Hq, S), in the accumulation dtype.
        delta: Result of `output_delta`, (B, Hq, S), in the accumulation dtype.
        mask: As in `block_forward`.
        q_at: As in `block_forward`.
        k_at: As in `block_forward`.
        dq: (B, S, Hq, D). The accumulation dtype where it is accumulated, else any float dtype.
        dk: (B, Sk, Hkv, D), like dq.
        dv: (B, Sk, Hkv, Dv), like dq.
        head_start: Global number of q's first head, for dropout.
        scale: As in the forward call.
        softcap: As in the forward call.
        dropout: As in the forward call.
        seed: As in the forward call.
        deterministic: Accumulate in a fixed order. All backends but `hopper` always do; there, thread blocks then wait
            for each other.
        backend: "auto", "reference", "chunked", "triton" or "hopper".
        accumulate: True adds to dq, dk and dv. False overwrites them. "dq" adds to dq and overwrites dk and dv, for a
            ring that sends each block's dk and dv at once.

    Raises:
        ValueError: An argument has a wrong type, shape, dtype, device, stride or range, or the named backend cannot run
            these inputs.
    """
    if not (isinstance(accumulate, bool) or accumulate == "dq"):
        raise ValueError(f"accumulate={accumulate!r} must be True, False or 'dq'")
    gradients = Gradients(dout, lse, delta, dq, dk, dv)
    check_head_start(head_start)
    segments = freeze_segments(q_at), freeze_segments(k_at)

    def validate() -> Positions:
        at = _validated_positions(q, k, v, *segments)
        check_gradients(q, k, v, gradients, accumulate)
        return at

    bounds, rules = call_key(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    call = lookup((tensor_signatures((q, k, v, *gradients)), accumulate, segments, rules), validate)
    if rules and call.replay:
        call.replay(q, k, v, call.bounds or bounds, gradients)
        return
    scale, softcap, dropout, seed = block_options(q, scale, softcap, dropout, seed, deterministic)
    block_mask = _block_mask(q, k, mask, q_at, call)
    block = Block(q, k, v, block_mask, *call.at, head_start, scale, softcap, dropout, seed, deterministic)
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_address(name, gradient)
    module = backend_module(choose_backend(backend, q, v, scale=scale, dropout=dropout), backward=True)
    if accumulate == "dq" and not getattr(module, "ADDS_DQ_ALONE", False):
        dk.zero_()
        dv.zero_()
        accumulate = True
    if lse.numel():
        with _without_autocast(q):
            call.replay = module.block_backward(block, gradients, accumulate)
    elif accumulate is not True:  # no queries: zero gradients
        dk.zero_()
        dv.zero_()


def _validated_positions(
    q: Tensor, k: Tensor, v: Tensor, q_at: Iterable[Segment] | None, k_at: Iterable[Segment] | None
) -> Positions:
    check_qkv(q, k, v)
    if (q_at is None) != (k_at is None):
        raise ValueError("q_at and k_at must be passed together or not at all")
    if q_at is None or k_at is None:
        q_at, k_at = one_segment(q.shape[1], k.shape[1] - q.shape[1]), one_segment(k.shape[1])
    q_at, k_at = check_segments("q_at", q_at, q.shape[1]), check_segments("k_at", k_at, k.shape[1])
    if any(start < 0 for start, _, _ in k_at):
        raise ValueError(f"k_at={k_at}: key positions must be >= 0; queries before the first key may be negative")
    return q_at, k_at


def _block_mask(q: Tensor, k: Tensor, mask: Mask | None, q_at: list[Segment] | None, call: CachedCall) -> Mask:
    """Validate the mask; replace one that covers the block by the full mask, with which kernels compare nothing.

    Most blocks of a causal ring are covered.
    """
    mask = FULL_MASK if mask is None else mask
    if not isinstance(mask, Mask) or q_at is None:
        check_mask(q, k, mask)
        if mask.key_length is not None:
            raise ValueError("mask with key_documents needs q_at and k_at: take both from mask.joint_segments(S, Sk)")
        return mask  # a length at which the mask hides nothing must not compile another kernel
    else:
        check_mask_batch(q, mask)
    if not mask.covers_block(*call.at):
        return mask
    call.bounds = FULL_MASK.bounds()
    return FULL_MASK


def new_outputs(q: Tensor, v: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """Allocate a forward's out (B, S, Hq, Dv) and lse (B, Hq, S)."""
    acc, device = accumulation_dtype(q.dtype), q.device
    batch, rows, heads, _ = q.shape
    out = torch.empty((batch, rows, heads, v.shape[-1]), dtype=q.dtype if last else acc, device=device)
    return out, torch.empty((batch, heads, rows), dtype=acc, device=device)


_NO_CONTEXT = nullcontext()


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which would lower the precision of fp32 sums."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if device != "meta" and torch.is_autocast_enabled(device) else _NO_CONTEXT


def block_options(
    q: Tensor, scale: float | None, softcap: float, dropout: float, seed: int | Tensor | None, deterministic: bool
) -> tuple[float, float, float, Tensor | None]:
    """Validate the options; return scale, softcap, dropout and seed as a Block holds them, the seed on q's device."""
    check_options(q, scale, softcap, dropout, seed, deterministic)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not dropout:
        return scale, float(softcap), 0.0, None
    if not isinstance(seed, Tensor):
        assert seed is not None, "check_options rejects dropout without a seed"
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)  # filled on the device: no host-to-device copy
    return scale, float(softcap), float(dropout), seed


def block_view(x: Tensor, dim_1: slice | None, dim_2: slice | None = None) -> Tensor:
    """Return x[:, dim_1, dim_2], where None is the whole dimension; x itself if that is all of it, which saves host time."""
    if dim_2 is None or dim_2.stop - dim_2.start == x.shape[2]:
        return x if dim_1 is None or dim_1.stop - dim_1.start == x.shape[1] else x[:, dim_1]
    return x[:, :, dim_2] if dim_1 is None or dim_1.stop - dim_1.start == x.shape[1] else x[:, dim_1, dim_2]


def query_heads(q: Tensor, k: Tensor, kv_heads: slice) -> slice:
    """Return the query heads of these KV heads; q is (B, S, Hq, D), k (B, Sk, Hkv, D)."""
    group = q.shape[2] // k.shape[2]
    return slice(kv_heads.start * group, kv_heads.stop * group)
