"""How many joules a call takes, by the counter of NVIDIA's driver (NVML), which counts the whole GPU, whoever works on it.

A GPU has so many watts and no more: a kernel that takes more in a cycle gets a lower clock. So of two kernels that take as many
cycles, the one with fewer joules is faster. Whether it was so is asked too: the driver says when power holds the clock down.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SECONDS = 2.0  # that a measurement takes at least; the counter has a new value some twenty times in it
LOOK = 10.0  # ms between two looks at the counter
POWER_HOLDS_DOWN = 0x4 | 0x80  # of the reasons for a clock: the driver's limit, and a brake from outside


class Counter:
    def __init__(self, device: torch.device) -> None:
        try:
            self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ValueError(f"--energy needs the driver's library, NVML: leave it out ({error})") from error
        self.handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._ask("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self.handle))

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def limit(self) -> float:
        """Watts that the GPU may take."""
        milliwatts = ctypes.c_uint()
        self._ask("nvmlDeviceGetEnforcedPowerLimit", self.handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1000

    def held_down(self) -> bool:
        """Whether the clock is low at this moment for the sake of power."""
        reasons = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle, ctypes.byref(reasons))
        return bool(reasons.value & POWER_HOLDS_DOWN)

    def _ask(self, what: str, *given: Any) -> None:
        if code := getattr(self.library, what)(*given):
            raise ValueError(f"--energy: {what} fails with NVML's error {code}: leave it out on this GPU")


class Tick(NamedTuple):
    """A new value of the counter."""

    joules: float
    seconds: float
    calls: int


def between_ticks(calls: Callable[[], int], joules: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """Joules of one call, and watts: from one new value of the counter to another, for in between it stands still.

    calls() says how many more calls are done, and leaves some running.
    """
    begun, done, value = now(), 0, joules()
    ticks: list[Tick] = []
    while len(ticks) < 2 or ticks[-1].seconds - ticks[0].seconds < SECONDS:
        done += calls()
        seen = joules()
        if seen != value:
            ticks.append(Tick(seen, now(), done))
            value = seen
        elif now() - begun > 20 * SECONDS:
            raise ValueError("--energy: the counter stands still: leave it out on this GPU")
    first, last = ticks[0], ticks[-1]
    spent = last.joules - first.joules
    return spent / (last.calls - first.calls), spent / (last.seconds - first.seconds)


def count_energy(call: Callable[[], object], ms: float, _rep: float, device: torch.device) -> dict[str, float]:
    counter, at_once = Counter(device), max(1, int(LOOK / ms))
    looks: list[bool] = []

    def start() -> torch.cuda.Event:
        for _ in range(at_once):
            call()
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(device))
        return end

    running = start()

    def calls() -> int:
        nonlocal running
        done, running = running, start()  # so the GPU has work while the host asks the driver, which takes milliseconds
        looks.append(counter.held_down())
        done.synchronize()
        return at_once

    joules, watts = between_ticks(calls, counter.joules, time.perf_counter)
    return {"joules": joules, "watts": watts, "watts_limit": counter.limit(), "held_down": sum(looks) / len(looks)}
