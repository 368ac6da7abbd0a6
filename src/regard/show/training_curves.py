"""Matplotlib figures of a training run: its losses, and how the scores of its heads develop."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from regard.atomic_write import write_atomically
from regard.errors import DataError
from regard.observe.classification.head_kinds import THRESHOLDS
from regard.show.figure import DASHES, FAINT, INKS, MARKERS, TEXT_SIZE, Array, Picture, label_points, style_axes

Row = Mapping[str, Any]  # a line of a run's log.jsonl or heads.jsonl
DETECTORS = (("previous token", "repeated"), ("induction", "repeated"), ("copying", "repeated"), ("first token", "text"))
MAX_NAMED = 3  # heads of a detector that are colored and named


def draw_training_curves(rows: Sequence[Row], title: str = "") -> Picture:
    """Draw loss, learning rate and gradient norm against the step from the rows of a log.

    The loss of each step is pale; its moving mean and the held-out loss are dark. A skipped batch is marked by a cross. Raises
    DataError where there are no rows.
    """
    if not rows:
        raise DataError("there are no rows to draw: rows must hold at least one step.")
    figure = Picture(figsize=(6.4, 6.0), layout="constrained")
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    steps = np.array([row["step"] for row in rows])
    losses = extract_field(rows, "loss_nats")
    style_axes(loss, title, ("", "loss, nats per token"))
    loss.plot(steps, losses, color=FAINT, linewidth=0.6)
    ends = {"trained on": (steps, smooth_curve(losses))}
    evaluations = [row for row in rows if row.get("held_out_nats") is not None]
    if evaluations:
        ends["held out"] = (np.array([row["step"] for row in evaluations]), extract_field(evaluations, "held_out_nats"))
    for n, (x, y) in enumerate(ends.values()):
        has_markers = len(x) <= 40 and n
        loss.plot(x, y, color=INKS[n + 1], linestyle=DASHES[n], marker=MARKERS[n] if has_markers else "", markersize=4)
    label_curves(loss, ends)
    skipped = [row for row in rows if row.get("skipped")]
    if skipped:
        bottom = np.full(len(skipped), 0.03)
        loss.plot([row["step"] for row in skipped], bottom, "x", color=INKS[0], transform=loss.get_xaxis_transform())
    style_axes(rate, "", ("", "rate"))
    rate.plot(steps, extract_field(rows, "rate"), color=INKS[0], linewidth=1)
    rate.set_ylim(bottom=0)
    style_axes(norm, "", ("step", "gradient norm"))
    norms = extract_field(rows, "gradient_norm")
    norm.plot(steps, norms, color=INKS[0], linewidth=0.6)
    if np.any(norms > 0):  # all are 0 for a text of one letter
        norm.set_yscale("log")
        norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        norm.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        norm.yaxis.set_minor_formatter(NullFormatter())
    format_step_axis(norm)
    return figure


def draw_head_formation(rows: Sequence[Row], title: str = "", detectors: Sequence[tuple[str, str]] = DETECTORS) -> Picture:
    """Draw the scores of every head against the step, a panel per detector and a line per head, from the rows of heads.jsonl.

    The heads that end highest are colored and named, layer.head, with the 95 % intervals that the rows hold and the step of
    find_formation_step, if there is one; the others are pale. A detector of which the rows hold no score has no panel. Raises
    DataError where there are no rows.
    """
    if not rows:
        raise DataError("there are no rows to draw: rows must hold at least one head.")
    detectors = [(name, on) for name, on in detectors if any(row["on"] == on and name in row for row in rows)] or detectors[:1]
    figure = Picture(figsize=(6.4, 0.4 + 2.1 * len(detectors)), layout="constrained")
    panels = figure.subplots(len(detectors), 1, sharex=True, squeeze=False)[:, 0]
    for n, (axes, (detector, on)) in enumerate(zip(panels, detectors, strict=True)):
        style_axes(axes, title if n == 0 else "", ("step" if n == len(detectors) - 1 else "", detector))
        shown = [row for row in rows if row["on"] == on and row.get(detector) is not None]
        if detector != "copying":  # in logits; the others are shares
            axes.set_ylim(0, 1.02)
        lines = group_by_head(shown, detector)
        best = sorted(lines, key=lambda head: -lines[head][1][-1])[:MAX_NAMED]
        for head, (x, y) in lines.items():
            if head not in best:
                axes.plot(x, y, color=FAINT, linewidth=0.8)
        for rank, head in enumerate(best):
            step = find_formation_step([row for row in shown if f"{row['layer']}.{row['head']}" == head], detector)
            label = head if step is None else f"{head}, step {step:,}"
            axes.plot(*lines[head], color=INKS[rank], linestyle=DASHES[rank], linewidth=1.6, label=label)
            low, high = (group_by_head(shown, f"{detector} {end}")[head][1] for end in ("low", "high"))
            axes.fill_between(lines[head][0], low, high, color=INKS[rank], alpha=0.15, linewidth=0)
        if best:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=TEXT_SIZE, title="head")
    format_step_axis(panels[-1])
    return figure


def find_formation_step(rows: Sequence[Row], detector: str) -> int | None:
    """Find the first observed step from which on the 95 % interval of a head's score lies above the threshold that names it.

    The threshold of copying is 0, that of the others as in regard.heads. None if the last interval does not lie above it.
    """
    found = None
    for row in reversed(rows):
        if not row.get(f"{detector} low", -np.inf) > THRESHOLDS.get(detector, 0.0):
            break
        found = int(row["step"])
    return found


def group_by_head(rows: Sequence[Row], detector: str) -> dict[str, tuple[Array, Array]]:
    """Return the steps and scores of each head, by its name layer.head."""
    heads = sorted({(row["layer"], row["head"]) for row in rows})
    found = {}
    for layer, head in heads:
        its = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
        found[f"{layer}.{head}"] = np.array([float(row["step"]) for row in its]), extract_field(its, detector)
    return found


def label_curves(axes: Axes, ends: Mapping[str, tuple[Array, Array]]) -> None:
    """Label each curve at its end."""
    visible_ends = {name: (x, y) for name, (x, y) in ends.items() if len(x) and np.isfinite(y[-1])}
    if visible_ends:
        axes.get_figure().draw_without_rendering()  # type: ignore[union-attr]  # sets the axis limits
        points = np.array([(x[-1], y[-1]) for x, y in visible_ends.values()])
        inks = [INKS[list(ends).index(name) + 1] for name in visible_ends]
        label_points(axes, points, list(visible_ends), inks)


def format_step_axis(axes: Axes) -> None:
    """Format the steps along the lower axis."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(labelsize=TEXT_SIZE - 1)


def extract_field(rows: Sequence[Row], name: str) -> Array:
    """Return a field of every row, NaN where it is missing or not finite, which leaves a gap in a curve."""
    values = np.array([float(row.get(name, np.nan)) for row in rows])
    return np.where(np.isfinite(values), values, np.nan)


def smooth_curve(values: Array) -> Array:
    """Compute the mean of the last fiftieth of all steps up to and including each step, over finite values only."""
    width = max(len(values) // 50, 1)
    known = np.isfinite(values)
    sums, counts = (np.cumsum(np.concatenate([np.zeros(width), x])) for x in (np.where(known, values, 0), known))
    with np.errstate(invalid="ignore"):
        mean: Array = (sums[width:] - sums[:-width]) / (counts[width:] - counts[:-width])
    return mean


def save_picture(picture: Picture, path: Path) -> None:
    """Write a picture as PNG atomically."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=144, bbox_inches="tight")
    with write_atomically(path) as (png,):
        png.write_bytes(buffer.getvalue())
