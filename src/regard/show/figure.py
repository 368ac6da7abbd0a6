"""Matplotlib figures of attention: a matrix, every step, every head, vectors as arrows, curves.

A notebook displays a figure at the end of a cell, and `figure.savefig("weights.pdf")` or `.svg` writes it as vectors. Nothing
here touches pyplot, its state or rcParams.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import FuncNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator
from PIL import Image
from torch import Tensor

from regard.errors import ShapeError
from regard.mechanism import Steps
from regard.show.color_ramp import choose_ink, shade, shade_signed
from regard.show.color_scale import ColorScale, LinearScale, Log, Scale, Signed, SignedLog, invert_signed_log, share_signed_log
from regard.show.step_descriptions import make_titles
from regard.show.terminal import escape_text

Array = npt.NDArray[np.float64]

COLORMAP = ListedColormap([[part / 255 for part in shade(n / 255)] for n in range(256)])
SIGNED_SHADES = 257  # odd, so that the one in the middle is that of 0
SIGNED_COLORMAP = ListedColormap(
    [[part / 255 for part in shade_signed(2 * n / (SIGNED_SHADES - 1) - 1)] for n in range(SIGNED_SHADES)]
)
INKS, DASHES, MARKERS = ("#302f4e", "#0a75af", "#c2571a", "#7a9a01"), ("-", "--", "-.", ":"), "osD^"  # of curves and arrows
PAPER, FAINT = "#f6f6f4", "#b0b0aa"
HATCHES = (("////", "hidden (−∞)", np.isneginf), ("xxxx", "NaN or ∞", lambda values: np.isnan(values) | np.isposinf(values)))
# text size and smallest readable size, in points; line height in text sizes
TEXT_SIZE, MIN_TEXT_SIZE, LINE_HEIGHT = 9.0, 5.5, 1.25
POINTS_PER_INCH = 72  # points in an inch
LINEAR, LINEAR_FROM_ZERO = LinearScale(), LinearScale(low=0)


class Picture(Figure):
    """A matplotlib figure that a notebook displays without pyplot."""

    def add_axes_at(self, x: float, y: float, w: float, h: float) -> Axes:
        """Add axes of a width and height, their lower left corner at (x, y), all in inches."""
        width, height = self.get_size_inches()
        return self.add_axes((x / width, y / height, w / width, h / height))

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        png, small_png, dots = BytesIO(), BytesIO(), 144
        self.savefig(png, format="png", dpi=dots, bbox_inches="tight")
        picture = Image.open(png).convert("RGB").quantize(256, kmeans=2)  # a third of the bytes, which the notebook stores
        picture.save(small_png, format="png", optimize=True)
        return small_png.getvalue(), {"width": picture.width * 96 // dots}


@dataclass(frozen=True)
class Panel:
    """One matrix on a sheet: its values, the words of its axes, and the space it may take in inches."""

    values: Array
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    names: tuple[str, str] = ("", "")
    scale: ColorScale = LINEAR
    room: float = 8.5

    @property
    def cell(self) -> tuple[float, float]:
        """Width and height of a cell in inches."""
        rows, columns = self.values.shape
        return min(0.6, self.room / columns), min(0.5, self.room / rows)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the matrix in inches."""
        (rows, columns), (width, height) = self.values.shape, self.cell
        return columns * width, rows * height

    @property
    def has_rotated_words(self) -> bool:
        """Return whether the column words are rotated, too long to lie side by side."""
        return measure_widest(self.columns) > 0.9 * self.cell[0]

    @property
    def left(self) -> float:
        """Inches that the row words take."""
        return measure_widest(self.rows) + 0.1 + 0.25 * bool(self.names[0])

    @property
    def above(self) -> float:
        """Inches that the column words and the title take."""
        return (measure_widest(self.columns) if self.has_rotated_words else 0.14) + 0.35 + 0.2 * bool(self.names[1])

    @property
    def right(self) -> float:
        """Inches from the left edge of the matrix to the right edge of its color bar, or of its title."""
        return max(self.size[0] + 0.85, 1.15 * measure_widest([self.title]) + 0.1 * bool(self.title))

    @property
    def below(self) -> float:
        """Inches from the upper edge of the matrix to what follows below it; a low panel has its color bar there."""
        return self.size[1] + (0.6 if self.is_low else 0.15)

    @property
    def is_low(self) -> bool:
        """Return whether the panel is too low to have its color bar beside it."""
        return self.size[1] < 1.2


