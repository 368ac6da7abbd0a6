"""Charts as SVG elements of a page: curves with their names, and a grid of shares by layer and head."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.show.color_ramp import shade
from regard.show.html_pictures import escape_html

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 620, 300, 52, 40, 24  # pixels of the plot, and its margins
NAMES = 230  # pixels to the right of the plot, for the names of the curves
LINE = 16  # pixels from name to name
DASHES = ("", "7 4", "2 3")  # after all colors, the next dash
COLORS = 4
CELL, MARGIN = 16, 34  # pixels of a cell of a grid, and the margin of its numbers
Place = Callable[[float, float], tuple[float, float]]  # numbers of both axes to pixels


@dataclass(frozen=True)
class Curve:
    """A curve: its name and its points (x, share), a share from 0 to 1."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_chart(curves: Sequence[Curve], x_name: str, y_name: str, mark: float | None = None) -> str:
    """Draw curves of shares from 0 to 1, each with its name at its end, and a vertical line at `mark`."""
    most = max((x for curve in curves for x, _ in curve.points), default=1) or 1
    width, height = LEFT + WIDTH + NAMES, TOP + HEIGHT + BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most * WIDTH, TOP + (1 - y) * HEIGHT

    parts = [draw_ticks(place, most)]
    if mark is not None:
        x, _ = place(mark, 0)
        parts.append(f'<path class="axis" stroke-dasharray="2 3" d="M{x:.1f} {TOP}V{TOP + HEIGHT}"/>')
    parts.append(
        f'<text class="faint" x="{LEFT + WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape_html(x_name)}</text>'
    )
    parts.append(f'<text class="faint" x="4" y="12">{escape_html(y_name)}</text>')
    ends = spread_labels([place(*curve.points[-1])[1] for curve in curves])
    for n, (curve, end) in enumerate(zip(curves, ends, strict=True)):
        points = [place(x, y) for x, y in curve.points]
        dash = DASHES[n // COLORS % len(DASHES)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = "".join(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape_html(curve.name)}: {shown:,.0f}, '
            f"{share:.4f}</title></circle>"
            for (x, y), (shown, share) in zip(points, curve.points, strict=True)
        )
        parts.append(
            f'<g class="s{n % COLORS}"><path class="curve" stroke-dasharray="{dash}" d="M{line}"/>{dots}'
            f'<text class="name" x="{LEFT + WIDTH + 10}" y="{end + 4:.1f}">{escape_html(curve.name)}</text></g>'
        )
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(parts)}</svg>'


def draw_ticks(place: Place, most: float) -> str:
    """Draw the lines of the shares and the numbers of both axes."""
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(0, share)
        parts.append(f'<path class="line" d="M{x:.1f} {y:.1f}h{WIDTH}"/>')
        parts.append(f'<text class="faint" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    step = choose_step(most)
    for n in range(int(most // step) + 1):
        x, y = place(n * step, 0)
        parts.append(f'<text class="faint" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{n * step:,g}</text>')
    return "".join(parts)


def choose_step(most: float) -> float:
    """Choose a round step, 1, 2 or 5 times a power of ten, of which 3 to 8 reach `most`."""
    power = 10.0 ** math.floor(math.log10(most / 3))
    return next(n * power for n in (5, 2, 1) if most / (n * power) >= 3)


def spread_labels(heights: Sequence[float]) -> list[float]:
    """Move labels apart that would overlap, in their order from top to bottom, and stay above the bottom of the plot."""
    found, bottom = [0.0] * len(heights), float(TOP + HEIGHT)
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    least = -math.inf
    for n in order:
        found[n] = max(heights[n], least)
        least = found[n] + LINE
    for n in reversed(order):
        found[n] = min(found[n], bottom)
        bottom = found[n] - LINE
    return found


def draw_grid(values: Sequence[Sequence[float]], layers: Sequence[int], heads: Sequence[int]) -> str:
    """Draw shares (layer, head) from 0 to 1 as cells, each with its number as a title."""
    width, height = MARGIN + CELL * len(heads), CELL * len(layers) + MARGIN / 2
    parts = []
    for row, (layer, line) in enumerate(zip(layers, values, strict=True)):
        parts.append(
            f'<text class="faint" x="{MARGIN - 6}" y="{row * CELL + CELL - 4}" text-anchor="end">{layer}</text>'
            if row % choose_stride(len(layers)) == 0
            else ""
        )
        for column, (head, share) in enumerate(zip(heads, line, strict=True)):
            red, green, blue = shade(share)
            parts.append(
                f'<rect x="{MARGIN + column * CELL}" y="{row * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
                f'fill="rgb({red}, {green}, {blue})"><title>head {layer}.{head}: {share:.4f}</title></rect>'
            )
    for column in range(0, len(heads), choose_stride(len(heads))):
        x = MARGIN + (column + 0.5) * CELL
        parts.append(f'<text class="faint" x="{x}" y="{height - 2}" text-anchor="middle">{heads[column]}</text>')
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(parts)}</svg>'


def choose_stride(count: int) -> int:
    """Choose every how many rows or columns a number is written."""
    return -(-count // 16)
