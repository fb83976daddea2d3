"""Nsight Compute's counters for one call: DRAM bytes, and the utilisation of the units that can limit a kernel.

A unit that is busy 90 % of the time limits the kernel. If no unit is that busy, the warps wait for each other. DRAM bytes are
those of all kernels of the call. Utilisation is that of its longest kernel, reported with that kernel's share of the call's
time.
"""

import csv
import shutil
import subprocess
import sys
from typing import Any

from ringspan import ROOT
from ringspan.kernels.bench.baselines import DIRECTIONS

BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIME = "gpu__time_duration.sum"
BUSY = {
    "tensor cores": "sm__pipe_tensor_cycles_active",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts",  # includes the tensor cores' reads
    "exponentials": "sm__inst_executed_pipe_xu",
    "issue slots": "sm__issue_active",
    "L2": "lts__throughput",
    "DRAM": "dram__cycles_active",
}
SHARE = ".avg.pct_of_peak_sustained_elapsed"
Counters = dict[str, Any]


def profile_call(shape: str, kernel: str, direction: str, dtype: str) -> Counters:
    """Run one call under ncu in its own process and return its counters.

    Raises:
        RuntimeError: ncu is missing or counted nothing; the text has the reason.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise RuntimeError("ncu is not on the PATH: install Nsight Compute to have DRAM bytes and busy units counted")
    metrics = (*BYTES, TIME, *(name + SHARE for name in BUSY.values()))
    # Caches stay as the previous call left them, as in training; a shared GPU's clocks are not locked.
    options = ["--profile-from-start", "off", "--target-processes", "all", "--cache-control", "none", "--clock-control", "none"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    target = ["-m", "ringspan.kernels.bench.nsight_target", shape, kernel, direction, dtype]
    try:
        # With cwd=ROOT, -m finds this installation of ringspan.
        done = subprocess.run([tool, *options, sys.executable, *target], cwd=ROOT, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ncu is installed, but did not count: {error}") from None
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    # The row after the heading has only units, and an empty ID.
    rows = [] if start is None else [row for row in csv.DictReader(lines[start:]) if row["ID"]]
    if done.returncode or not rows:
        reasons = [line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line or "rror" in line]
        raise RuntimeError(f"ncu is installed, but did not count: {' '.join(reasons[:1]) or 'no kernel was profiled'}")

    def number(row: dict[str, str], metric: str) -> float:
        return float(row[metric].replace(",", ""))

    try:
        longest = max(rows, key=lambda row: number(row, TIME))
        return {
            "dram_bytes": sum(number(row, metric) for row in rows for metric in BYTES),
            "longest": longest["Kernel Name"],
            "longest_share": number(longest, TIME) / sum(number(row, TIME) for row in rows),
            "busy": {unit: number(longest, name + SHARE) / 100 for unit, name in BUSY.items()},
        }
    except (KeyError, ValueError) as error:  # "n/a", or no such metric on this chip
        raise RuntimeError(f"ncu is installed, but does not count every metric on this GPU: {error}") from None


def add_counters(rows: list[dict[str, Any]], dtype: str, kernels: tuple[str, ...] | None = None) -> str:
    """Add the counters to the measured rows (of these kernels, or of all), and return a note for the table."""
    for row in rows:
        if row["status"] == "ok" and (kernels is None or row["kernel"] in kernels):
            for direction in DIRECTIONS:
                try:
                    counters = profile_call(row["shape"], row["kernel"], direction, dtype)
                except RuntimeError as error:
                    return str(error)
                row |= {f"{direction}_{key}": value for key, value in counters.items()}
    return "ncu: of one call, with caches as the previous call left them"


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table of the units' utilisation: a line for each row and direction."""
    lines = [f"\n{'utilisation, by ncu':<48}" + "".join(f"{unit:>15}" for unit in BUSY)]
    for row in rows:
        for direction in DIRECTIONS:
            if busy := row.get(f"{direction}_busy"):
                name = f"{row['shape']} {row['kernel']} {direction}"
                lines.append(f"{name:<48}" + "".join(f"{busy[unit]:>15.0%}" for unit in BUSY))
    return "\n".join(lines)