def draw_matrix(
    matrix: Tensor,
    rows: Sequence[str],
    columns: Sequence[str] | None = None,
    *,
    title: str = "",
    names: tuple[str, str] = ("", ""),
    scale: ColorScale = LINEAR,
) -> Picture:
    """Draw a matrix (rows, columns) as colors, with words on both axes and its numbers where they fit.

    `columns` is by default the same as `rows`; `names` are the names of the row and the column axis. -inf is hatched, NaN and
    inf are cross-hatched. With scale=Signed(), for pull and cut, numbers above 0 are blue, those below brown, and 0 is white.
    Raises ShapeError where words and matrix disagree.
    """
    return draw_sheet([make_panel(matrix, rows, columns, title=title, names=names, scale=scale)])


def draw_steps(steps: Steps, words: Sequence[str], keys: Sequence[str] | None = None, *, at: tuple[int, ...] = ()) -> Picture:
    """Draw every step that changed something, with its formula as title; the other steps are named below.

    `words` are those of the queries, and of the keys if `keys` is None. `at` selects the batch row and the head of steps that
    have these axes. What is hidden from a query is hatched, in the weights too.
    """
    one = Steps(*(select_matrix(step.detach(), at) for _, step in steps.items()))
    hidden, titles, panels = one.masked == -torch.inf, make_titles(one), []
    for name, title in titles.items():
        step, weighs = getattr(one, name), name in ("weights", "dropped")
        columns = [str(n + 1) for n in range(step.shape[-1])] if name == "context" else keys or words
        names = ("query", "" if name == "context" else "key")
        values = step.masked_fill(hidden, -torch.inf) if weighs else step
        scale = LINEAR_FROM_ZERO if weighs else LINEAR
        panels.append(make_panel(values, words, columns, title=title, names=names, scale=scale, room=4.2))
    idle = [name for name, _ in one.items() if name not in titles]
    note = f"not drawn, because nothing changed there: {', '.join(idle)}" if idle else ""
    return draw_sheet(panels, across=2, note=note)


def draw_heads(
    steps: Steps,
    words: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    at: tuple[int, ...] = (),
    scale: Scale = LINEAR_FROM_ZERO,
) -> Picture:
    """Draw the weights of every head (h, q, k), a panel each, with one color scale. `at` selects the batch row.

    Raises ShapeError where the weights have other axes.
    """
    weights, hidden = steps.weights.detach()[at], steps.masked[at] == -torch.inf
    if weights.dim() != 3 or not len(weights):
        raise ShapeError(f"the weights must have the axes (h, q, k), got {tuple(weights.shape)}; `at` selects the batch row.")
    common = type(scale)(*scale.ends(weights.flatten().tolist()))
    across = 2 if len(weights) <= 4 else 3 if len(weights) <= 9 else 4
    values, panels = weights.masked_fill(hidden, -torch.inf), []
    for n, head in enumerate(values):
        first, top = n % across == 0, n < across  # the others are aligned with these and need no words
        one = make_panel(head, words, keys, title=f"head {n}", scale=common, room=(4.2, 2.9, 2.2)[across - 2])
        edge = {} if first else {"rows": [""] * len(one.rows)}
        edge |= {} if top else {"columns": [""] * len(one.columns)}
        panels.append(Panel(**{**vars(one), **edge, "names": ("query" if first else "", "key" if top else "")}))
    return draw_sheet(panels, across=across, shared=True)


