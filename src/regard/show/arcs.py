"""Arc diagrams of one head: an arc from each query to each key it attends to, colored and thick by the weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.patches import Arc

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording
from regard.show.axis_words import get_axis_words
from regard.show.color_scale import Signed
from regard.show.figure import (
    COLORMAP,
    FAINT,
    LINE_HEIGHT,
    POINTS_PER_INCH,
    SIGNED_COLORMAP,
    TEXT_SIZE,
    Array,
    Picture,
    format_word,
    measure_widest,
)
from regard.show.head_figure import resolve_slice

MAX_WORDS = 60  # maximum number of words on the line
MIN_WEIGHT = 0.05  # smallest weight that is drawn
# maximum inches of unrotated words; height of an arc by its half width; line width of weight 1 in points
MAX_WIDTH, HEIGHT_RATIO, LINE_WIDTH = 7.0, 0.5, 3.0


def draw_arcs(
    recording: Recording,
    layer: int | str,
    head: int,
    *,
    queries: slice = slice(None),
    keys: slice = slice(None),
    least: float = MIN_WEIGHT,
    kind: str = "self",
    part: str | None = None,
    row: int = 0,
    title: str | None = None,
) -> Picture:
    """Draw the weights of a head as arcs over at most 60 tokens: to earlier keys above the words, to later keys below.

    A dot under a token is its weight on itself. `queries=slice(7, 8)` draws the row of one token, `keys=slice(1, None)` leaves
    out the first token. Weights below `least` are not drawn, which the picture states. Colors are logarithmic. Entries of
    kind="implicit" are signed, blue above 0 and brown below, and of any size: then `least` is a part of the largest of those
    selected. Raises ConfigError where the map is not square or the tokens are more than 60.
    """
    m: AttentionMap | ImplicitMap = recording.map(layer, head, kind, part).select(batch=row)
    q, k = m.shape[2:]
    if q != k:
        raise ConfigError(f"arcs need one text with as many queries as keys, got {q} queries and {k} keys: use figure instead.")
    rows, columns = resolve_slice(queries, q, "queries"), resolve_slice(keys, k, "keys")
    first, end = min(rows[0], columns[0]), max(rows[1], columns[1])
    if end - first > MAX_WORDS:
        raise ConfigError(
            f"arcs can show at most {MAX_WORDS} tokens, got {end - first}: select some, e.g. queries=slice(0, 30)."
        )
    words = [
        format_word(word.strip(" ") or word) for word in get_axis_words(recording, layer, kind, part, row, (q, k))[1][first:end]
    ]
    weights = m[0, 0, slice(*rows), slice(*columns)].double().cpu().numpy()
    places, upright = place_words(words)
    name = f"layer {layer}, head {head}" if title is None else title
    if isinstance(m, ImplicitMap):
        ends = Signed().ends(weights.ravel().tolist())
        found = list_links(weights, rows[0] - first, columns[0] - first, least * ends[1])
        look = ArcLook(Normalize(*ends), SIGNED_COLORMAP, ends[1], (ends[1], ends[0]))
        note = f"entries of at least {least:g} of the largest in size, blue above 0, brown below; a dot is a token's own entry"
        return draw_links(words, places, upright, found, name, note, look)
    found = list_links(weights, rows[0] - first, columns[0] - first, least)
    look = ArcLook(LogNorm(min([MIN_WEIGHT, *(weight for weight, _, _ in found)]), 1), COLORMAP, 1, (1.0, 0.3, 0.1))
    note = f"weights of at least {least:g}; a dot is a token's weight on itself"
    return draw_links(words, places, upright, found, name, note, look)


Link = tuple[float, int, int]  # weight, query, key


@dataclass(frozen=True)
class ArcLook:
    """How the arc of a weight looks: its color, the weight of the widest line, and the weights of the legend."""

    norm: Normalize
    colors: Colormap
    high: float
    legend: tuple[float, ...]

    def get_color(self, weight: float) -> tuple[float, float, float, float]:
        """Return the color of a weight."""
        return self.colors(float(self.norm(weight)))

    def get_strength(self, weight: float) -> float:
        """Return the size of a weight as a part of that of the widest line."""
        return abs(weight) / self.high


def list_links(weights: Array, query: int, key: int, least: float) -> list[Link]:
    """List the weights of at least `least` in size with query and key, the strongest last, so that it is drawn on top."""
    found = ((float(weight), i + query, j + key) for (i, j), weight in np.ndenumerate(weights) if abs(weight) >= least)
    return sorted(found, key=lambda link: (abs(link[0]), *link[1:]))


def place_words(words: Sequence[str]) -> tuple[Array, bool]:
    """Return the middle of each word in inches, as in a line of text, and whether the words are rotated, being too wide."""
    widths = np.array([measure_widest([word]) for word in words]) + 0.09
    if widths.sum() <= MAX_WIDTH:
        return np.cumsum(widths) - widths / 2, False
    return (np.arange(len(words)) + 0.5) * LINE_HEIGHT * TEXT_SIZE / POINTS_PER_INCH, True


def draw_links(
    words: Sequence[str], places: Array, upright: bool, found: Sequence[Link], title: str, note: str, look: ArcLook
) -> Picture:
    """Draw the words on a line, and the arcs above and below it."""
    back, ahead = (
        max((sign * (places[i] - places[j]) * HEIGHT_RATIO / 2 for _, i, j in found), default=0.0) for sign in (1, -1)
    )
    high = (measure_widest(words) if upright else LINE_HEIGHT * TEXT_SIZE / POINTS_PER_INCH) + 0.16
    dots = 0.16  # inches between the line and the words
    width = float(places[-1]) + measure_widest([words[-1]]) / 2 + 0.25 + 0.75
    above, below = max(back, 0.0) + 0.55, high + dots + max(ahead, 0.0) + 0.3
    width = max(width, measure_widest([title]) * 1.2 + 0.3, measure_widest([note]) + 0.3)
    picture = Picture(figsize=(width, above + below))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.15, width - 0.15), ylim=(-below, above))
    axes.axis("off")
    for place, word in zip(places, words, strict=True):
        style = {"ha": "center", "va": "top", "fontsize": TEXT_SIZE, "parse_math": False, "rotation": 90 if upright else 0}
        axes.text(place, -dots, word, **style)  # type: ignore[arg-type]
    for weight, i, j in found:
        color, strength = look.get_color(weight), look.get_strength(weight)
        if i == j:
            edge = {"markeredgecolor": FAINT, "markeredgewidth": 0.3}
            axes.plot(places[i], -dots / 2, "o", color=color, markersize=2 + 3 * strength, **edge)  # type: ignore[arg-type]
            continue
        middle, wide = (places[i] + places[j]) / 2, abs(places[i] - places[j])
        base, ends = (0.0, (0, 180)) if i > j else (-dots - high + 0.1, (180, 360))
        axes.add_patch(
            Arc(
                (middle, base),
                wide,
                wide * HEIGHT_RATIO,
                theta1=ends[0],
                theta2=ends[1],
                color=color,
                linewidth=0.4 + LINE_WIDTH * strength,
            )
        )
    axes.text(0, above - 0.06, title, fontsize=TEXT_SIZE + 1, va="top", parse_math=False)
    axes.text(0, -below + 0.06, note, fontsize=TEXT_SIZE - 2, va="bottom", color="#6b6b66", parse_math=False)
    draw_legend(axes, look, width - 0.95, above - 0.12)
    return picture


def draw_legend(axes: Axes, look: ArcLook, x: float, y: float) -> None:
    """Draw the legend of colors and line widths."""
    for n, weight in enumerate(look.legend):
        width = 0.4 + LINE_WIDTH * look.get_strength(weight)
        axes.plot((x, x + 0.3), (y - 0.14 * n,) * 2, color=look.get_color(weight), linewidth=width)
        axes.text(x + 0.37, y - 0.14 * n, f"{weight:.2g}".replace("-", "−"), fontsize=TEXT_SIZE - 2, va="center")
