"""Every head of a recording as a small picture on one sheet, a row per layer."""

import textwrap
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.image import AxesImage
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording
from regard.observe.classification.repeated_calls import split_calls
from regard.observe.recorded_runs.run import IMPLICIT
from regard.show.axis_words import choose_map_kind
from regard.show.color_scale import LinearScale, choose_scale, choose_signed_scale
from regard.show.figure import (
    COLORMAP,
    FAINT,
    LINE_HEIGHT,
    MIN_TEXT_SIZE,
    PAPER,
    POINTS_PER_INCH,
    TEXT_SIZE,
    Array,
    Picture,
    make_norm,
    measure_widest,
)
from regard.show.signed_figure import add_signed_bar, describe_signs, draw_signed_picture

BINS, MAX_SIGNED_HEADS = 64, 16  # bins of a small picture along an axis; maximum heads of a layer without a softmax
# inches: maximum width and height of all pictures; maximum side of one; gap
MAX_WIDTH, MAX_HEIGHT, MAX_SIDE, GAP = 6.6, 8.8, 1.2, 0.06
NOTE_WIDTH = 60  # letters of a line of a note
ABOVE, BELOW, RIGHT = 0.5, 0.12, 0.75  # margins in inches


def draw_all_heads(
    recording: Recording,
    *,
    layers: Sequence[int] | None = None,
    kind: str | None = None,
    part: str | None = None,
    row: int = 0,
    title: str = "",
) -> Picture:
    """Draw the weights of all heads, or of those of some layers, in bins that show the largest weight.

    Colors are logarithmic, except where tokens are few and little of the attention lies on small weights. Rows are layers and
    columns heads; within each picture, rows are queries and columns keys, from the upper left corner. `kind` and `part` select
    modules as in recording.map; `kind` is by default self, cross where there is no self attention, or implicit where no layer
    has a softmax. Of implicit maps the first 16 heads of each layer are drawn, since channels may be heads: their signed
    entries, blue above 0 and brown below. Calls of a module that attends several times in one forward, and has no map for
    all of them, are layers of their own, which a note names: `layers` counts each of them, so that the numbers of the layers
    behind are larger than in recording.map. `row` is the batch row. Raises ConfigError where there is no such layer.
    """
    recording, split = split_calls(recording)
    kind = kind or choose_map_kind(recording)
    names = recording.layers(kind=kind, part=part)
    chosen = list(range(len(names)) if layers is None else layers)
    if not chosen:
        raise ConfigError(f"the recording has no layer of kind {kind!r} to draw.")
    is_signed, note = kind == IMPLICIT, textwrap.fill(" ".join(split), NOTE_WIDTH)
    maps, numbers, cut = select_maps(recording, chosen, kind, part, row)
    pooled = [m.pooled(min(m.shape[2], BINS), min(m.shape[3], BINS), "max")[0].double().cpu() for m in maps]
    tokens, shown = max(max(m.shape[2:]) for m in maps), torch.cat([found.flatten() for found in pooled])
    norm = make_weight_norm(shown, tokens)
    if is_signed:
        signed = choose_signed_scale(shown, tokens)
        note, norm = describe_signs(signed) + cut, make_norm(signed, shown.numpy())
    across = len(numbers)
    side = min(MAX_SIDE, MAX_WIDTH / across - GAP, MAX_HEIGHT / len(maps) - GAP)
    left = measure_widest([f"layer {chosen[-1]}"]) + 0.15
    lines = note.splitlines()
    width, height = left + across * (side + GAP) + RIGHT, ABOVE + len(maps) * (side + GAP) + BELOW + 0.18 * len(lines)
    width = max(width, left + 1.2 * measure_widest([title]), 0.2 + measure_widest(lines))
    picture = Picture(figsize=(width, max(height, 1.4)))
    width, height = picture.get_size_inches()

    def add_axes_at(x: float, y: float, w: float, h: float) -> Axes:
        return picture.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    def write_word(x: float, y: float, text: str, look: str) -> None:
        picture.text(x / width, 1 - y / height, text, ha=look, va="center", fontsize=size, parse_math=False)

    size = max(min(TEXT_SIZE - 1, 0.9 * (side + GAP) * POINTS_PER_INCH / LINE_HEIGHT), MIN_TEXT_SIZE)
    widest = measure_widest([f" {max(numbers) + 1}"]) * size / TEXT_SIZE
    step = 1 if widest < side + GAP else 5  # so that the head numbers do not touch
    skip = 1 if (side + GAP) * POINTS_PER_INCH >= LINE_HEIGHT * size else 5
    for down, found in enumerate(pooled):
        if down % skip == 0:
            write_word(left - 0.08, ABOVE + down * (side + GAP) + side / 2, f"layer {chosen[down]}", "right")
        for head, weights in enumerate(found.numpy()):
            axes = add_axes_at(left + head * (side + GAP), ABOVE + down * (side + GAP), side, side)
            image = draw_small_signed_head(axes, weights, norm) if is_signed else draw_small_head(axes, weights, norm)
    for head in range(0, across, step):
        write_word(left + head * (side + GAP) + side / 2, ABOVE - 0.12, f"{numbers[head]}", "center")
    write_word(left - 0.08, ABOVE - 0.12, "head", "right")
    if title:
        picture.text(left / width, 1 - 0.17 / height, title, ha="left", va="center", fontsize=TEXT_SIZE + 1, parse_math=False)
    tall = min(2.2, max(len(maps) * (side + GAP), 0.7))
    beside = left + across * (side + GAP) + 0.1
    if note:
        picture.text(0.1 / width, 0.08 / height, note, va="bottom", fontsize=TEXT_SIZE - 1, parse_math=False)
    if is_signed:
        bar = add_signed_bar(picture, image, signed, (beside, height - ABOVE - tall, 0.12, tall))
        bar.ax.set_title("entry", fontsize=TEXT_SIZE - 1, loc="left")
        return picture
    draw_weight_bar(picture, image, add_axes_at(beside, ABOVE, 0.12, tall))
    return picture


