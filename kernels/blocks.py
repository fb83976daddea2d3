"""The block functions that rings are made of, for any backend: what `kernels` gives to `parallel`.

    out, lse = block_forward(q, k, v, mask, q_at=[(start, step, count), …], k_at=[…], carry=None, last=True, …)
    delta    = output_delta(dout, out, dlse)
    block_backward(dout, q, k, v, lse, delta, mask, q_at, k_at, dq, dk, dv, …)       adds in place

A block is some queries and some keys with where they stand in the whole sequence. The forward continues the softmax that
the carry (out, lse) of earlier blocks left; carry, lse, delta and the gradients are fp32, fp64 for fp64 inputs. Everything
is checked before a kernel starts, and nothing here waits for the device.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.block import Block, Carry, Gradients
from ringspan.kernels.backends.choose import backend_module, choose_backend
from ringspan.kernels.mask import Mask
from ringspan.kernels.runtime.call_cache import (
    EVERYTHING,
    CachedCall,
    Positions,
    lookup,
    read_once,
    rules_of,
    tensor_signatures,
)
from ringspan.kernels.segments import Segment, check_segments, positions, whole
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
    """out (B, S, Hq, Dv) and lse (B, Hq, S) of everything in the carry and this block.

    Without q_at and k_at both are whole sequences, aligned at their ends. A carry's out may be None for zeros (a sink).
    out has q's dtype after the `last` block and the carry's before. `into` names the tensors to write, which may be the
    carry's own: a tile of queries reads its rows before it writes them. Where `into`'s lse is the carry's, the carry's out
    may be written over, too. `deterministic` is always true here.
    """

    check_head_start(head_start)
    segments = read_once(q_at), read_once(k_at)

    def check() -> Positions:
        place = _place(q, k, v, *segments)
        check_block(q, v, carry, last, into)
        return place

    bounds, rules = rules_of(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    passed = lookup(
        (tensor_signatures((q, k, v)), tensor_signatures(carry), tensor_signatures(into), last, segments, rules), check
    )
    if rules and passed.replay:
        out, lse = into or new_outputs(q, v, last)
        passed.replay(q, k, v, passed.bounds or bounds, carry, out, lse)
        return out, lse
    options = block_options(q, scale, softcap, dropout, seed, deterministic)
    block = Block(q, k, v, _mask(q, k, mask, q_at, passed), *passed.at, head_start, *options)
    if into is not None:
        check_address("into's out", into[0])
    run = backend_module(choose_backend(backend, q, v, scale=block.scale, dropout=dropout), backward=False)
    out, lse = into or new_outputs(q, v, last)
    if lse.numel():
        with _own_precision(q):
            passed.replay = run.block_forward(block, carry, out, lse)
    return out, lse


def output_delta(
    dout: Tensor,
    out: Tensor,
    dlse: Tensor | None = None,
    *,
    backend: str = "auto",
    mask: Mask | None = None,
    q_at: list[Segment] | None = None,
) -> Tensor:
    """(B, Hq, S): rowsum(dout · out) − dlse, all that the backward needs of out.

    Given a mask, rows of padding count 0 in the sum: their dout may be memory that nobody wrote.
    """
    if dout.ndim != 4 or dout.shape != out.shape:
        raise ValueError(f"dout has shape {tuple(dout.shape)}, out {tuple(out.shape)}: they must agree and be (B, S, Hq, Dv)")
    if choose_backend(backend, out, out) in ("triton", "hopper"):
        delta = backend_module("triton", backward=True).output_delta(dout, out)
    else:
        acc = accumulation_dtype(out.dtype)
        with _own_precision(out):
            delta = torch.einsum("bshd,bshd->bhs", dout.to(acc), out.to(acc))
    if mask is not None and mask.has_padding:
        lo, hi = mask.interval(positions(whole(out.shape[1]) if q_at is None else q_at, out.device))
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
    """Adds this block's part to dq, dk and dv, given the final lse of all blocks and delta = output_delta(…).

    With accumulate=False it overwrites them, and they may have the inputs' dtype. With accumulate="dq" it does so with dk and
    dv alone, while dq adds up, as a ring wants it that sends a block's gradients off at once. `deterministic` asks for sums in
    a fixed order, as all backends have anyway but hopper, where programs then wait for each other.
    """
    if not (isinstance(accumulate, bool) or accumulate == "dq"):
        raise ValueError(f"accumulate={accumulate!r} must be True, False or 'dq'")
    gradients = Gradients(dout, lse, delta, dq, dk, dv)

    check_head_start(head_start)
    segments = read_once(q_at), read_once(k_at)

    def check() -> Positions:
        place = _place(q, k, v, *segments)
        check_gradients(q, k, v, gradients, accumulate)
        return place

    bounds, rules = rules_of(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    passed = lookup((tensor_signatures((q, k, v, *gradients)), accumulate, segments, rules), check)
    if rules and passed.replay:
        passed.replay(q, k, v, passed.bounds or bounds, gradients)
        return
    options = block_options(q, scale, softcap, dropout, seed, deterministic)
    block = Block(q, k, v, _mask(q, k, mask, q_at, passed), *passed.at, head_start, *options, deterministic)
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_address(name, gradient)
    run = backend_module(choose_backend(backend, q, v, scale=block.scale, dropout=dropout), backward=True)
    if accumulate == "dq" and not getattr(run, "ADDS_DQ_ALONE", False):
        dk.zero_()
        dv.zero_()
        accumulate = True
    if lse.numel():
        with _own_precision(q):
            passed.replay = run.block_backward(block, gradients, accumulate)
    elif accumulate is not True:  # no queries, no gradients
        dk.zero_()
        dv.zero_()


def _place(q: Tensor, k: Tensor, v: Tensor, q_at: Iterable[Segment] | None, k_at: Iterable[Segment] | None) -> Positions:
    check_qkv(q, k, v)
    if (q_at is None) != (k_at is None):
        raise ValueError("q_at and k_at are given together or not at all")
    if q_at is None or k_at is None:
        q_at, k_at = whole(q.shape[1], k.shape[1] - q.shape[1]), whole(k.shape[1])
    q_at, k_at = check_segments("q_at", q_at, q.shape[1]), check_segments("k_at", k_at, k.shape[1])
    if any(start < 0 for start, _, _ in k_at):
        raise ValueError(f"k_at={k_at}: keys stand at positions >= 0; queries before the first key may be negative")
    return q_at, k_at


def _mask(q: Tensor, k: Tensor, mask: Mask | None, q_at: list[Segment] | None, passed: CachedCall) -> Mask:
    """Checked; and where it hides nothing, as of most of a causal ring's blocks, none: then kernels have nothing to compare."""
    mask = EVERYTHING if mask is None else mask
    if not isinstance(mask, Mask) or q_at is None:
        check_mask(q, k, mask)
    else:
        check_mask_batch(q, mask)
    if not mask.hides_nothing(*passed.at):
        return mask
    passed.bounds = EVERYTHING.bounds()
    return EVERYTHING


def new_outputs(q: Tensor, v: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    out = q.new_empty((batch, rows, heads, v.shape[-1]), dtype=q.dtype if last else acc)
    return out, q.new_empty((batch, heads, rows), dtype=acc)


_NOTHING = nullcontext()


def _own_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast would lower our fp32 sums."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if device != "meta" and torch.is_autocast_enabled(device) else _NOTHING


def block_options(
    q: Tensor, scale: float | None, softcap: float, dropout: float, seed: int | Tensor | None, deterministic: bool
) -> tuple[float, float, float, Tensor | None]:
    """The options as a Block has them: checked, a scale, and a seed that lives where q does."""
    check_options(q, scale, softcap, dropout, seed, deterministic)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not dropout:
        return scale, float(softcap), 0.0, None
    if not isinstance(seed, Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=q.device)  # filled there: no copy to wait for
    return scale, float(softcap), float(dropout), seed
