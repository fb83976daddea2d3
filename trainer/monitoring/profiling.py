"""Profiles of single steps, GPU memory snapshots, and measured memory use."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringspan.trainer.config.schema import Debug
from ringspan.trainer.planning import host_memory
from ringspan.trainer.planning.flops import PEAKS


@contextlib.contextmanager
def profile_step(step: int, debug: Debug, folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Profile the body of the context, if `debug.profile` or `debug.memory` names the step."""
    with contextlib.ExitStack() as stack:
        if step in debug.profile:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            path = folder / "profile" / f"step-{step}-rank-{rank}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            export = partial(_export, path)
            stack.enter_context(
                torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True, on_trace_ready=export)
            )
        if step in debug.memory and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            stack.callback(lambda: _snapshot(folder / "memory" / f"step-{step}-rank-{rank}.pickle"))
        yield


def rank_memory(device: torch.device) -> float:
    """Return the bytes that a rank has: its GPU's memory, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory.host_memory_per_rank()


def memory_metrics(device: torch.device, tflops: float, allocated: int, reserved: int) -> dict[str, Any]:
    """Return peak memory so far and MFU (attention counted 3.5×) as metrics; nothing on a CPU.

    Args:
        device: this rank's device.
        tflops: TFLOP/s of a step.
        allocated: peak bytes of the run that were allocated.
        reserved: and reserved.
    """
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    metrics = dict(gib=allocated / 2**30, gib_share=allocated / total, gib_reserved=reserved / 2**30)
    peak = next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name(device)), None)
    return metrics | (dict(mfu=tflops * 1e12 / peak) if peak else {})


def _export(path: Path, profiler: Any) -> None:
    profiler.export_chrome_trace(str(path))


def _snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
