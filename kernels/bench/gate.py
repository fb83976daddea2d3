"""Compare a benchmark with an earlier one of the same GPU: `ringspan bench kernels --gate FILE`.

Clocks and temperatures change between runs, so speeds are not compared. Each run alternates our kernels with the baselines,
and their ratio is stable:

    ratio = our TFLOP/s ÷ the baseline's, medians over the rounds        fails if ratio < (1 - TOLERANCE) · ratio in FILE
"""

import json
from pathlib import Path
from typing import Any

from ringspan.kernels.bench.baselines import DIRECTIONS
from ringspan.kernels.bench.measure import Row
from ringspan.kernels.bench.shapes import SHAPES

TOLERANCE = 0.03
MIN_ROUNDS = 7  # with fewer, medians of equal kernels differ by more than 1 %
Ratios = dict[tuple[str, str, str, str], float]  # {(shape, our kernel, baseline, direction): ratio}


def ratios(rows: list[Row]) -> Ratios:
    """Return the ratio of each of our kernels to each baseline; rows that were not timed are left out."""
    timed = [row for row in rows if row["status"] == "ok"]
    return {
        (ours["shape"], ours["kernel"], baseline["kernel"], direction): (
            ours[f"{direction}_tflops"] / baseline[f"{direction}_tflops"]
        )
        for ours in timed
        if ours["ours"]
        for baseline in timed
        if not baseline["ours"] and baseline["shape"] == ours["shape"]
        for direction in DIRECTIONS
    }


def load(path: Path, device: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the earlier result.

    Raises:
        ValueError: it cannot be read, or it and this run cannot be compared; the message names a remedy.
    """
    again = f"measure one here with --rounds {MIN_ROUNDS} --json {path}"
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--gate {path}: {error}; {again}") from error
    if not isinstance(result, dict) or result.get("kind") != "attention" or not ratios(result.get("rows", [])):
        raise ValueError(f"--gate {path} holds no kernel of ours next to a baseline: {again}")
    if (result["device"], result["dtype"]) != (device, dtype):
        raise ValueError(
            f"--gate {path} was measured on {result['device']} in {result['dtype']}, not {device} in {dtype}: {again}"
        )
    if result.get("rounds", 0) < MIN_ROUNDS:
        raise ValueError(f"--gate {path} has {result.get('rounds', 'an unknown number of')} rounds: {again}")
    if rounds < MIN_ROUNDS:
        raise ValueError(f"--gate compares medians: use --rounds {MIN_ROUNDS} or more, not {rounds}")
    if unknown := {shape for shape, *_ in ratios(result["rows"])} - set(SHAPES):
        raise ValueError(f"--gate {path} has unknown shapes, {', '.join(sorted(unknown))}: {again}")
    return result


def compare(rows: list[Row], earlier: list[Row]) -> tuple[str, bool]:
    """Return a table of the ratios of the measured shapes, and whether the gate passes.

    A ratio that was measured earlier and is missing now fails: its kernel is wrong, failed or was left out.
    """
    now, before, passes = ratios(rows), ratios(earlier), True
    shapes = {row["shape"] for row in rows}
    lines = [f"\ngate, ratios may fall by {TOLERANCE:.0%}: {'before':>37}{'now':>8}"]
    for key, ratio in before.items():
        if key[0] not in shapes:
            continue
        shape, ours, baseline, direction = key
        is_lower = key not in now or now[key] < (1 - TOLERANCE) * ratio
        passes &= not is_lower
        value = f"{now[key]:>8.3f}" if key in now else " missing"
        lines.append(
            f"  {shape:<24}{f'{ours} ÷ {baseline}':<24}{direction:<10}{ratio:>8.3f}{value}{'  too low' if is_lower else ''}"
        )
    return "\n".join(lines), passes