def draw_arrows(vectors: Tensor, words: Sequence[str], *, title: str = "", kinds: Sequence[str] | None = None) -> Picture:
    """Draw vectors (n, 2) as arrows from the origin, each labeled with its word; `kinds`, one per vector, set the colors.

    Raises ShapeError where vectors and words disagree.
    """
    tips = convert_to_array(vectors)
    if tips.shape != (len(words), 2) or not len(words):
        raise ShapeError(f"arrows need vectors of shape (n, 2) and n words, got {tips.shape} and {len(words)} words.")
    kinds = kinds or [""] * len(words)
    inks = dict(zip(dict.fromkeys(kinds), INKS * len(kinds), strict=False))
    figure = Picture(figsize=(5.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes, title, ("", ""))
    axes.grid(color="#e4e4e0", linewidth=0.6)
    low = np.minimum(tips.min(0), 0)
    span = (np.maximum(tips.max(0), 0) - low).max() or 1
    axes.set(xlim=(low[0] - span / 20, low[0] + 1.05 * span), ylim=(low[1] - span / 20, low[1] + 1.05 * span), aspect="equal")
    for (x, y), kind in zip(tips, kinds, strict=True):
        look = {"arrowstyle": "-|>", "color": inks[kind], "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x, y), (0, 0), arrowprops=look)
    label_points(axes, tips, words, [inks[kind] for kind in kinds])
    if len(inks) > 1:
        marks = [Patch(color=colour, label=kind) for kind, colour in inks.items()]
        figure.legend(handles=marks, loc="outside lower left", frameon=False, fontsize=TEXT_SIZE, ncols=len(marks))
    return figure


def draw_lines(
    x: Sequence[float],
    series: Mapping[str, Tensor | Sequence[float]],
    *,
    title: str = "",
    names: tuple[str, str] = ("", ""),
    scales: tuple[Scale, Scale] = (LINEAR, LINEAR),
) -> Picture:
    """Draw one curve for each of the series over the same x, labeled at its end; `names` and `scales` are those of x and y.

    Raises ShapeError where a series does not have one value for each x.
    """
    curves = [convert_to_array(values) for values in series.values()]
    for word, curve in zip(series, curves, strict=True):
        if curve.shape != (len(x),) or not len(x):
            raise ShapeError(f"{word!r} must have one value for each of the {len(x)} values of x, got {curve.shape}.")
    figure = Picture(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes, title, names)
    for n, curve in enumerate(curves):
        axes.plot(x, curve, color=INKS[n % 4], linestyle=DASHES[n % 4], marker=MARKERS[n % 4], markersize=4)
    axes.set_xscale("log" if isinstance(scales[0], Log) else "linear")
    axes.set_yscale("log" if isinstance(scales[1], Log) else "linear")
    axes.set(xlim=(scales[0].low, scales[0].high), ylim=(scales[1].low, scales[1].high))
    ticks = x[:: math.ceil(len(x) / 8)]
    axes.set_xticks(ticks, labels=[f"{place:g}" for place in ticks])
    axes.minorticks_off()
    last = np.array([(x[-1], curve[-1]) for curve in curves]).reshape(-1, 2)
    label_points(axes, last, list(series), [INKS[n % 4] for n in range(len(curves))])
    return figure


def make_panel(matrix: Tensor, rows: Sequence[str], columns: Sequence[str] | None, **settings: Any) -> Panel:
    """Make a panel of a matrix and its words. Raises ShapeError where they disagree or the matrix is empty."""
    values, columns = convert_to_array(matrix), rows if columns is None else columns
    if values.ndim != 2 or not values.size:
        raise ShapeError(f"the matrix must have the axes (rows, columns) and at least one entry, got {values.shape}.")
    if values.shape != (len(rows), len(columns)):
        raise ShapeError(
            f"the matrix has the shape {values.shape}, but there are words for {len(rows)} rows and {len(columns)} columns."
        )
    return Panel(values, [format_word(word) for word in rows], [format_word(word) for word in columns], **settings)


def draw_sheet(panels: Sequence[Panel], *, across: int = 1, shared: bool = False, note: str = "") -> Picture:
    """Draw panels in rows of `across` with a legend of the hatches, and a color bar for each or, if `shared`, the first row."""
    marks = [
        Patch(facecolor=PAPER, edgecolor=FAINT, hatch=hatch, linewidth=0, label=meaning)
        for hatch, meaning, find_cells in HATCHES
        if any(find_cells(one.values).any() for one in panels)
    ]
    marks += [Patch(alpha=0, label=note)] if note else []
    columns = [panels[n::across] for n in range(min(across, len(panels)))]
    lines = [panels[n : n + across] for n in range(0, len(panels), across)]
    lefts, rights = ([max(getattr(one, edge) for one in column) for column in columns] for edge in ("left", "right"))
    aboves, belows = ([max(getattr(one, edge) for one in line) for line in lines] for edge in ("above", "below"))
    legend = sum(measure_widest([str(mark.get_label())]) + 0.7 for mark in marks)
    width, height = max(sum(lefts + rights), legend), sum(aboves + belows) + 0.35 * bool(marks)
    figure = Picture(figsize=(width, height))
    for n, one in enumerate(panels):
        line, column = divmod(n, across)
        x, y = sum(lefts[: column + 1] + rights[:column]), sum(aboves[: line + 1] + belows[:line])  # of the upper left corner
        (w, h) = one.size
        axes = figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))
        mesh = draw_panel(axes, one)
        if not shared or n == len(columns) - 1:
            draw_color_bar(axes, one, mesh)
    if marks:
        figure.legend(handles=marks, loc="lower left", frameon=False, fontsize=TEXT_SIZE, ncols=len(marks), borderaxespad=0.3)
    return figure


