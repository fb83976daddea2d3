"""The block functions that rings are made of, for any backend: what `kernels` gives to `parallel`.

    out, lse = block_forward(q, k, v, mask, q_at=[(start, step, count), …], k_at=[…], carry=None, last=True, …)
    delta    = output_delta(dout, out, dlse)
    block_backward(dout, q, k, v, lse, delta, mask, q_at, k_at, dq, dk, dv, …)       adds in place

A block is some queries and some keys with where they stand in the whole sequence. The forward continues the softmax that
the carry (out, lse) of earlier blocks left; carry, lse, delta and the gradients are fp32, fp64 for fp64 inputs. Everything
is checked before a kernel starts, and nothing here waits for the device.
"""

import functools
import importlib
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .block import Block, Carry, Gradients
from .checks import (
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
from .compat import hopper_runs_on, triton_runs_on
from .mask import Mask
from .passed import EVERYTHING, Passed, Place, forms, once, read_once, rules_of
from .reference import accumulation_dtype
from .segments import Segment, check_segments, positions, whole

BACKENDS = ("reference", "chunked", "triton", "hopper")
MODULES = {
    "reference": ("reference", "reference"),
    "chunked": ("chunked", "chunked"),
    "triton": ("triton_forward", "triton_backward"),
    "hopper": ("hopper_forward", "hopper_backward"),
}


def choose_backend(
    name: str,
    q: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> str:
    """The backend that runs, or a ValueError that says why the named one cannot."""
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend={name!r}: choose one of {('auto', *BACKENDS)}")
    obstacles = {"triton": _triton_obstacle(q, v)}
    obstacles["hopper"] = _hopper_obstacle(q, scale, dropout) or obstacles["triton"]
    if obstacle := obstacles.get(name):
        instead = "chunked" if obstacles["triton"] else "triton"
        raise ValueError(f"backend={name!r} {obstacle}: use backend={instead!r}, or 'auto' to let the inputs decide")
    if name != "auto":
        return name
    if obstacles["triton"] is None and q.device.type != "cpu":
        if obstacles["hopper"] is None:
            return _say("hopper", "its kernels take these inputs")
        return _say("triton", f"hopper {obstacles['hopper']}")
    reason = obstacles["triton"]
    return _say("chunked", f"triton {reason}" if reason else "on a CPU Triton is an interpreter, for tests only")


def _triton_obstacle(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "has no fp64"
    if q.device.type != "meta" and not triton_runs_on(q.device):
        return f"does not run on {q.device} (TRITON_INTERPRET=1 interprets it on a CPU)"
    widest = max(q.shape[-1], v.shape[-1])
    return f"takes head dims up to 256, not {widest}" if widest > 256 else None


def _hopper_obstacle(q: Tensor, scale: float, dropout: float) -> str | None:
    if not hopper_runs_on(q.device):
        return "needs an sm_90 GPU (H100, H200)"
    if q.dtype == torch.float32:
        return "multiplies bf16 and fp16 only"
    if dropout:
        return "has no registers left for dropout"
    return f"takes scales from 1e-30 on, not {scale}" if scale < 1e-30 else None


def _say(backend: str, reason: str) -> str:
    if os.environ.get("RINGSPAN_LOG") == "1" and not torch.compiler.is_compiling():
        _say_once(backend, reason)
    return backend


@functools.cache
def _say_once(backend: str, reason: str) -> None:
    print(f"ringspan: attention runs on {backend}: {reason}", file=sys.stderr)


@functools.cache
def _module(backend: str, backward: bool) -> ModuleType:
    return importlib.import_module(f".{MODULES[backend][backward]}", __package__)


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

    def check() -> Place:
        place = _place(q, k, v, *segments)
        check_block(q, v, carry, last, into)
        return place

    bounds, rules = rules_of(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    passed = once((forms((q, k, v)), forms(carry), forms(into), last, segments, rules), check)
    if rules and passed.again:
        out, lse = into or new_outputs(q, v, last)
        passed.again(q, k, v, passed.bounds or bounds, carry, out, lse)
        return out, lse
    options = block_options(q, scale, softcap, dropout, seed, deterministic)
    block = Block(q, k, v, _mask(q, k, mask, q_at, passed), *passed.at, head_start, *options)
    if into is not None:
        check_address("into's out", into[0])
    run = _module(choose_backend(backend, q, v, scale=block.scale, dropout=dropout), backward=False)
    out, lse = into or new_outputs(q, v, last)
    if lse.numel():
        with _own_precision(q):
            passed.again = run.block_forward(block, carry, out, lse)
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
        delta = _module("triton", backward=True).output_delta(dout, out)
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

    def check() -> Place:
        place = _place(q, k, v, *segments)
        check_gradients(q, k, v, gradients, accumulate)
        return place

    bounds, rules = rules_of(q, mask, seed, scale, softcap, dropout, deterministic, backend)
    passed = once((forms((q, k, v, *gradients)), accumulate, segments, rules), check)
    if rules and passed.again:
        passed.again(q, k, v, passed.bounds or bounds, gradients)
        return
    options = block_options(q, scale, softcap, dropout, seed, deterministic)
    block = Block(q, k, v, _mask(q, k, mask, q_at, passed), *passed.at, head_start, *options, deterministic)
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_address(name, gradient)
    run = _module(choose_backend(backend, q, v, scale=block.scale, dropout=dropout), backward=True)
    if accumulate == "dq" and not getattr(run, "ADDS_DQ_ALONE", False):
        dk.zero_()
        dv.zero_()
        accumulate = True
    if lse.numel():
        with _own_precision(q):
            passed.again = run.block_backward(block, gradients, accumulate)
    elif accumulate is not True:  # no queries, no gradients
        dk.zero_()
        dv.zero_()


def adds_in_memory(
    q: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> bool:
    """Whether block_backward leaves additions to dq to the memory, given its options. Then several may add at a time."""
    if deterministic:
        return False
    chosen = choose_backend(backend, q, v, scale=1.0 if scale is None else scale, dropout=dropout)
    return getattr(_module(chosen, backward=True), "ADDS_DQ_IN_MEMORY", False)


def _place(q: Tensor, k: Tensor, v: Tensor, q_at: Iterable[Segment] | None, k_at: Iterable[Segment] | None) -> Place:
    check_qkv(q, k, v)
    if (q_at is None) != (k_at is None):
        raise ValueError("q_at and k_at are given together or not at all")
    if q_at is None or k_at is None:
        q_at, k_at = whole(q.shape[1], k.shape[1] - q.shape[1]), whole(k.shape[1])
    q_at, k_at = check_segments("q_at", q_at, q.shape[1]), check_segments("k_at", k_at, k.shape[1])
    if any(start < 0 for start, _, _ in k_at):
        raise ValueError(f"k_at={k_at}: keys stand at positions >= 0; queries before the first key may be negative")
    return q_at, k_at


def _mask(q: Tensor, k: Tensor, mask: Mask | None, q_at: list[Segment] | None, passed: Passed) -> Mask:
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
