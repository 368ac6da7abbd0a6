"""Figures of heads of layers without a softmax: signed entries in two hues, with words where they fit, else pooled."""

from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter

from regard.map.implicit_map import ImplicitMap
from regard.show.axis_words import AxisWords
from regard.show.color_scale import Signed, SignedLog, choose_signed_scale
from regard.show.figure import FAINT, SIGNED_COLORMAP, TEXT_SIZE, Array, Picture, draw_sheet, make_norm, make_panel
from regard.show.page.implicit_pictures import SIGNED_LOG, SIGNS
from regard.show.pooled_axes import describe_bins, label_picture

MAX_WORDS, BINS = 48, 512  # maximum tokens that are drawn with words; bins of a picture along an axis
SIZE, LEFT, RIGHT, ABOVE, BELOW = 5.2, 0.75, 1.15, 0.45, 0.95  # inches
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the color bar
Span = tuple[int, int]


def draw_signed_head(m: ImplicitMap, rows: Span, columns: Span, words: AxisWords, title: str) -> Picture:
    """Draw the entries of a map of one matrix, for some of its queries and keys: with their words up to 48, else in bins."""
    parts = slice(*rows), slice(*columns)
    if max(rows[1] - rows[0], columns[1] - columns[0]) > MAX_WORDS:
        return draw_signed_bins(m, rows, columns, title)
    sides = words[0][parts[0]], words[1][parts[1]]
    panel = make_panel(m[0, 0, parts[0], parts[1]], *sides, title=title, names=("query", "key"), scale=Signed())
    return draw_sheet([panel], note=SIGNS)


def draw_signed_bins(m: ImplicitMap, rows: Span, columns: Span, title: str) -> Picture:
    """Draw a long part of a map in bins, each the entry that is largest in size."""
    size = min(BINS, rows[1] - rows[0]), min(BINS, columns[1] - columns[0])
    entries = m.tile(slice(*rows), slice(*columns), size, "max")[0, 0].double().cpu()
    values, scale = entries.numpy(), choose_signed_scale(entries, max(m.shape[2:]))
    picture = Picture(figsize=(LEFT + SIZE + RIGHT, ABOVE + SIZE + BELOW))
    axes = picture.add_axes_at(LEFT, BELOW, SIZE, SIZE)
    image = draw_signed_picture(axes, values, make_norm(scale, values), (columns[0], columns[1], rows[1], rows[0]))
    is_pooled = size != (rows[1] - rows[0], columns[1] - columns[0])
    bar = add_signed_bar(picture, image, scale, (LEFT + SIZE + 0.2, BELOW, 0.13, SIZE))
    bar.ax.set_title("entry largest\nin size" if is_pooled else "entry", fontsize=TEXT_SIZE - 1, loc="left")
    axes.set_title(title, fontsize=TEXT_SIZE + 1, loc="left", parse_math=False)
    label_picture(axes, f"keys{describe_bins(columns, size[1])}", f"queries{describe_bins(rows, size[0])}")
    note = describe_signs(scale)
    picture.text(LEFT / (LEFT + SIZE + RIGHT), 0.08 / (ABOVE + SIZE + BELOW), note, fontsize=TEXT_SIZE - 1, va="bottom")
    return picture


def describe_signs(scale: Signed) -> str:
    """Return what the colors of a scale say, in one or two lines."""
    return f"{SIGNS}\n{SIGNED_LOG}" if isinstance(scale, SignedLog) else SIGNS


def draw_signed_picture(
    axes: Axes, values: Array, norm: Normalize, extent: tuple[int, int, int, int] | None = None
) -> AxesImage:
    """Draw signed numbers as the pixels of some axes."""
    settings = {"cmap": SIGNED_COLORMAP, "norm": norm, "aspect": "auto", "interpolation": "nearest"}
    return axes.imshow(values, extent=extent, **settings)  # type: ignore[arg-type]


def add_signed_bar(picture: Picture, image: AxesImage, scale: Signed, place: tuple[float, float, float, float]) -> Colorbar:
    """Add a color bar in inches, with the numbers of the scale on both sides of 0."""
    bar = picture.colorbar(image, cax=picture.add_axes_at(*place))
    ends = image.get_clim()
    bar.set_ticks([scale.get_value(share, ends) for share in TICKS])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.2g}".replace("-", "−") if value else "0"))
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TEXT_SIZE - 1, length=2, color=FAINT)
    return bar