def draw_panel(axes: Axes, one: Panel) -> QuadMesh:
    """Draw the cells of a panel, its words, and its numbers where they are readable."""
    is_small, finite = max(one.values.shape) <= 24, np.isfinite(one.values)
    mesh = axes.pcolormesh(
        np.ma.masked_where(~finite, one.values),
        cmap=SIGNED_COLORMAP if isinstance(one.scale, Signed) else COLORMAP,
        norm=make_norm(one.scale, one.values),
        edgecolors="white" if is_small else "face",
        linewidth=1 if is_small else 0.1,
        rasterized=one.values.size > 20_000,  # one vector per cell would make the file slow to open
    )
    for hatch, _, find_cells in HATCHES:
        for row, line in enumerate(find_cells(one.values)):
            for start, stop in np.flatnonzero(np.diff(line, prepend=False, append=False)).reshape(-1, 2):
                look = Rectangle((start, row), stop - start, 1, hatch=hatch, facecolor=PAPER, edgecolor=FAINT, linewidth=0)
                axes.add_patch(look)
    write_numbers(axes, one, mesh)
    axes.invert_yaxis()
    style_axes(axes, one.title, (one.names[1], one.names[0]))
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    label_axis(axes.xaxis, one.columns, one.cell[0], upright=one.has_rotated_words)
    label_axis(axes.yaxis, one.rows, one.cell[1])
    axes.spines[:].set_visible(False)
    return mesh


def make_norm(scale: ColorScale, values: Array) -> Normalize:
    """Return matplotlib's form of a scale for some values."""
    ends = scale.ends(values.ravel().tolist())
    if isinstance(scale, SignedLog):
        share, invert = (partial(one, high=ends[1]) for one in (share_signed_log, invert_signed_log))
        return FuncNorm((share, invert), *ends, clip=True)
    return (LogNorm if isinstance(scale, Log) else Normalize)(*ends, clip=True)


def draw_color_bar(axes: Axes, one: Panel, mesh: QuadMesh) -> None:
    """Draw the color bar of a panel with its numbers: at the right, or below a low panel."""
    width, height = one.size
    place = (0, -0.25 / height, 1, 0.1 / height) if one.is_low else (1 + 0.15 / width, 0, 0.12 / width, 1)
    bar = axes.figure.colorbar(mesh, cax=axes.inset_axes(place), orientation="horizontal" if one.is_low else "vertical")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT)
    low, high = mesh.get_clim()
    if isinstance(one.scale, Log) and low and high and high < 1000 * low:  # powers of ten alone would be too few
        bar.set_ticks(LogLocator(subs=(1, 3)))
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.minorticks_off()


def write_numbers(axes: Axes, one: Panel, mesh: QuadMesh) -> None:
    """Write the numbers of a panel into its cells, dark on light and light on dark, unless they would be too small to read."""
    top = np.abs(one.values[np.isfinite(one.values)]).max(initial=0)
    form = ".1g" if isinstance(one.scale, Log) or 0 < top < 0.05 else "z.2f" if top < 100 else "z.0f" if top < 1e5 else ".0e"
    if max(one.values.shape) > 60:
        return  # unreadable, and slow to measure
    for each in (".2g", form) if form == ".1g" else (form,):  # a second digit where it fits
        cells = [(place, format(value, each)) for place, value in np.ndenumerate(one.values) if np.isfinite(value)]
        widest = measure_widest([text for _, text in cells]) * POINTS_PER_INCH / TEXT_SIZE  # in text sizes
        size = min(TEXT_SIZE, 0.9 * one.cell[0] * POINTS_PER_INCH / (widest or 1), 0.7 * one.cell[1] * POINTS_PER_INCH)
        if size == TEXT_SIZE:
            break
    if size < MIN_TEXT_SIZE:
        return
    colours = mesh.to_rgba(np.nan_to_num(one.values))
    for (row, column), text in cells:
        red, green, blue = (round(255 * part) for part in colours[row, column, :3])
        look: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "color": [part / 255 for part in choose_ink((red, green, blue))],
        }
        axes.text(column + 0.5, row + 0.5, text.replace("-", "−"), fontsize=size, **look)


