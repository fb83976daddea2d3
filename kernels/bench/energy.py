"""Joules of a call, from the energy counter of NVIDIA's driver (NVML), which counts the whole GPU including other processes.

A GPU has a power limit: a kernel that draws more power per cycle gets a lower clock. So of two kernels with equal cycles, the
one with fewer joules is faster. The driver also reports whether power throttles the clock.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SECONDS = 2.0  # minimum length of a measurement; the counter updates about twenty times in it
POLL_MS = 10.0  # between two reads of the counter
POWER_THROTTLED = 0x4 | 0x80  # NVML throttle reasons: software power cap, external power brake


class EnergyCounter:
    """The NVML counters of one GPU. Methods raise ValueError if NVML returns an error."""

    def __init__(self, device: torch.device) -> None:
        try:
            self.library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ValueError(f"--energy needs the driver's library, NVML: leave it out ({error})") from error
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self.handle))

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def limit(self) -> float:
        """Return the power limit of the GPU in watts."""
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetEnforcedPowerLimit", self.handle, ctypes.byref(milliwatts))
        return milliwatts.value / 1000

    def is_throttled(self) -> bool:
        """Return whether power lowers the clock at this moment."""
        reasons = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle, ctypes.byref(reasons))
        return bool(reasons.value & POWER_THROTTLED)

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.library, function)(*arguments):
            raise ValueError(f"--energy: {function} fails with NVML's error {code}: leave it out on this GPU")


class Tick(NamedTuple):
    """An update of the energy counter: its value, the time, and the calls completed so far."""

    joules: float
    seconds: float
    calls: int


def between_ticks(calls: Callable[[], int], joules: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """Return the joules of one call and the mean watts, between two updates of the counter.

    Args:
        calls: waits for some calls and returns their number; other calls are still running on return.
        joules: reads the counter, whose value is constant between updates.
        now: the time in seconds.

    Raises:
        ValueError: the counter does not change within 20 × SECONDS.
    """
    start, num_calls, value = now(), 0, joules()
    ticks: list[Tick] = []
    while len(ticks) < 2 or ticks[-1].seconds - ticks[0].seconds < SECONDS:
        num_calls += calls()
        reading = joules()
        if reading != value:
            ticks.append(Tick(reading, now(), num_calls))
            value = reading
        elif now() - start > 20 * SECONDS:
            raise ValueError("--energy: the counter does not change: leave it out on this GPU")
    first, last = ticks[0], ticks[-1]
    energy = last.joules - first.joules
    return energy / (last.calls - first.calls), energy / (last.seconds - first.seconds)


def count_energy(call: Callable[[], object], ms: float, _rep: float, device: torch.device) -> dict[str, float]:
    """Return joules, watts, the power limit and the share of time with a throttled clock, of a call that takes `ms`."""
    counter, batch = EnergyCounter(device), max(1, int(POLL_MS / ms))
    throttled: list[bool] = []

    def launch_batch() -> torch.cuda.Event:
        for _ in range(batch):
            call()
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(device))
        return end

    running = launch_batch()

    def calls() -> int:
        nonlocal running
        completed, running = running, launch_batch()  # keeps the GPU busy during the driver's query, which takes milliseconds
        throttled.append(counter.is_throttled())
        completed.synchronize()
        return batch

    joules, watts = between_ticks(calls, counter.joules, time.perf_counter)
    return {"joules": joules, "watts": watts, "watts_limit": counter.limit(), "held_down": sum(throttled) / len(throttled)}
