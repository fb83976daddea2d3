"""Threads that shorten a process's first call of a kernel.

    hash of Triton        a part of every key in Triton's cache on disk: computed from the import of this module on
    Triton's driver       a C file that Triton compiles if its cache is empty: likewise, for CUDA
    backward's kernels    compiled and loaded concurrently with those of the first forward of their kind: `precompile`

Triton releases Python's lock in the hash and in most of a compilation.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from ringspan.kernels.runtime.triton_compat import INTERPRETED, VERSION, hash_callees

hash_of_triton = threading.Thread(target=triton_key, daemon=True)
_loads_kernels = ContextVar("loads_kernels", default=False)  # in the threads of `precompile` on a GPU
_hashing_callees = threading.Lock()
_compiling: dict[int, threading.Lock] = {}  # by kernel: a call waits for the thread that compiles its kernel
_precompiled: set[Any] = set()


def start_hash_of_triton() -> None:
    """Start the thread, if it was not started before."""
    if hash_of_triton.ident is None:
        hash_of_triton.start()


def compile_driver() -> None:
    """Compile Triton's driver for CUDA, which initialises no GPU. Triton repeats it and reports its errors."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def compile_kernel(kernel: Any, grid: tuple[int], arguments: dict[str, Any]) -> Any:
    """Return the compiled kernel, from Triton's cache where possible; None in Triton's interpreter."""
    if hash_of_triton.is_alive():
        hash_of_triton.join()
    if isinstance(kernel, JITFunction) and VERSION < (3, 8):
        with _hashing_callees:
            hash_callees(kernel)
    with _compiling.setdefault(id(kernel), threading.Lock()):
        compiled = kernel.warmup(**arguments, grid=grid)
        if _loads_kernels.get():
            compiled._init_handles()  # Triton 3.6 compiles a launcher in C here
        return compiled


def precompile(run: Callable[..., Any], *args: Any) -> threading.Thread | None:
    """Compile the kernels of run(*args) in a thread, once for each kind of arguments; args[0] is a tensor.

    `run` gets meta tensors in place of the tensors, so that its launches only compile. Its errors are left to the real call.
    """
    kind = run, *((x.dtype, x.shape[2:]) if isinstance(x, Tensor) else str(x) for x in args)
    if kind in _precompiled:
        return None
    _precompiled.add(kind)
    device = args[0].device
    on_meta = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in args
    ]

    def compile_all() -> None:
        _loads_kernels.set(device.type == "cuda")
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), suppress(Exception):
            run(*on_meta)

    _ = triton.runtime.driver.active  # made here, because two threads would make two
    thread = threading.Thread(target=compile_all)
    thread.start()
    return thread


if (torch.version.cuda or torch.version.hip) and not INTERPRETED:
    start_hash_of_triton()
    if torch.version.cuda:
        threading.Thread(target=compile_driver, daemon=True).start()