def label_axis(axis: Axis, words: Sequence[str], room: float, *, upright: bool | None = None) -> None:
    """Label an axis with words that have `room` inches each: smaller where that is little, skipping some where it is less.

    Words that lie side by side (`upright` False) are known to fit.
    """
    points = math.inf if upright is False else room * POINTS_PER_INCH
    step = 1 if points == math.inf else math.ceil(MIN_TEXT_SIZE * LINE_HEIGHT / points)
    places = range(0, len(words), step)
    axis.set_ticks([place + 0.5 for place in places], labels=[words[place] for place in places])
    for text in axis.get_ticklabels():
        text.set(fontsize=min(TEXT_SIZE, step * points / LINE_HEIGHT), rotation=90 if upright else 0, parse_math=False)


def style_axes(axes: Axes, title: str, names: tuple[str, str]) -> None:
    """Set what all pictures share: a title at the left, names of the axes, no box."""
    axes.set_title(title, fontsize=TEXT_SIZE + 1, loc="left", parse_math=False)
    axes.set_xlabel(names[0], fontsize=TEXT_SIZE)
    axes.set_ylabel(names[1], fontsize=TEXT_SIZE)
    axes.tick_params(labelsize=TEXT_SIZE - 1, color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def label_points(axes: Axes, points: Array, words: Sequence[str], inks: Sequence[str]) -> None:
    """Write words in a column right of the axes, each connected to its point, without overlap."""
    height = 3.4 * POINTS_PER_INCH  # approximate height of the axes of arrows and curves
    gap = min(LINE_HEIGHT * TEXT_SIZE / height, 1 / max(len(words) - 1, 1))
    heights = (axes.transData + axes.transAxes.inverted()).transform(points)[:, 1]
    heights = np.nan_to_num(heights, nan=0.0, posinf=1.0, neginf=0.0)
    below = -math.inf
    for rank, n in enumerate(np.argsort(heights, kind="stable")):
        below = heights[n] = max(min(heights[n], 1 - gap * (len(words) - 1 - rank)), below + gap)
    for point, word, colour, place in zip(points, words, inks, heights, strict=True):
        look: dict[str, Any] = {
            "color": colour,
            "fontsize": min(TEXT_SIZE, gap * height / LINE_HEIGHT),
            "va": "center",
            "parse_math": False,
        }
        lead = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2}
        spot: dict[str, Any] = {"xytext": (1.05, place), "textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate(format_word(word), (point[0], point[1]), arrowprops=lead, **spot, **look)


def select_matrix(step: Tensor, at: tuple[int, ...]) -> Tensor:
    """Return the matrix (q, k) of one batch row and head. Raises ShapeError where `at` does not leave a matrix."""
    if step.dim() - len(at) != 2:
        first = ", ".join("0" for _ in step.shape[:-2])
        raise ShapeError(
            f"at must select one matrix of a step of shape {tuple(step.shape)}, got at={at}: "
            f"at=({first}{',' * (first == '0')}) selects the first."
        )
    return step[at]


def convert_to_array(values: Tensor | Sequence[float]) -> Array:
    """Convert values to a float64 NumPy array, detached from torch."""
    array: Array = torch.as_tensor(values).detach().double().cpu().numpy()
    return array


def format_word(word: str) -> str:
    """Format a word as a label: escape control characters, make blanks visible, cut at 18 characters.

    A word that would not be seen at all, such as a direction mark, is written as escapes.
    """
    shown = escape_text(word) if word.strip(" ") else "␣" * len(word)
    if not any(letter.isprintable() for letter in shown.strip(" ")):
        shown = shown.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= 18 else shown[:17] + "…"


def measure_widest(words: Sequence[str]) -> float:
    """Compute the width of the widest word in inches."""
    look = FontProperties(size=TEXT_SIZE)
    return (
        max((text_to_path.get_text_width_height_descent(word, look, False)[0] for word in words), default=0) / POINTS_PER_INCH
    )
