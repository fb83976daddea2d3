"""What Nsight Compute counts of one call: bytes of DRAM, and how busy the units are that can hold a kernel up.

A unit that is busy 90 % of the time is what limits a kernel; if none is, its parties wait for each other. Bytes are those of
all kernels of the call; busy is its longest kernel, with the share of the call's time that this one takes.
"""

import csv
import shutil
import subprocess
import sys
from typing import Any

from ringspan import ROOT
from ringspan.kernels.bench.baselines import WAYS

BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIME = "gpu__time_duration.sum"
BUSY = {
    "tensor cores": "sm__pipe_tensor_cycles_active",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts",  # also what tensor cores read there
    "exponentials": "sm__inst_executed_pipe_xu",
    "issue slots": "sm__issue_active",
    "L2": "lts__throughput",
    "DRAM": "dram__cycles_active",
}
SHARE = ".avg.pct_of_peak_sustained_elapsed"
Counted = dict[str, Any]


def counters(shape: str, kernel: str, way: str, dtype: str) -> Counted:
    """Of one call in a process of its own; RuntimeError says why there are none."""
    tool = shutil.which("ncu")
    if tool is None:
        raise RuntimeError("ncu is not on the PATH: install Nsight Compute to have DRAM bytes and busy units counted")
    metrics = (*BYTES, TIME, *(name + SHARE for name in BUSY.values()))
    # caches as the call before left them, as in a run; and a shared GPU's clocks are left alone
    options = ["--profile-from-start", "off", "--target-processes", "all", "--cache-control", "none", "--clock-control", "none"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    command = [tool, *options, sys.executable, "-m", "ringspan.kernels.bench.nsight_target", shape, kernel, way, dtype]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ncu is here, but did not count: {error}") from None
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    # the row behind the heading has only units
    rows = [] if start is None else [row for row in csv.DictReader(lines[start:]) if row["ID"]]
    if done.returncode or not rows:
        reason = [line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line or "rror" in line]
        raise RuntimeError(f"ncu is here, but did not count: {' '.join(reason[:1]) or 'no kernel was profiled'}")

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
        raise RuntimeError(f"ncu is here, but not everything is counted on this GPU: {error}") from None


def count(rows: list[dict[str, Any]], dtype: str, kernels: tuple[str, ...] | None = None) -> str:
    """Adds what is counted to the rows that were measured, of these kernels or all; a line about it."""
    for row in rows:
        if row["status"] == "ok" and (kernels is None or row["kernel"] in kernels):
            for way in WAYS:
                try:
                    counted = counters(row["shape"], row["kernel"], way, dtype)
                except RuntimeError as error:
                    return str(error)
                row |= {f"{way}_{what}": found for what, found in counted.items()}
    return "ncu: of one call, caches as the call before left them"


def report(rows: list[dict[str, Any]]) -> str:
    """A line for each row and way: what is busy how much of the time."""
    lines = [f"\n{'busy, by ncu':<48}" + "".join(f"{unit:>15}" for unit in BUSY)]
    for row in rows:
        for way in WAYS:
            if busy := row.get(f"{way}_busy"):
                name = f"{row['shape']} {row['kernel']} {way}"
                lines.append(f"{name:<48}" + "".join(f"{busy[unit]:>15.0%}" for unit in BUSY))
    return "\n".join(lines)
