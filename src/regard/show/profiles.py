"""Entropy and distance of heads, how widely and how far back they attend, along the text and from layer to layer."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regard.map import AttentionMap
from regard.observe import Recording
from regard.observe.map_view import MapView
from regard.show.figure import DASHES, FAINT, INKS, TEXT_SIZE, Array, Picture, style_axes
from regard.show.number_format import format_count

BINS = 128  # points of a curve along a text
MAX_NAMED = 4  # heads that are colored and named
UNITS = {"entropy": "entropy, nats", "distance": "distance, tokens back"}


def draw_profiles(
    recording: Recording,
    layer: int | str,
    *,
    heads: Sequence[int] | None = None,
    kind: str = "self",
    part: str | None = None,
    row: int = 0,
    title: str | None = None,
) -> Picture:
    """Draw entropy and mean distance of each query along the text, a curve per head, as means of bins where tokens are many.

    The `heads` are colored and numbered, the others are pale; by default the four of the lowest entropy. Raises
    OutOfRangeError for a head that was not recorded.
    """
    m, numbers = recording.map(layer, kind=kind, part=part).select(batch=row), recording.heads(layer, kind=kind, part=part)
    found = compute_statistics(m, kind)
    for head in heads or ():
        recording.map(layer, head, kind=kind, part=part)  # raises an error for one that was not recorded
    lowest = np.argsort(compute_means(found["entropy"]))[:MAX_NAMED]
    shown = lowest.tolist() if heads is None else [numbers.index(head) if head in numbers else head for head in heads]
    chosen = [numbers[place] for place in shown]
    picture = Picture(figsize=(6.4, 4.2), layout="constrained")
    panels = picture.subplots(2, 1, sharex=True)
    name = f"layer {layer}, {format_count(m.shape[1], 'head')}" if title is None else title
    for n, (axes, (statistic, values)) in enumerate(zip(panels, found.items(), strict=True)):
        style_axes(axes, name if n == 0 else "", ("query" if n else "", UNITS[statistic]))
        places, means = compute_bin_means(values)
        for head, mean in zip(numbers, means, strict=True):
            if head not in chosen:
                axes.plot(places, mean, color=FAINT, linewidth=0.7)
        for rank, head in enumerate(chosen):
            ink, dash = INKS[rank % len(INKS)], DASHES[rank % len(DASHES)]
            axes.plot(places, means[numbers.index(head)], color=ink, linestyle=dash, linewidth=1.4, label=f"{head}")
        axes.set_ylim(bottom=0)
    panels[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=TEXT_SIZE, title="head")
    format_integer_axis(panels[1])
    return picture


def draw_layer_profiles(
    recording: Recording, *, kind: str = "self", part: str | None = None, row: int = 0, title: str = ""
) -> Picture:
    """Draw mean entropy and mean distance of every head by layer: a dot per head, a line through the means of the layers."""
    layers = range(len(recording.layers(kind=kind, part=part)))
    found = [compute_statistics(recording.map(layer, kind=kind, part=part).select(batch=row), kind) for layer in layers]
    picture = Picture(figsize=(6.4, 4.2), layout="constrained")
    panels = picture.subplots(2, 1, sharex=True)
    for n, (axes, statistic) in enumerate(zip(panels, UNITS, strict=True)):
        style_axes(axes, title if n == 0 else "", ("layer" if n else "", UNITS[statistic]))
        means = [compute_means(one[statistic]) for one in found]
        for layer, heads in enumerate(means):
            axes.plot([layer] * len(heads), heads, "o", color=INKS[1], markersize=3.5, alpha=0.55, markeredgewidth=0)
        axes.plot(layers, [heads.mean() for heads in means], color=INKS[0], linewidth=1.2)
        axes.set_ylim(bottom=0)
    format_integer_axis(panels[1])
    return picture


def compute_statistics(m: AttentionMap, kind: str) -> Mapping[str, Array]:
    """Compute entropy and distance of each query (h, q) of a map of one batch row; NaN of those on padding."""
    look = MapView(m, own=kind == "self")
    seen, padding = look.statistics, ~look.is_counted
    found = {"entropy": seen.entropy, "distance": seen.distance}
    return {name: values.double().masked_fill(padding, math.nan)[0].cpu().numpy() for name, values in found.items()}


def compute_means(values: Array) -> Array:
    """Compute the mean of each head (h,) over its queries, but for those that are NaN."""
    means: Array = np.nansum(values, 1) / (~np.isnan(values)).sum(1)
    return means


def compute_bin_means(values: Array) -> tuple[Array, Array]:
    """Compute the middle of each bin along a text, and the mean in it of what is not NaN, (h, bins); NaN if nothing is."""
    edges = np.linspace(0, values.shape[1], min(BINS, values.shape[1]) + 1).astype(int)
    counts = np.add.reduceat(~np.isnan(values), edges[:-1], 1, dtype=int)
    sums = np.add.reduceat(np.nan_to_num(values), edges[:-1], 1)
    means: Array = np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)
    return (edges[:-1] + edges[1:] - 1) / 2, means


def format_integer_axis(axes: Axes) -> None:
    """Format whole numbers along the lower axis."""
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
