"""Validation of call arguments. Each `check_…` raises a ValueError that names the argument, its value and what works.

Checks read shapes, strides, dtypes, devices and Python numbers only, so none synchronises with a GPU.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringspan.kernels.backends.block import Carry, Gradients
from ringspan.kernels.backends.choose import choose_backend
from ringspan.kernels.mask import Mask
from ringspan.kernels.tensors import accumulation_dtype, even_rows

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (Real, torch.SymFloat, torch.SymInt)


def check_tensor(name: str, x: Any) -> None:
    """Validate that an argument is a dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor: pass packed rows, {name}.values(), to attention_varlen with {name}.offsets().int()"
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}: pass a dense tensor, {name}.to_dense()")


def check_number(name: str, value: Any) -> None:
    """Validate that an option is a Python number."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise ValueError(f"{name}={value!r} must be a Python number: reading a tensor would need a host sync")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Validate types, shapes, dtypes and devices of q (B, S, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions {tuple(x.shape)}; it must be (batch, length, heads, head dim)")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; float64, float32, bfloat16 and float16 work")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, but q is {q.dtype}: cast one, for instance {name}.to(q.dtype)")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}: move one with .to(device)")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]}, q has {q.shape[0]}: expand the smaller one")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same length and heads (dims 1 and 2)")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head dim {k.shape[3]}, q has {q.shape[3]}: they must agree (v's may differ)")
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}: q's heads must be a multiple of theirs")
    check_head_dims({"q and k": q, "v": v})


def check_head_dims(tensors: dict[str, Tensor]) -> None:
    """Validate head dims, the last dimension of each tensor."""
    for name, x in tensors.items():
        width = x.shape[-1]
        if not 16 <= width <= 256 or width % 8:
            raise ValueError(f"{name} have head dim {width}: 16 to 256 in steps of 8 work; pad with zeros and keep scale")


def check_tangents(**inputs: Any) -> None:
    """Reject forward-mode tangents. An operator would drop them without an error, and a missing tangent reads as 0."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():  # tracers need not support forward mode
        return
    for name, x in inputs.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{name} has a tangent, but there is no forward-mode derivative here (torch.func.jvp, forward_ad): "
                "differentiate in reverse mode, with backward() or torch.autograd.grad"
            )


def check_mask(q: Tensor, k: Tensor, mask: Mask) -> None:
    """Validate the mask of whole sequences, in which documents describe every position of q and k."""
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a ringspan.Mask or None, not {type(mask).__name__}: masks are rules, not matrices")
    if mask.key_length is not None:
        if (mask.length, mask.key_length) != (q.shape[1], k.shape[1]):
            raise ValueError(
                f"documents describe {mask.length} queries and key_documents {mask.key_length} keys, q has {q.shape[1]} and "
                f"k has {k.shape[1]}: pass one id for each"
            )
    elif mask.length is not None and not mask.length == q.shape[1] == k.shape[1]:
        raise ValueError(
            f"documents describe {mask.length} positions, q has {q.shape[1]} and k has {k.shape[1]}: "
            "documents need S == Sk and one id for each position (or key_documents as well)"
        )
    check_mask_batch(q, mask)


def check_mask_batch(q: Tensor, mask: Mask) -> None:
    """Validate the batch sizes of documents and prefix against q's."""
    for name, size in (("documents", mask.documents_batch), ("prefix", mask.prefix_batch)):
        if size is not None and size != q.shape[0]:
            raise ValueError(f"{name} of batch size {size}, but q has {q.shape[0]}: pass one row, or one row per sequence")


def check_head_start(head_start: int) -> None:
    """Validate the global number of q's first head."""
    if type(head_start) is not int or head_start < 0:
        raise ValueError(f"head_start={head_start!r} must be an int >= 0: the global number of q's first head")


def check_options(
    q: Tensor,
    scale: float | None,
    softcap: float,
    dropout: float,
    seed: int | Tensor | None,
    deterministic: bool = False,
    *,
    may_draw: bool = False,
) -> None:
    """Validate the options of a call. With `may_draw`, dropout needs no seed because the caller draws one."""
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic={deterministic!r} must be True or False")
    for name, value in (("scale", 1.0 if scale is None else scale), ("softcap", softcap), ("dropout", dropout)):
        check_number(name, value)
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale} must be a finite number, or None for head_dim ** -0.5")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be >= 0, where 0 turns it off")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be in [0, 1)")
    if dropout and seed is None and not may_draw:
        raise ValueError("dropout in a block needs a seed, the same for every block: seed=torch.randint(2**62, ())")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape not in ((), (q.shape[0],)):
            raise ValueError(f"seed is {seed.dtype} {tuple(seed.shape)}; an int64 tensor of shape () or ({q.shape[0]},) works")
        if seed.device != q.device:
            raise ValueError(f"seed is on {seed.device}, but q is on {q.device}: move it, or pass an int")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ValueError(f"seed={seed!r} must be an int of 64 bits or an int64 tensor")


