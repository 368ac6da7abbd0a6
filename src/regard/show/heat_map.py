"""A head in the terminal: its weights as colored half blocks, or as digits, in as many cells as the window has."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.show.color_scale import MAX_LINEAR_TOKENS, SignedLog, choose_scale, choose_signed_scale
from regard.show.page.implicit_pictures import SIGNED_LOG, SIGNS
from regard.show.terminal import truncate_end
from regard.show.terminal_colors import Heat, TerminalArea

UPPER, LOWER = "▀", "▄"
LABEL_CELLS = 14  # maximum cells of a row label
# maximum cells of a weight; of a signed entry; from how many cells the number of a weight is written
MAX_COLUMN_CELLS, SIGNED_COLUMN_CELLS, MIN_NUMBER_CELLS = 4, 6, 4


@dataclass(frozen=True)
class Grid:
    """The cells of a picture: values (rows, columns), the first token of each row, and the width of a column in cells."""

    values: Tensor
    first_tokens: Sequence[int]
    column_cells: int
    has_half_blocks: bool
    sizes: tuple[float, float]  # queries and keys in a cell


def render_heat_map(
    m: AttentionMap | ImplicitMap, words: Sequence[str], title: str, window: TerminalArea, asking: Sequence[str] | None = None
) -> Iterator[Text]:
    """Generate the lines of a picture of a map of one batch row, of weights or signed: of its head, or of its heads' mean.

    `words` are those of the keys, the last of them those of the queries too, unless `asking` has the queries of another text. A
    cell of several weights shows the largest of them in size, or for several heads their mean.
    """
    q, k = m.shape[2:]
    labels = asking or (words[k - q :] if k >= q else [str(n) for n in range(q)])
    worded = q <= window.lines * (2 if window.colors else 1)
    side = min(max(cell_len(truncate_end(word, LABEL_CELLS)) for word in labels), window.width // 4) + 1 if worded else 0
    side += len(f"{q - 1:,}") + 1
    grid = make_grid(m, window, side)
    is_signed = isinstance(m, ImplicitMap)
    scale = choose_signed_scale(grid.values, max(q, k)) if is_signed else choose_scale(grid.values, max(q, k))
    heat = Heat(scale, scale.ends(grid.values.flatten().tolist()))
    yield Text(title, style="bold")
    yield render_ruler(grid, k, side)
    yield from render_rows(grid, labels, side, heat, window)
    has_digits = window.colors is None and not (is_signed and grid.column_cells == SIGNED_COLUMN_CELLS)
    if window.colors or has_digits:
        yield from render_legend(heat, window)
    yield from wrap_sentence(describe_cells(grid, m.shape[1], is_signed), window.width)
    if is_signed:
        yield from wrap_sentence(describe_signs(window, has_digits, isinstance(scale, SignedLog)), window.width)
    yield from render_nan_note(grid.values, window.width)
    if asking and k <= MAX_LINEAR_TOKENS:
        row_labels = (f"{n}\xa0{truncate_end(word, LABEL_CELLS).strip()}" for n, word in enumerate(words))
        yield from wrap_sentence(f"The columns: {', '.join(row_labels)}.", window.width)


def render_legend(heat: Heat, window: TerminalArea) -> Iterator[Text]:
    """Generate the lines of the scale of a picture."""
    if heat.is_signed and window.colors is None:
        yield from wrap_sentence(f"entry {heat.render_legend(None, window.width)}", window.width, "")
    else:
        name = "entry " if heat.is_signed else "weight "
        yield Text.assemble(name, heat.render_legend(window.colors, window.width - len(name)))


def describe_signs(window: TerminalArea, has_digits: bool, is_log: bool = False) -> str:
    """Return the sentences on what signed entries are, and how they are shown."""
    if window.colors:
        return f"{SIGNS} {SIGNED_LOG}" if is_log else SIGNS
    shown = ", digits above 0, letters below" if has_digits else ""
    tenths = " A digit or letter is a tenth of the scale, which is logarithmic, over four decades." if is_log else ""
    return f"No softmax: entries are signed{shown}; rows need not sum to 1.{tenths if has_digits else ''}"


def make_grid(m: AttentionMap | ImplicitMap, window: TerminalArea, side: int) -> Grid:
    """Pool the weights into bins where they are more than the window has cells."""
    q, k = m.shape[2:]
    halves = q > window.lines and window.colors is not None
    room = window.width - side
    size = min(q, window.lines * (2 if halves else 1)), min(k, room)
    pooled = m.pooled(*size, how="max" if m.shape[1] == 1 else "mean")[0].mean(0)
    widest = SIGNED_COLUMN_CELLS if isinstance(m, ImplicitMap) else MAX_COLUMN_CELLS
    cell_width = 1 if halves else min(room // size[1], widest)
    return Grid(pooled, [n * q // size[0] for n in range(size[0])], cell_width, halves, (q / size[0], k / size[1]))


def render_ruler(grid: Grid, keys: int, side: int) -> Text:
    """Format the numbers of the keys over their columns, as many as fit."""
    columns, spacing = grid.values.shape[1], len(f"{keys:,}") + 1
    every = max(-(-spacing // grid.column_cells), 1)
    every = next((step for step in (1, 2, 5, 10, 20, 50) if step >= every), every)
    line = " " * side
    for column in range(0, columns, every):
        start = side + column * grid.column_cells
        if start >= len(line) and start + spacing <= side + columns * grid.column_cells + 1:
            place = f"{column * keys // columns:,}"
            line += " " * (start - len(line)) + (place.rjust(grid.column_cells - 1) if every == 1 else place)
    return Text(line, style="dim")


def render_rows(grid: Grid, labels: Sequence[str], side: int, heat: Heat, window: TerminalArea) -> Iterator[Text]:
    """Generate the lines of cells, each after the number and the word of its first query."""
    number = len(f"{len(labels) - 1:,}")
    step = 2 if grid.has_half_blocks else 1
    for n in range(0, len(grid.first_tokens), step):
        place = grid.first_tokens[n]
        word = truncate_end(labels[place].strip(" "), max(side - number - 2, 0)) if side > number + 2 else ""
        label = f"{place:>{number},} {word}"
        line = Text.assemble((label[:number], "dim"), label[number:] + " " * (side - cell_len(label)))
        pair = grid.values[n], grid.values[n + 1] if step == 2 and n + 1 < len(grid.first_tokens) else None
        for upper, lower in zip(pair[0].tolist(), [0.0] * len(pair[0]) if pair[1] is None else pair[1].tolist(), strict=True):
            if grid.has_half_blocks:
                line.append(*format_half_blocks(upper, lower, heat, window.colors or "256"))
            else:
                line.append(
                    format_cell(upper, grid.column_cells, heat, window.colors),
                    style=get_cell_style(upper, heat, window.colors),
                )
        if window.colors is None:
            line.rstrip()
        yield line


def format_cell(weight: float, width: int, heat: Heat, colours: str | None) -> str:
    """Format the text of a cell: its number where it fits, a digit where there is no color, blanks for 0."""
    if weight == 0:
        return " " * width
    if math.isnan(weight):
        return ("nan" if width >= MIN_NUMBER_CELLS else "?").rjust(width)
    if heat.is_signed:
        number = format_entry(weight)
        return number.rjust(width) if len(number) < width else " " * width if colours else heat.get_digit(weight).rjust(width)
    if width >= MIN_NUMBER_CELLS:
        return f"{weight:.2f}"[1:].rjust(width) if weight < 0.995 else "1.0".rjust(width)
    return " " * width if colours else heat.get_digit(weight).rjust(width)


def get_cell_style(weight: float, heat: Heat, colours: str | None) -> Style:
    """Return the color of a cell, none for 0, a key that the query may not see."""
    return heat.get_style(weight, colours) if weight else Style()


def format_half_blocks(upper: float, lower: float, heat: Heat, colours: str) -> tuple[str, Style]:
    """Format two weights, one above the other, as one character."""
    if math.isnan(upper) or math.isnan(lower):
        return "?", Style(dim=True)
    above, under = ((heat.find_paper(one, colours) or (None,))[0] if one else None for one in (upper, lower))
    if above is None and under is None:
        return " ", Style()
    return (LOWER, Style(color=under)) if above is None else (UPPER, Style(color=above, bgcolor=under))


def format_entry(value: float) -> str:
    """Format a signed number in at most five characters: +.25, -1.2, +3e-4."""
    size = abs(value)
    if 0.005 <= size < 0.995:
        return f"{value:+.2f}".replace("0.", ".")
    text = f"{value:+.1f}" if 0.995 <= size < 99.5 else f"{value:+.0f}" if 99.5 <= size < 9999 else f"{value:+.0e}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def describe_cells(grid: Grid, heads: int, is_signed: bool = False) -> str:
    """Describe the rows, the columns and the cells."""
    mean = f"; a cell is the mean of {heads} heads." if heads > 1 else "."
    if max(grid.sizes) == 1 and is_signed:
        return "A row is a query (the token whose output it is), a column a key (the token whose value it multiplies)" + mean
    if max(grid.sizes) == 1:
        return "A row is a query (a token that attends), a column a key (a token it attends to)" + mean
    parts, size = ("entries", " in size") if is_signed else ("weights", "")
    kind = f"the mean of its {parts} in {heads} heads" if heads > 1 else f"the largest{size} of its {parts}"
    down, across = format_bin_size(grid.sizes[0], "query", "queries"), format_bin_size(grid.sizes[1], "key", "keys")
    return f"A cell is {down} (down) by {across} (across), and shows {kind}."


def format_bin_size(size: float, one: str, many: str) -> str:
    """Format how many tokens a bin holds."""
    low, high = math.floor(size), math.ceil(size)
    return f"{low:,}" * (low < high) + " or " * (low < high) + f"{high:,} {one if high == 1 else many}"


def render_nan_note(values: Tensor, width: int) -> Iterator[Text]:
    """Generate a sentence where some of the numbers shown are NaN; nothing otherwise."""
    count = int(values.isnan().sum())
    if count:
        yield from wrap_sentence(f"{count:,} of {values.numel():,} numbers are not a number (NaN): nan or ?.", width)


def wrap_sentence(sentence: str, width: int, style: str = "dim") -> Iterator[Text]:
    """Generate the lines of a wrapped sentence."""
    yield from (Text(line, style=style) for line in textwrap.wrap(sentence, width))
