"""Planned and measured memory and time of a step's phases: start, forward, backward, step.

On a GPU the allocator's peaks are read at the end of each phase and reset, and CUDA events measure its time. Neither waits for
the GPU. On a CPU only the time is measured.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ringspan.trainer.planning.memory import GIB
from ringspan.trainer.planning.plans import PlannedStep

START = "start"


class MemoryUse:
    """Measures the phases of this rank's steps.

    Args:
        device: the rank's device.
        planned: the plan.
        host: bytes of host memory that the plan's region has.
        is_warm: kernels are compiled before the first step, whose time counts then.
    """

    def __init__(self, device: torch.device, planned: PlannedStep, host: int = 0, is_warm: bool = False) -> None:
        self.device, self.planned, self.host, self.is_warm = device, planned, host, is_warm
        self.gpu = device.type == "cuda"
        self.first = True  # no step has ended
        self.current = START
        self.peaks = (0, 0)  # bytes allocated and reserved, of the whole run
        self._bytes: dict[str, tuple[int, int]] = {}  # of this step
        self._times: list[tuple[str, Any, Any]] = []
        self._largest: dict[str, tuple[int, int]] = {}  # of the whole run
        self._seconds: list[float] = []  # of steps

    def start(self) -> dict[str, Any]:
        """Return the metrics of the start, when weights, optimizer and host memory exist."""
        if self.gpu:
            self._bytes[START] = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        self._read()
        about = dict(plan=str(self.planned.plan), seconds_planned=self.planned.seconds)
        return dict(phase=START, **about, **self._row(START), **self._outside_the_allocator())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._read()  # memory outside of phases, such as an evaluation's, counts for no phase
        self.current = name
        begin = self._now()
        yield
        self._times.append((name, begin, self._now()))
        self._read(name)

    def finished(self) -> dict[str, Any]:
        """Return the metrics of the phase that has ended last. It waits for the GPU."""
        name = self._times[-1][0]
        if self.gpu:
            torch.cuda.synchronize(self.device)
        return dict(phase=name, **self._row(name), **self._outside_the_allocator(), seconds=self._elapsed(*self._times[-1][1:]))

    def step(self, seconds: float) -> dict[str, Any]:
        """Return the metrics of a step's phases, after the GPU has finished it; nothing on a CPU."""
        if self.is_warm or not self.first:  # else the first step compiles
            self._seconds.append(seconds)
        self.first = False
        rows: dict[str, Any] = {}
        for name, begin, end in self._times:
            row = rows.setdefault(name, self._row(name) | dict(seconds=0.0))
            row["seconds"] += self._elapsed(begin, end)
        self._times, self._bytes = [], {}
        return rows if self.gpu else {}

    def report(self) -> list[str]:
        """Return the line at the end of a run: how far off the plan was."""
        parts = []
        if self.gpu and self._largest:
            name = max(self._largest, key=lambda phase: self._largest[phase][0])
            allocated, planned = self._largest[name][0], self.planned.need.peak
            parts.append(
                f"{planned / GIB:.2f} GiB planned, {allocated / GIB:.2f} allocated at the peak ({name}; the plan is "
                f"{planned / allocated - 1:+.1%}), {self.peaks[1] / GIB:.2f} reserved"
            )
        else:
            parts.append(f"{self.planned.need.peak / GIB:.2f} GiB planned (only a GPU's allocator measures it)")
        if self.host:
            parts.append(f"{self.planned.need.on_host / GIB:.2f} GiB of host memory planned, {self.host / GIB:.2f} pinned")
        if self.gpu and self._seconds:
            median = sorted(self._seconds)[len(self._seconds) // 2]
            off = f"the plan is {self.planned.seconds / median - 1:+.1%}"
            parts.append(f"{self.planned.seconds:.3g} s per step planned, {median:.3g} measured ({off})")
        return [f"memory plan {self.planned.plan}: {'; '.join(parts)}", ""]

    def out_of_memory(self, smaller: PlannedStep | None, available: float) -> str:
        """Return what an out-of-memory error was about.

        Args:
            smaller: the next plan to try; None if there is none.
            available: bytes of this rank's device.
        """
        allocated = torch.cuda.memory_allocated(self.device) if self.gpu else 0
        peak = max(allocated, torch.cuda.max_memory_allocated(self.device) if self.gpu else 0)
        hint = "no smaller plan fits: use more GPUs, or a shorter sequence"
        if smaller:
            hint = f"try engine.memory={str(smaller.plan)!r} ({smaller})"
        phase = self.planned.need.phase(self.current)
        return (
            f"out of memory in phase {self.current!r}: {phase / GIB:.2f} GiB were planned for it, {peak / GIB:.2f} GiB are "
            f"allocated, {available / GIB:.2f} GiB are available (plan {self.planned.plan}); {hint}"
        )

    def _row(self, name: str) -> dict[str, Any]:
        row = dict(planned=self.planned.need.phase(name) / GIB)
        if self.gpu:
            allocated, reserved = self._bytes.get(name, (0, 0))
            row |= dict(allocated=allocated / GIB, reserved=reserved / GIB)
        if self.host or self.planned.need.on_host:
            row |= dict(host_planned=self.planned.need.on_host / GIB, host_pinned=self.host / GIB)
        return row

    def _outside_the_allocator(self) -> dict[str, float]:
        """GiB of the GPU that torch's allocator has not reserved, and this process's host memory, now and at its peak."""
        used: dict[str, float] = {}
        if self.gpu:
            free, total = torch.cuda.mem_get_info(self.device)
            used["outside"] = (total - free - torch.cuda.memory_reserved(self.device)) / GIB
        with contextlib.suppress(OSError):  # Linux
            fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            used |= {name: int(fields[key].split()[0]) / 2**20 for name, key in (("host_now", "VmRSS"), ("host_peak", "VmHWM"))}
        return used

    def _read(self, name: str = "") -> None:
        """Add the peaks since the last reading to a phase; between phases only to the run's."""
        if not self.gpu:
            return
        now = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        self.peaks = tuple(map(max, self.peaks, now))  # type: ignore[assignment]
        if name:
            for phases in (self._bytes, self._largest):
                phases[name] = tuple(map(max, phases.get(name, (0, 0)), now))  # type: ignore[assignment]
        torch.cuda.reset_peak_memory_stats(self.device)

    def _now(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _elapsed(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.gpu else end - begin
