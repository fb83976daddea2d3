"""Draws loss curves of runs, and the differences of pairs that should be equal."""

from pathlib import Path
from typing import Any


def draw(plt: Any, curves: dict[str, dict[int, float]], rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the curves, and below them the differences of pairs; equal curves have none, and get no panel.

    Args:
        plt: matplotlib's pyplot.
        curves: loss by step, by label; a label begins with the run's name.
        rows: pairs, with the names in `runs`, what differs in `differ_in` and the largest difference in `largest`.
        title: text above the figure.
        path: the file to write.
    """
    rows = [row for row in rows if row["largest"] > 0]
    figure, axes = plt.subplots(
        1 + bool(rows), 1, figsize=(9, 5 + 3 * bool(rows)), layout="constrained", squeeze=False, sharex=True
    )
    for index, (label, losses) in enumerate(curves.items()):  # narrow lines over wide ones: equal curves hide each other
        axes[0, 0].plot(*zip(*losses.items(), strict=True), label=label, lw=1 + 2 * (len(curves) - 1 - index), alpha=0.7)
    axes[0, 0].set(ylabel="training loss")
    by_name = {label.partition(",")[0]: losses for label, losses in curves.items()}
    for row in rows:
        first, second = (by_name[name] for name in row["runs"])
        common = sorted(first.keys() & second.keys())
        label = f"{row['differ_in']}: {' and '.join(row['runs'])}"
        axes[1, 0].plot(common, [max(abs(first[step] - second[step]), 1e-9) for step in common], label=label)
    if rows:
        axes[1, 0].set(yscale="log", ylabel="difference of the losses (0 is drawn at 1e-9)")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    axes[-1, 0].set(xlabel="step")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