def select_maps(
    recording: Recording, chosen: Sequence[int], kind: str, part: str | None, row: int
) -> tuple[list[AttentionMap | ImplicitMap], tuple[int, ...], str]:
    """Return the maps of some layers, the numbers in the model of their heads, and a note if only the first are drawn."""
    maps: list[AttentionMap | ImplicitMap] = [recording.map(layer, kind=kind, part=part).select(batch=row) for layer in chosen]
    numbers = max((recording.heads(layer, kind, part) for layer in chosen), key=len)
    if kind != IMPLICIT or len(numbers) <= MAX_SIGNED_HEADS:
        return maps, numbers, ""
    cut = f"\nThe first {MAX_SIGNED_HEADS} of up to {len(numbers):,} heads."
    return [m.select(heads=slice(MAX_SIGNED_HEADS)) for m in maps], numbers[:MAX_SIGNED_HEADS], cut


def draw_weight_bar(picture: Picture, image: AxesImage, axes: Axes) -> None:
    """Draw the color scale of the weights into axes."""
    picture.colorbar(image, cax=axes).outline.set_visible(False)
    axes.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT, which="both")
    axes.set_title("weight", fontsize=TEXT_SIZE - 1, loc="left")


def make_weight_norm(weights: Tensor, tokens: int) -> Normalize:
    """Return the scale of colors of all heads: from 0 to 1, or logarithmic where that fits the weights."""
    scale = choose_scale(weights, tokens)
    return Normalize(0, 1) if isinstance(scale, LinearScale) else LogNorm(scale.ends([])[0], 1)


def draw_small_signed_head(axes: Axes, entries: Array, norm: Normalize) -> AxesImage:
    """Draw the signed entries of one head without words."""
    image = draw_signed_picture(axes, entries, norm)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=FAINT, linewidth=0.4)
    return image


def draw_small_head(axes: Axes, weights: Array, norm: Normalize) -> AxesImage:
    """Draw one head without words; cells that no query may see show the background."""
    image = axes.imshow(
        np.ma.maximum(np.ma.masked_equal(weights, 0), norm.vmin or 0.0),
        cmap=COLORMAP,
        norm=norm,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(xticks=[], yticks=[], facecolor=PAPER)
    axes.spines[:].set(color=FAINT, linewidth=0.4)
    return image
