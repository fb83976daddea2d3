"""Line charts as SVG text. A chart needs no script: labels of points are SVG titles, which a browser shows on hovering."""

import html
import math
from collections.abc import Callable

from ringspan.trainer.reports.read_run import Point

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 42
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")  # Okabe and Ito, and one more
MARKED = 40  # points of a curve up to which each has a mark


def line_chart(
    series: list[tuple[str, list[Point]]],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    labels: list[str] | None = None,
) -> str:
    """Return a chart.

    Args:
        series: (name, points by rising x) of each curve; an empty one takes its colour and draws nothing.
        x_label: label of the x axis.
        y_label: label of the y axis.
        x_text: returns the text of a value of x.
        labels: texts of x = 0, 1, …; None for a continuous axis.
    """
    points = [point for _, curve in series for point in curve]
    if not points:
        return "<p>no data</p>"
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (y_high - y_low) or 0.05 * abs(y_high) or 1.0
    y_low, y_high = y_low - margin, y_high + margin
    x_span = (x_high - x_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / x_span
        up = (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(y_label)}">']
    for y in ticks(y_low, y_high):
        height = place(x_low, y)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in range(len(labels)) if labels is not None else ticks(x_low, x_high):
        across = place(x, y_low)[0]
        if labels is not None and len(labels) > 12 and int(x) % (len(labels) // 8):
            continue
        text = labels[int(x)] if labels is not None else x_text(x)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{html.escape(text)}</text>')
    for index, (name, curve) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        placed = [place(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>' * (len(curve) > 1))
        if len(curve) <= MARKED:
            for (x, y), (across, height) in zip(curve, placed, strict=True):
                where = labels[int(x)] if labels is not None else x_text(x)
                title = html.escape(f"{name}: {y:.4g} at {where}")
                parts.append(
                    f'<circle cx="{across:.1f}" cy="{height:.1f}" r="3" fill="{color}"><title>{title}</title></circle>'
                )
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_label)}</text></svg>'
    )
    legend = "".join(
        f'<li><span style="background:{COLORS[i % len(COLORS)]}"></span>{html.escape(name)}</li>'
        for i, (name, curve) in enumerate(series)
        if curve
    )
    return "".join(parts) + f'<ul class="legend">{legend}</ul>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values between two bounds."""
    step = 10 ** math.floor(math.log10((high - low) / count)) if high > low else 1.0
    step *= next((factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= count + 1), 10)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]
