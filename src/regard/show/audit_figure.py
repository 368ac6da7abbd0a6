"""Figures of an audit: recall by budget, and recall of every layer and head as heat maps."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from regard.errors import ConfigError
from regard.policy_audit import Audit
from regard.show.figure import DASHES, INKS, TEXT_SIZE, Picture, style_axes

COLUMNS = 3  # heat maps side by side


def draw_recall_curves(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str = "") -> Picture:
    """Draw recall against the share of the keys that is used, a curve for each policy: its points (share, recall).

    Raises ConfigError without curves.
    """
    if not curves or not all(curves.values()):
        raise ConfigError("curves must have at least one policy, each with points (share of the keys, recall).")
    picture = Picture(figsize=(6.4, 4.0), layout="constrained")
    axes: Axes = picture.subplots()
    style_axes(axes, title, ("keys that are used", "recall of the attention"))
    for n, (name, points) in enumerate(curves.items()):
        places, shares = zip(*sorted(points), strict=True)
        axes.plot(
            places,
            shares,
            color=INKS[n % len(INKS)],
            linestyle=DASHES[n // len(INKS) % len(DASHES)],
            marker="o",
            markersize=3,
            linewidth=1.4,
            label=name,
        )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=TEXT_SIZE)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return picture


def draw_recall_grids(audit: Audit, *, part: str = "generated") -> Picture:
    """Draw the mean recall of every layer and head as a heat map for each policy, on one scale from 0 to 1."""
    means = audit.recall[..., audit.select_rows(part)].double().mean((2, 4)).cpu().numpy()  # (policy, layer, h)
    columns = min(COLUMNS, len(means))
    rows = -(-len(means) // columns)
    picture = Picture(figsize=(1.2 + 2.2 * columns, 0.4 + 2.6 * rows), layout="constrained")
    panels = np.atleast_1d(picture.subplots(rows, columns, squeeze=False).ravel())
    for axes, label, values in zip(panels, audit.labels, means, strict=False):
        style_axes(axes, label, ("head", "layer"))
        mesh = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        for axis, numbers in ((axes.xaxis, audit.heads), (axes.yaxis, audit.layers)):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axis.set_major_formatter(FuncFormatter(partial(format_number_of, numbers)))
    for axes in panels[len(means) :]:
        axes.set_visible(False)
    bar = picture.colorbar(mesh, ax=panels.tolist(), shrink=0.6, label="recall")
    bar.ax.tick_params(labelsize=TEXT_SIZE)
    return picture


def format_number_of(numbers: Sequence[int], place: float, _: int | None = None) -> str:
    """Return the number of the layer or head that is drawn at a place; empty where there is none."""
    return str(numbers[round(place)]) if 0 <= round(place) < len(numbers) else ""
