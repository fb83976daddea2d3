"""How many clock cycles a call takes. A GPU's clock drifts by several percent within minutes, and with the power that a kernel
takes; on the H200s that were tried the cycles of a kernel that computes were the same within some tenths of a percent. (DRAM
has a clock of its own, so the cycles of waiting for it do drift.) So two versions of a kernel, in two checkouts, are compared
by them."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read_clocks(to, count):
    """Every multiprocessor's count, where its number says; nobody promises that numbers end at how many there are."""
    multiprocessor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, is_pure=False, pack=1)
    clock = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, is_pure=False, pack=1)
    tl.store(to + multiprocessor, clock, mask=multiprocessor < count)


def cycles_of(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of one call among `repeats` that follow upon each other. What lies between two counts: the host has to be faster."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    before, after = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
    call()  # what is worked out once is
    read_clocks[(count,)](before, count, num_warps=1)
    for _ in range(repeats):
        call()
    read_clocks[(count,)](after, count, num_warps=1)
    read = (before > 0) & (after > 0)  # two programs may share a multiprocessor, and another then has none
    if not read.any():
        raise RuntimeError("no multiprocessor was read before and after: is another process at work on this GPU?")
    return (after - before)[read].double().median().item() / repeats


def count_cycles(call: Callable[[], object], ms: float, rep: float, device: torch.device) -> dict[str, float]:
    """Millions, of as many calls as take about `rep` ms."""
    return {"mcycles": cycles_of(call, max(2, int(rep / ms)), device) / 1e6}
