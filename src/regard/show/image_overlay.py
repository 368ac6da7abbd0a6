"""A figure of an image with what one query looks at in it: a patch, a class token or a word."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.token_places.places import WHOLE, require_extent
from regard.show.color_scale import ColorScale, LinearScale, Log, Signed
from regard.show.figure import COLORMAP, FAINT, SIGNED_COLORMAP, TEXT_SIZE, Array, Picture
from regard.show.image_input import Pixels, load_image
from regard.show.patch_weights import (
    PatchWeights,
    Query,
    compute_patch_weights,
    describe_others,
    describe_undefined,
    describe_unseen,
)
from regard.terminal_escapes import escape_controls

SIDE, GAP, ABOVE, BELOW, RIGHT, MARGIN = 2.9, 0.25, 0.5, 0.45, 0.85, 0.12  # inches
OPACITY, PALE = 0.65, 0.4  # of the colors over the image; how far the image below them is faded
QUERY_COLOR = "#c2571a"
MAX_ACROSS = 5  # images in a row
GREYS = np.array([0.299, 0.587, 0.114])  # of red, green and blue in lightness (ITU-R BT.601)


def draw_image_overlay(
    recording: Recording,
    image: Any,
    layer: int | str | None = None,
    head: int | Sequence[int] | None = None,
    *,
    query: Query | list[Query] | None = None,
    kind: str = "self",
    part: str | None = None,
    row: int = 0,
    number: int = 0,
    of: str | Attribution = "weights",
    title: str | None = None,
) -> Picture:
    """Draw what queries look at in an image: the weights of a head, of several, or their mean, laid on the patches.

    The image is a file, a PIL image, an array or a tensor, as the model saw it: cropped and resized alike. layer is by default
    the last whose keys are patches. query is the number of a token, or the (row, column) of a patch, which is outlined; by
    default the class token, the middle patch, or the last word of a text; of a list each has a panel. of="rollout" draws the
    rollout up to the layer, an Attribution the pull of its number. number is that of the image where the model read several,
    row the batch row. Patches that the query does not see stay uncolored, as edges do that the model cut off. Raises
    ConfigError if the patches, or where they lie in the image, are not known: set recording.places.
    """
    pixels = load_image(image)
    heads = [head] if head is None or isinstance(head, int) else list(head)
    if not heads:
        raise ConfigError("head must be a number, several, or None for the mean over the heads; got none.")
    settings: dict[str, Any] = {"kind": kind, "part": part, "row": row, "image": number, "of": of}
    queries = query if isinstance(query, list) else [query]
    if not queries:
        raise ConfigError("query must be a token, a patch, or a list of them; got an empty list.")
    found = [compute_patch_weights(recording, layer, one, asked, **settings) for asked in queries for one in heads]
    return draw_patch_weights(pixels, found, title)


@dataclass(frozen=True, eq=False)
class Panel:
    """Numbers (rows, columns) laid on an image, with a title, a line below, and the patch that is outlined."""

    values: Array
    title: str
    below: str = ""
    query: PatchWeights | None = None


def draw_patch_weights(pixels: Pixels, found: Sequence[PatchWeights], title: str | None = None) -> Picture:
    """Draw an image, and beside it the image under the numbers of each query, on one scale of colors."""
    scale: ColorScale = Signed() if any(one.what.startswith("pull") for one in found) else LinearScale(low=0)
    shared = found[0].what if len(found) > 1 and len({one.what for one in found}) == 1 else ""  # then stated once
    panels = []
    for one in found:
        below = "; ".join(filter(None, [describe_others(one), describe_undefined(one), describe_unseen(one)]))
        panels.append(Panel(one.values.numpy(), one.query if shared else f"{one.what}: {one.query}", below, one))
    plain = Panel(np.zeros((0, 0)), title or "the image", shared, None if shared else found[0])
    return draw_panels(pixels, plain, panels, scale)


def draw_panels(pixels: Pixels, plain: Panel, found: Sequence[Panel], scale: ColorScale) -> Picture:
    """Draw an image under the words of `plain`, and beside it the image under the numbers of each panel."""
    ends = scale.ends(np.concatenate([one.values.ravel() for one in found]).tolist())
    norm = (LogNorm if isinstance(scale, Log) else Normalize)(*ends, clip=True)
    colors = SIGNED_COLORMAP if isinstance(scale, Signed) else COLORMAP
    across = min(len(found) + 1, MAX_ACROSS)
    lines = -(-(len(found) + 1) // across)
    height, width = pixels.shape[:2]
    tall = SIDE * height / width
    size = MARGIN + across * SIDE + (across - 1) * GAP + RIGHT, lines * (ABOVE + tall + BELOW)
    figure = Picture(figsize=size)
    for n, one in enumerate([plain, *found]):
        line, column = divmod(n, across)
        x, y = MARGIN + column * (SIDE + GAP), size[1] - (line + 1) * (ABOVE + tall + BELOW) + BELOW
        axes = figure.add_axes((x / size[0], y / size[1], SIDE / size[0], tall / size[1]))
        draw_pixels(axes, pixels if one is plain else fade_pixels(pixels), escape_controls(one.title))
        if one is not plain:
            extent = measure_extent(one.query, width, height)
            axes.imshow(one.values, cmap=colors, norm=norm, alpha=OPACITY, extent=extent, interpolation="nearest")
            axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_xlabel(one.below, fontsize=TEXT_SIZE - 1, parse_math=False)
        if one.query is not None:
            outline_query(axes, one.query, width, height)
    x, y = MARGIN + across * SIDE + (across - 1) * GAP + 0.15, size[1] - ABOVE - tall
    bar = figure.colorbar(
        ScalarMappable(norm, colors),
        cax=figure.add_axes((x / size[0], y / size[1], 0.12 / size[0], tall / size[1])),
        alpha=OPACITY,
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT, which="both")
    return figure


def draw_pixels(axes: Axes, pixels: Pixels, title: str) -> None:
    """Draw an image without axes."""
    height, width = pixels.shape[:2]
    axes.imshow(pixels, extent=(0, width, height, 0), interpolation="nearest" if max(height, width) < 64 else None)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=TEXT_SIZE, loc="left", parse_math=False)


def fade_pixels(pixels: Pixels) -> Pixels:
    """Return an image in faded greys, on which colors are read."""
    grey = pixels @ GREYS
    faded: Pixels = np.repeat((255 - (255 - grey) * (1 - PALE))[..., None], 3, 2).astype(np.uint8)
    return faded


def measure_extent(one: PatchWeights | None, width: int, height: int) -> tuple[float, float, float, float]:
    """Return the left, right, bottom and top of the patches in an image, in pixels: of all of it where none are known."""
    top, left, bottom, right = WHOLE if one is None else require_extent(one.grid)
    return left * width, right * width, bottom * height, top * height


def outline_query(axes: Axes, one: PatchWeights, width: int, height: int) -> None:
    """Outline the patch of the query, if it is one."""
    if one.patch is None:
        return
    row, column = one.patch
    left, right, bottom, top = measure_extent(one, width, height)
    across, down = (right - left) / one.grid.columns, (bottom - top) / one.grid.rows
    corner = left + column * across, top + row * down
    axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=QUERY_COLOR, linewidth=1.8))
