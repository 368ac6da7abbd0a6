"""A signed number of every head as a grid, a row for each layer: what it adds to a logit, or its effect."""

from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.patches import Patch
from torch import Tensor

from regard.errors import ShapeError
from regard.show.color_scale import compute_signed_limit
from regard.show.figure import (
    SIGNED_COLORMAP,
    TEXT_SIZE,
    Picture,
    convert_to_array,
    draw_color_bar,
    label_axis,
    make_panel,
    measure_widest,
    style_axes,
    write_numbers,
)

UNMEASURED, LINE = "#ebebe8", "#d9d9d4"  # of heads whose value is NaN, and between cells
MARK, LEGEND = 0.7, 0.35  # inches of a mark of the legend beside its word, and of the legend's height


def draw_head_grid(grid: Tensor, *, title: str = "", signs: tuple[str, str] = ("raises", "lowers")) -> Picture:
    """Draw a number of every head, (layers, heads), blue above 0 and brown below, with the numbers where they fit.

    `signs` are the words of the legend for numbers above and below 0. 0 is white, and the scale ends at the largest number in
    size on both sides. Cells of NaN are gray, not measured. Raises ShapeError for a grid of other axes or without entries.
    """
    values = convert_to_array(grid)
    if values.ndim != 2 or not values.size:
        raise ShapeError(f"grid must have the axes (layers, heads) and at least one entry, got {values.shape}.")
    layers, heads = ([str(n) for n in range(size)] for size in values.shape)
    panel = make_panel(grid, layers, heads, title=title, names=("layer", "head"))
    marks = [Patch(facecolor=SIGNED_COLORMAP(share), label=word) for word, share in zip(signs, (1.0, 0.0), strict=True)]
    marks += [Patch(facecolor=UNMEASURED, label="not measured")] if np.isnan(values).any() else []
    legend = sum(measure_widest([str(mark.get_label())]) + MARK for mark in marks)
    width, height = panel.left + max(panel.right, legend), panel.above + panel.below + LEGEND
    picture = Picture(figsize=(width, height))
    across, down = panel.size
    axes = picture.add_axes(
        (panel.left / width, 1 - (panel.above + down) / height, across / width, down / height), facecolor=UNMEASURED
    )
    limit = compute_signed_limit(values.ravel().tolist())
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=SIGNED_COLORMAP,
        norm=Normalize(-limit, limit, clip=True),
        edgecolors=LINE,
        linewidth=0.5,
    )
    mesh.set_clip_on(False)  # the outer lines are as wide as the inner ones
    write_numbers(axes, panel, mesh)
    axes.invert_yaxis()
    style_axes(axes, title, ("head", "layer"))
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    label_axis(axes.xaxis, heads, panel.cell[0], upright=panel.has_rotated_words)
    label_axis(axes.yaxis, layers, panel.cell[1])
    axes.spines[:].set_visible(False)
    draw_color_bar(axes, panel, mesh)
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (panel.left / width, 0.1 / height),
        "borderpad": 0,
        "borderaxespad": 0,
    }
    picture.legend(handles=marks, ncols=len(marks), frameon=False, fontsize=TEXT_SIZE, **place)
    return picture
