"""Choose the backend of a call by name, or for "auto" by device and inputs.

    hopper      sm_90, bf16 or fp16, no dropout, scale ≥ 1e-30
    triton      any other call with head dims up to 256, except in fp64, on a GPU with 80 KB of shared memory (AMD: 64)
    chunked     everything else

RINGSPAN_LOG=1 prints each choice once, with the reason.
"""

import functools
import importlib
import os
import sys
from types import ModuleType

import torch
from torch import Tensor

from ringspan.kernels.runtime.triton_compat import hopper_runs_on, shared_memory, triton_runs_on

BACKENDS = ("reference", "chunked", "triton", "hopper")
# The most that a portable kernel takes with its smallest tiles: 80 KB (fp32, head dims above 64); on AMD 64 KB (256, softcap).
MIN_SHARED_MEMORY = 64 * 2**10 if torch.version.hip else 80 * 2**10
MODULES = {  # name: (module of the forward, module of the backward)
    "reference": ("reference", "reference"),
    "chunked": ("chunked", "chunked"),
    "triton": ("triton.forward", "triton.backward"),
    "hopper": ("hopper.forward", "hopper.backward"),
}


def choose_backend(
    name: str,
    q: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> str:
    """Return the backend that runs this call.

    Raises:
        ValueError: The named backend is unknown or cannot run these inputs; the message says why and names one that can.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend={name!r}: choose one of {('auto', *BACKENDS)}")
    obstacles = {"triton": _triton_obstacle(q, v)}
    obstacles["hopper"] = _hopper_obstacle(q, scale, dropout) or obstacles["triton"]
    if obstacle := obstacles.get(name):
        alternative = "chunked" if obstacles["triton"] else "triton"
        raise ValueError(f"backend={name!r} {obstacle}: use backend={alternative!r}, or 'auto' to let the inputs decide")
    if name != "auto":
        return name
    if obstacles["triton"] is None and q.device.type != "cpu":
        if obstacles["hopper"] is None:
            return _log("hopper", "its kernels take these inputs")
        return _log("triton", f"hopper {obstacles['hopper']}")
    reason = obstacles["triton"]
    return _log("chunked", f"triton {reason}" if reason else "on a CPU Triton is an interpreter, for tests only")


def device_obstacle(device: torch.device) -> str | None:
    """Return why Triton does not run on a device, for an error message; None if it does."""
    if triton_runs_on(device):
        return None
    remedy = "RINGSPAN_CHIP=sm_90 names a GPU" if device.type == "meta" else "TRITON_INTERPRET=1 interprets it on a CPU"
    return f"does not run on {device} ({remedy})"


def _triton_obstacle(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "has no fp64"
    if obstacle := device_obstacle(q.device):
        return obstacle
    if (available := shared_memory(q.device)) < MIN_SHARED_MEMORY:
        return f"needs {MIN_SHARED_MEMORY >> 10} KB of shared memory, this GPU has {available >> 10} KB"
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


def _log(backend: str, reason: str) -> str:
    if os.environ.get("RINGSPAN_LOG") == "1" and not torch.compiler.is_compiling():
        _log_once(backend, reason)
    return backend


@functools.cache
def _log_once(backend: str, reason: str) -> None:
    print(f"ringspan: attention runs on {backend}: {reason}", file=sys.stderr)


@functools.cache
def backend_module(backend: str, backward: bool) -> ModuleType:
    """Import and return the module with the backend's block_forward or block_backward."""
    return importlib.import_module(f"ringspan.kernels.backends.{MODULES[backend][backward]}")


def adds_dq_atomically(
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
    """Return whether block_backward with these options adds to dq atomically, so that concurrent kernels may share one dq."""
    if deterministic:
        return False
    chosen = choose_backend(backend, q, v, scale=1.0 if scale is None else scale, dropout=dropout)
    return getattr(backend_module(chosen, backward=True), "ADDS_DQ_ATOMICALLY", False)
