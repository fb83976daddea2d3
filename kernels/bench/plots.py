"""Plots of benchmark results, with matplotlib, which only this module imports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ringspan.kernels.bench.roofline import ALGORITHMS, ELEMENT_SIZES, Chip, Point, chip_of, paper_loads, points

LENGTHS = [2**n for n in range(10, 21)]
COLOURS = {"standard": "#b03a2e", "chunked": "#d9822b", "triton": "#3b6ea5", "hopper": "#2e7d4f"}
MARKS = {"forward": "o", "backward": "s"}


def pyplot() -> Any:
    """Return matplotlib.pyplot with a backend that draws into files; ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_roofline(result: dict[str, Any], path: Path) -> None:
    """Draw two panels into a file: the model's bytes against length, and the roofline with the measured points."""
    plt, chip, all_points = pyplot(), chip_of(result), points(result)
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    _draw_bytes(left, chip, all_points, ELEMENT_SIZES[result["dtype"]])
    _draw_roofline(right, chip, all_points)
    figure.suptitle(f"{result['device']}, {result['dtype']}, measured {result['date']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bytes(axis: Any, chip: Chip, all_points: list[Point], size: int) -> None:
    """Bytes of a forward of the first shape without window and documents, which alone can have any length."""
    plain = [point.shape for point in all_points if not point.shape.window and not point.shape.documents]
    if not plain:
        raise ValueError("bytes against length need a shape without window and documents: measure d128-causal-16k, for one")
    shape = plain[0]
    for algorithm in ("standard", "triton", "hopper"):
        works = [ALGORITHMS[algorithm](replace(shape, length=n), "forward", size) for n in LENGTHS]
        label = "standard" if algorithm == "standard" else f"flash ({algorithm})"
        # Triton's line is wide, because Hopper's may cover it.
        colour, width = COLOURS[algorithm], 4 if algorithm == "triton" else 1.5
        axis.plot(LENGTHS, [work.loads for work in works], "--", color=colour, lw=width, label=f"{label}: nothing cached")
        axis.plot(LENGTHS, [work.memory(chip) for work in works], color=colour, label=f"{label}: after the L2 cache")
    theory = [paper_loads(replace(shape, length=n), chip, size) for n in LENGTHS]
    axis.plot(LENGTHS, theory, "k:", label="flash by the paper: keys loaded, 8 N² d² / M")
    for point in all_points:
        is_comparable = replace(shape, name=point.shape.name, length=point.shape.length) == point.shape
        if is_comparable and point.direction == "forward" and point.counted:
            axis.plot(point.shape.length, point.counted, "D", color=COLOURS[point.algorithm], label=f"{point.algorithm}: ncu")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes of a forward")
    axis.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS], minor=False)
    mask = "causal" if shape.causal else "full"
    axis.set_title(f"bytes by the model: {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {mask}")
    axis.legend(fontsize=8)


def _draw_roofline(axis: Any, chip: Chip, all_points: list[Point]) -> None:
    measured = [(point, point.work.flops / point.ms * 1000) for point in all_points if point.ms]
    ridge = chip.bf16_peak / chip.bandwidth
    intensities = [point.work.intensity(chip) for point, _ in measured]
    ends = [min([ridge / 100, *intensities]), max([ridge * 100, *intensities]) * 2]
    for peak, style, label in ((chip.bf16_peak, "-", "bf16"), (chip.fp32_peak, ":", "fp32")):
        bend = peak / chip.bandwidth
        axis.plot([ends[0], bend, ends[1]], [ends[0] * chip.bandwidth, peak, peak], "k" + style, label=f"limit, {label}")
    for point, speed in measured:
        axis.plot(point.work.intensity(chip), speed, MARKS[point.direction], color=COLOURS[point.algorithm], alpha=0.7)
    for algorithm, direction in dict.fromkeys((point.algorithm, point.direction) for point, _ in measured):
        axis.plot([], [], MARKS[direction], color=COLOURS[algorithm], label=f"{algorithm} {direction}")
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory, by the model", ylabel="FLOP/s executed")
    axis.set_title("roofline and measured points, all shapes")
    axis.legend(fontsize=8)
