"""A matplotlib figure of one head of a recording: with words where they fit, else a pooled picture."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.map.pooling import resolve_span
from regard.mechanism.arguments import check_index, check_instance, check_integer
from regard.observe import Recording
from regard.show.axis_words import choose_map_kind, get_axis_words
from regard.show.color_scale import MAX_LINEAR_TOKENS, MIN_LOG_WEIGHT, choose_scale
from regard.show.figure import COLORMAP, FAINT, INKS, PAPER, TEXT_SIZE, Array, Picture, draw_matrix
from regard.show.pooled_axes import describe_bins, label_picture
from regard.show.signed_figure import draw_signed_head
from regard.terminal_escapes import escape_controls

MAX_WORDS, BINS = MAX_LINEAR_TOKENS, 512  # maximum tokens that are drawn with words; bins of a picture along an axis
SIZE, PROFILE, LEFT, RIGHT, ABOVE, BELOW, GAP = 5.2, 0.75, 0.75, 0.95, 0.45, 0.6, 0.22  # inches


def figure(
    recording: Recording,
    layer: int | str,
    head: int,
    *,
    queries: slice = slice(None),
    keys: slice = slice(None),
    kind: str | None = None,
    part: str | None = None,
    row: int = 0,
    title: str | None = None,
) -> Picture:
    """Draw the weights of a head, or of some of its queries and keys: with their words up to 48 tokens, else in bins.

    Colors are logarithmic where much of the attention lies on small weights, and in bins. A bin shows its largest weight, so
    that a single one stays visible; beside the bins are the entropy of each query and above them the weight that each key
    receives. `row` is the batch row. `kind` is self, cross or implicit; by default self, or cross where there is no self
    attention, which the title then states, or implicit where no layer has a softmax: then entries are signed, blue above 0 and
    brown below, and a bin shows the one largest in size. Raises ConfigError for a layer or a head that was not recorded.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    requested_kind, kind = kind, choose_map_kind(recording) if kind is None else kind
    if title is not None:
        title = escape_controls(check_instance("title", title, str), keep="\n")
    head = check_integer("head", head)
    m: AttentionMap | ImplicitMap = recording.map(layer, head, kind, part)
    row = check_index("row", row, m.shape[0], "the batch")
    m = m.select(batch=row)
    q, k = m.shape[2:]
    rows, columns = resolve_slice(queries, q, "queries"), resolve_slice(keys, k, "keys")
    if isinstance(m, ImplicitMap):
        words = get_axis_words(recording, layer, kind, part, row, (q, k))
        return draw_signed_head(m, rows, columns, words, f"layer {layer}, head {head}: {m.title}" if title is None else title)
    chosen = " of cross attention" if kind == "cross" and requested_kind is None else ""
    name = f"layer {layer}, head {head}{chosen}" if title is None else title
    if max(rows[1] - rows[0], columns[1] - columns[0]) <= MAX_WORDS:
        asking, answering = get_axis_words(recording, layer, kind, part, row, (q, k))
        values = m[0, 0, slice(*rows), slice(*columns)]
        sides = asking[slice(*rows)], answering[slice(*columns)]
        scale = choose_scale(values, 0)
        return draw_matrix(values.masked_fill(values == 0, -torch.inf), *sides, title=name, names=("query", "key"), scale=scale)
    return draw_pooled(m, rows, columns, name)


def resolve_slice(places: slice, size: int, name: str) -> tuple[int, int]:
    """Return the first index and the end of a slice of an axis. Raises ConfigError where the slice is empty."""
    start, stop = resolve_span(places, size, name)
    if start >= stop:
        raise ConfigError(f"{name} must be a slice that is not empty, got {places} of {size} tokens.")
    return start, stop


def draw_pooled(m: AttentionMap, rows: tuple[int, int], columns: tuple[int, int], title: str) -> Picture:
    """Draw a long part in bins, with the profiles of its rows and columns."""
    size = min(BINS, rows[1] - rows[0]), min(BINS, columns[1] - columns[0])
    values = m.tile(slice(*rows), slice(*columns), size, "max")[0, 0].cpu().numpy()
    entropy, received = m.entropy()[0, 0, slice(*rows)].cpu().numpy(), m.received()[0, 0, slice(*columns)].cpu().numpy()
    picture = Picture(figsize=(LEFT + SIZE + GAP + PROFILE + RIGHT, ABOVE + PROFILE + GAP + SIZE + BELOW))
    main = picture.add_axes_at(LEFT, BELOW, SIZE, SIZE)
    image = main.imshow(
        np.ma.maximum(np.ma.masked_equal(values, 0), MIN_LOG_WEIGHT),  # where no query may see, the background shows
        cmap=COLORMAP,
        norm=LogNorm(MIN_LOG_WEIGHT, 1),
        extent=(columns[0], columns[1], rows[1], rows[0]),
        aspect="auto",
        interpolation="nearest",
    )
    right = picture.add_axes_at(LEFT + SIZE + GAP, BELOW, PROFILE, SIZE)
    draw_profile(right, entropy, rows, upright=True)
    above = picture.add_axes_at(LEFT, BELOW + SIZE + GAP, SIZE, PROFILE)
    draw_profile(above, received, columns, upright=False)
    main.set_facecolor(PAPER)
    label_picture(main, f"keys{describe_bins(columns, size[1])}", f"queries{describe_bins(rows, size[0])}")
    bar = picture.colorbar(image, cax=picture.add_axes_at(LEFT + SIZE + GAP + PROFILE + 0.2, BELOW, 0.13, SIZE))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT, which="both")
    is_unpooled = size == (rows[1] - rows[0], columns[1] - columns[0])
    bar.ax.set_title("weight" if is_unpooled else "largest\nweight", fontsize=TEXT_SIZE - 1, loc="left")
    right.set_xlabel("entropy, nats" + "\nmean, largest" * (not is_unpooled), fontsize=TEXT_SIZE - 1)
    above.set_ylabel("received", fontsize=TEXT_SIZE - 1)
    above.set_title(title, fontsize=TEXT_SIZE + 1, loc="left", parse_math=False)
    return picture


def draw_profile(axes: Axes, values: Array, span: tuple[int, int], upright: bool) -> None:
    """Draw the mean and the largest of the values in each bin of an axis as a band beside the picture."""
    edges = np.linspace(0, len(values), min(BINS, len(values)) + 1).astype(int)
    places = span[0] + (edges[:-1] + edges[1:]) / 2
    highest = np.maximum.reduceat(values, edges[:-1])
    mean = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    fill = axes.fill_betweenx if upright else axes.fill_between
    fill(places, 0, highest, color=FAINT, linewidth=0, alpha=0.6)
    axes.plot(*((mean, places) if upright else (places, mean)), color=INKS[0], linewidth=0.8)
    if upright:
        axes.set_ylim(span[1], span[0])
        axes.set_xlim(0)
        axes.set_yticks([])
    else:
        axes.set_xlim(*span)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xticks([])
    axes.tick_params(labelsize=TEXT_SIZE - 2, length=2, color=FAINT)
    axes.set_facecolor(PAPER)
    axes.spines[:].set_visible(False)