def check_sinks(q: Tensor, sinks: Tensor) -> None:
    """Validate sinks (Hq,): floats on q's device."""
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks must be a tensor of shape ({q.shape[2]},), not {type(sinks).__name__}")
    if not sinks.is_floating_point() or sinks.shape != (q.shape[2],):
        raise ValueError(
            f"sinks are {sinks.dtype} {tuple(sinks.shape)}; they must be floats of shape ({q.shape[2]},), one per query head"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device}, but q is on {q.device}: move them with .to(device)")


def check_block(q: Tensor, v: Tensor, carry: Carry | None, last: bool, into: tuple[Tensor, Tensor] | None) -> None:
    """Validate the carry and the output tensors of block_forward."""
    acc = accumulation_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    shapes = (batch, rows, heads, v.shape[3]), (batch, heads, rows)
    for name, pair, dtypes in (("carry", carry, (acc, acc)), ("into", into, (q.dtype if last else acc, acc))):
        if pair is None:
            continue
        for part, x, shape, dtype in zip(("out", "lse"), pair, shapes, dtypes, strict=True):
            if x is None and (name, part) == ("carry", "out"):
                continue
            if x is None:
                raise ValueError(f"{name}'s {part} is None: only a carry's out may be None, for zeros")
            check_like(f"{name}'s {part}", x, shape, dtype, q.device)
    if into is not None:
        check_columns("into's out", into[0])


def check_gradients(q: Tensor, k: Tensor, v: Tensor, gradients: Gradients, accumulate: bool | str) -> None:
    """Validate the inputs and gradients of block_backward."""
    acc, stats = accumulation_dtype(q.dtype), (q.shape[0], q.shape[2], q.shape[1])
    check_like("dout", gradients.dout, (*q.shape[:3], v.shape[3]), q.dtype, q.device)
    check_like("lse", gradients.lse, stats, acc, q.device)
    check_like("delta", gradients.delta, stats, acc, q.device)
    for name, grad, like in (("dq", gradients.dq, q), ("dk", gradients.dk, k), ("dv", gradients.dv, v)):
        if grad.shape != like.shape or grad.device != like.device or not grad.is_floating_point():
            actual = f"{grad.dtype} {tuple(grad.shape)} on {grad.device}"
            raise ValueError(f"{name} is {actual}; it must be floats of shape {tuple(like.shape)} on {like.device}")
        check_columns(name, grad)
        if accumulate in (True, name) and grad.dtype != acc:
            raise ValueError(f"{name} is {grad.dtype}: blocks accumulate in {acc} (or pass accumulate=False)")


def check_columns(name: str, output: Tensor) -> None:
    """Validate the strides of a tensor that kernels write."""
    if output.numel() and not even_rows(output.shape, output.stride()):
        raise ValueError(f"{name} has strides {output.stride()}: kernels write rows of stride 1 that begin at multiples of 8")


def check_address(name: str, output: Tensor) -> None:
    """Validate the address of a tensor that kernels write."""
    if output.is_cuda and output.data_ptr() % 16:
        raise ValueError(
            f"{name} begins at an address that 16 does not divide: slice it at a multiple of 8 elements, or copy it"
        )


def check_like(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Validate shape, dtype and device of one tensor."""
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {dtype} {tuple(shape)} on {device}")


@dataclass
class AttentionOptions:
    """Options as the public functions take them. `attention` describes each."""

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    deterministic: bool = False
    backend: str = "auto"

    def validated(self, q: Tensor, v: Tensor) -> "AttentionOptions":
        """Return the options with a scale and, for dropout, a seed on q's device: without one it is drawn by torch's generator.

        Raises:
            ValueError: An option is wrong, or the named backend cannot run these inputs.
        """
        check_options(q, self.scale, self.softcap, self.dropout, self.seed, self.deterministic, may_draw=True)
        if self.sinks is not None:
            check_sinks(q, self.sinks)
        scale, seed = q.shape[-1] ** -0.5 if self.scale is None else float(self.scale), self.seed
        choose_backend(self.backend, q, v, scale=scale, dropout=self.dropout)  # raises if the named backend cannot run
        if not self.dropout:
            seed = None
        elif seed is None:
            seed = torch.randint(2**63 - 1, (), device=q.device)
        elif isinstance(seed, int):
            seed = torch.full((), seed, dtype=torch.int64, device=q.device)
        factors = scale, float(self.softcap), self.sinks, float(self.dropout)
        return AttentionOptions(*factors, seed, self.deterministic, self.backend)


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to autocast's dtype if it is enabled, as SDPA does; float64 stays."""
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    if not all(isinstance(x, Tensor) for x in (k, v)):
        return q, k, v  # check_qkv reports these
    low = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
