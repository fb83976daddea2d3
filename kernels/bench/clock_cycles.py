"""Clock cycles of a call, for comparing two versions of a kernel in two checkouts.

A GPU's clock drifts by several percent within minutes, and with the power that a kernel draws. On the H200s that were tried,
the cycles of a compute-bound kernel agreed within some tenths of a percent. DRAM has its own clock, so the cycles that a kernel
waits for DRAM do drift.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ringspan.kernels.tensors import num_sms


@triton.jit
def read_clocks(clocks, count):  # type: ignore[no-untyped-def]
    """Store each SM's clock at its %smid; PTX does not promise that SM ids are below the number of SMs."""
    multiprocessor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, is_pure=False, pack=1)
    clock = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, is_pure=False, pack=1)
    tl.store(clocks + multiprocessor, clock, mask=multiprocessor < count)


def cycles_of(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the clock cycles of one call, the mean of `repeats` consecutive calls.

    The cycles are those between two clock reads on the same SM, so the host must launch faster than the GPU executes.

    Raises:
        RuntimeError: no SM was read both before and after the calls.
    """
    count = num_sms(device)
    before, after = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
    call()  # warm-up: compiles and fills caches
    read_clocks[(count,)](before, count, num_warps=1)
    for _ in range(repeats):
        call()
    read_clocks[(count,)](after, count, num_warps=1)
    is_read = (before > 0) & (after > 0)  # two thread blocks may share an SM, and another SM then has none
    if not is_read.any():
        raise RuntimeError("no SM was read before and after: check that no other process uses this GPU")
    return (after - before)[is_read].double().median().item() / repeats


def count_cycles(call: Callable[[], object], ms: float, rep: float, device: torch.device) -> dict[str, float]:
    """Return the million cycles of a call that takes `ms`, measured for about `rep` ms."""
    return {"mcycles": cycles_of(call, max(2, int(rep / ms)), device) / 1e6}
