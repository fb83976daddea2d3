"""Differences between Triton 3.6 to 3.9 and between chips: renamed functions, compiler limits, chip names, the interpreter."""

import dis
import functools
import os
import sys
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.jit import JITCallable

# Gluon renamed loads and stores in 3.8 and the barrier in 3.7; from 3.8 on it has a function for TMA reduce-add.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """TMA reduce-add of a tile in shared memory to the descriptor's memory; complete after tma.store_wait."""
        offsets = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, offsets, src.handle)


@builtin
def with_layout(memory: Any, layout: Any, _semantic: Any = None) -> Any:
    """Reinterpret shared memory with another layout. The method lost its leading underscore in 3.9."""
    return _semantic.memdesc_reinterpret(memory, memory.dtype, memory.shape, getattr(layout, "value", layout))


VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Triton 3.9's assembler serialises the matmuls of the preceding loop if dk or dv is then stored to shared memory.
STORE_GRADIENTS_BY_TMA = VERSION < (3, 9)
# Consumers that compute dq have no register to spare: Triton 3.9's assembler serialises their matmuls.
CONSUMERS_COMPUTE_DQ = VERSION < (3, 9)
# Cast weights to 16 bits before the mask's branch. Triton 3.8 keeps each 16-bit value in a register of its own across a
# branch, and registers do not suffice.
CAST_BEFORE_MASK = gl.constexpr(VERSION != (3, 8))
# Hopper's backward at head dims 81 to 96 has registers for all of k. Triton 3.8 and 3.9 would spill up to 72 bytes.
K_FITS_REGISTERS = gl.constexpr(VERSION < (3, 8))
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def constant_result(function: Any) -> Any:
    """Let torch.compile call the function instead of tracing into it; it would warn about the caches below.

    As torch.compiler.assume_constant_result, which imports torch._dynamo. That takes as long as importing torch.
    """
    function._dynamo_marked_constant = True
    return function


@constant_result
def chip(device: torch.device) -> str:
    """Return "sm_90", "gfx942", … or "interpreter". RINGSPAN_CHIP overrides it, to compile for a chip without having it."""
    if INTERPRETED:
        return "interpreter"
    return os.environ.get("RINGSPAN_CHIP") or _chip(device.index or 0)


@functools.cache
def _chip(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    name = f"sm_{properties.major}{properties.minor}"
    # Tile sizes depend on shared memory: sm_86, sm_89 and sm_120 have 99 KB, data-centre chips 160 KB and more.
    if _shared_memory(index) < 160 * 1024:
        return name
    return {8: "sm_80", 9: "sm_90"}.get(properties.major, "sm_100")


def triton_runs_on(device: torch.device) -> bool:
    """Return whether the portable kernels run on this device: a GPU, a CPU with the interpreter, or meta if a chip is known."""
    if device.type == "meta":
        return bool(INTERPRETED or os.environ.get("RINGSPAN_CHIP") or torch.cuda.is_available())
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


@constant_result
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a kernel can have; without a GPU there is no limit."""
    return _shared_memory(device.index or 0) if device.type == "cuda" else sys.maxsize


@functools.cache
def _shared_memory(index: int) -> int:
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.shared_memory_per_block if torch.version.hip else properties.shared_memory_per_block_optin


def hopper_runs_on(device: torch.device) -> bool:
    """Return whether the Hopper kernels run on this device."""
    return device.type != "cpu" and triton_runs_on(device) and chip(device) == "sm_90"


def hash_callees(function: JITCallable) -> None:
    """Compute the cache keys of all functions that a kernel calls, callees first.

    A key contains the global constants of those callees only whose own keys were computed earlier (Triton before 3.8). Without
    this a kernel's key, and with it the entry in the cache on disk, depends on which kernels the process compiled before.
    """
    for instruction in dis.get_instructions(function.fn):
        callee = function.__globals__.get(instruction.argval) if instruction.opname == "LOAD_GLOBAL" else None
        if isinstance(callee, JITCallable) and callee.hash is None and callee is not function:
            hash_callees(callee)
            callee.cache_key  # noqa: B018  (a property that stores the key)


def _repair_interpreter() -> None:
    """Patch Triton's interpreter, which multiplies the bit patterns of bf16 as integers in `dot` and truncates casts."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def as_fp32(handle: Any) -> Any:
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (as_fp32(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


if INTERPRETED:
    _repair_interpreter()
