"""Pictures of results. matplotlib is needed here and nowhere else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ringspan.kernels.bench.roofline import ALGORITHMS, SIZES, Chip, Point, chip_of, law, points

LENGTHS = [2**n for n in range(10, 21)]
COLOURS = {"standard": "#b03a2e", "chunked": "#d9822b", "triton": "#3b6ea5", "hopper": "#2e7d4f"}
MARKS = {"forward": "o", "backward": "s"}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_roofline(result: dict[str, Any], path: Path) -> None:
    """Bytes against length by the model, and the roofline with what was measured."""
    plt, chip, found = pyplot(), chip_of(result), points(result)
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    _bytes(left, chip, found, SIZES[result["dtype"]])
    _roof(right, chip, found)
    figure.suptitle(f"{result['device']}, {result['dtype']}, measured {result['date']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bytes(axis: Any, chip: Chip, found: list[Point], size: int) -> None:
    """Of the forward of the first shape that can be lengthened."""
    plain = [point.shape for point in found if not point.shape.window and not point.shape.documents]
    if not plain:
        raise ValueError("bytes against length need a shape without window and documents: measure d128-causal-16k, for one")
    shape = plain[0]
    for algorithm in ("standard", "triton", "hopper"):
        works = [ALGORITHMS[algorithm](replace(shape, length=n), "forward", size) for n in LENGTHS]
        label = "standard" if algorithm == "standard" else f"flash ({algorithm})"
        colour, width = COLOURS[algorithm], 4 if algorithm == "triton" else 1.5  # its loads can be hopper's: broad below narrow
        axis.plot(LENGTHS, [work.loads for work in works], "--", color=colour, lw=width, label=f"{label}: nothing cached")
        axis.plot(LENGTHS, [work.memory(chip) for work in works], color=colour, label=f"{label}: behind the L2 cache")
    theory = [law(replace(shape, length=n), chip, size) for n in LENGTHS]
    axis.plot(LENGTHS, theory, "k:", label="flash by the paper: keys loaded, 8 N² d² / M")
    for point in found:
        alike = replace(shape, name=point.shape.name, length=point.shape.length) == point.shape
        if alike and point.way == "forward" and point.counted:
            axis.plot(point.shape.length, point.counted, "D", color=COLOURS[point.algorithm], label=f"{point.algorithm}: ncu")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes of a forward")
    axis.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS], minor=False)
    mask = "causal" if shape.causal else "full"
    axis.set_title(f"bytes by the model: {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {mask}")
    axis.legend(fontsize=8)


def _roof(axis: Any, chip: Chip, found: list[Point]) -> None:
    measured = [(point, point.work.flops / point.ms * 1000) for point in found if point.ms]
    ridge = chip.half / chip.bandwidth
    reach = [point.work.intensity(chip) for point, _ in measured]
    ends = [min([ridge / 100, *reach]), max([ridge * 100, *reach]) * 2]
    for peak, style, label in ((chip.half, "-", "bf16"), (chip.single, ":", "fp32")):
        bend = peak / chip.bandwidth
        axis.plot([ends[0], bend, ends[1]], [ends[0] * chip.bandwidth, peak, peak], "k" + style, label=f"limit, {label}")
    for point, speed in measured:
        axis.plot(point.work.intensity(chip), speed, MARKS[point.way], color=COLOURS[point.algorithm], alpha=0.7)
    for algorithm, way in dict.fromkeys((point.algorithm, point.way) for point, _ in measured):
        axis.plot([], [], MARKS[way], color=COLOURS[algorithm], label=f"{algorithm} {way}")
    axis.set(xscale="log", yscale="log", xlabel="FLOP a byte of memory, by the model", ylabel="FLOP/s carried out")
    axis.set_title("roofline and what was measured, all shapes")
    axis.legend(fontsize=8)
