"""Looking at single steps: torch.profiler's trace, a snapshot of the GPU's memory, and how much of it is used."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringspan.trainer.config.schema import Debug
from ringspan.trainer.planning import memory
from ringspan.trainer.planning.flops import PEAKS


@contextlib.contextmanager
def watch(step: int, debug: Debug, folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Around a step; does something only at the steps that `debug` names."""
    with contextlib.ExitStack() as stack:
        if step in debug.profile:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            path = folder / "profile" / f"step-{step}-rank-{rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            ready = partial(_export, path)
            stack.enter_context(
                torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True, on_trace_ready=ready)
            )
        if step in debug.memory and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            stack.callback(lambda: _snapshot(folder / "memory" / f"step-{step}-rank-{rank}.pickle"))
        yield


def memory_of_a_rank(device: torch.device) -> float:
    """Bytes: its GPU's, or its part of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory.host_of_a_rank()


def memory_use(device: torch.device, tflops: float) -> dict[str, Any]:
    """The peak so far, and speed as a share of what the chip could do, both counting attention 3.5×; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    used, whole = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    found = dict(gib=used / 2**30, gib_share=used / whole, gib_reserved=torch.cuda.max_memory_reserved(device) / 2**30)
    peak = next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name(device)), None)
    return found | (dict(mfu=tflops * 1e12 / peak) if peak else {})


def _export(path: Path, profiler: Any) -> None:
    profiler.export_chrome_trace(str(path))


def _snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
