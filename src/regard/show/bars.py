"""One row of attention in the terminal as bars: what one query attends to, the largest weights first."""

from collections.abc import Iterator, Sequence

import torch
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.show.shaded_text import BLANK, BREAK
from regard.show.terminal import truncate_end, truncate_start
from regard.show.terminal_colors import Window, get_color

MIN_WEIGHT = 5e-4  # smallest weight that rounds to 0.001
MAX_BARS = 12  # number of bars by default
WORD_CELLS, WORDS_BEFORE = 24, 3  # maximum cells of a word with those before it; how many words before it
WIDE_SCREEN = 60  # cells of a screen from which number and distance both fit
BAR_SHADE = 0.6  # shade of a bar, visible on dark and light screens
EIGHTHS = " ▏▎▍▌▋▊▉█"


def render_bars(row: Tensor, words: Sequence[str], own: int | None, window: Window, most: int = MAX_BARS) -> Iterator[Text]:
    """Generate a line for each of the largest weights (k,): the weight, the word, its position, and a bar of that length.

    `own` is the key at the query's own position, if there is one.
    """
    order = torch.argsort(row, descending=True, stable=True)[:most].tolist()
    order = [key for key in order if row[key] >= MIN_WEIGHT]
    before = WORDS_BEFORE if window.colors else 0  # without color the word would look like those before it
    labels = [format_label(words, key, before, min(WORD_CELLS, window.width // 4)) for key in order]
    places = [format_position(key, own, len(f"{max(order):,}"), window.width >= WIDE_SCREEN) for key in order]
    side, place = max((one.cell_len for one in labels), default=0), max(map(len, places), default=0)
    room = window.width - side - place - 9
    style = Style(color=get_color(BAR_SHADE, window.colors)) if window.colors else Style()
    for key, word, far in zip(order, labels, places, strict=True):
        weight = float(row[key])
        line = Text.assemble(f"{weight:.3f}  ", word, " " * (side - word.cell_len + 2), (far.ljust(place), "dim"))
        if room >= 4:
            line.append(" ").append(format_bar(weight / float(row[order[0]]), room - 1, window.colors), style=style)
        yield line
    rest = float(row.sum() - row[order].sum())
    left = int((row > 0).sum()) - len(order)
    if left:
        yield Text(f"{rest:.3f}  on {left:,} other{'s' * (left > 1)}", style="dim")


def format_label(words: Sequence[str], key: int, count: int, room: int) -> Text:
    """Format a word after as much of the `count` words before it as fits in `room` cells."""
    word = truncate_end(words[key].replace("\n", BREAK).lstrip(" ") or BLANK, room)
    gap = " " * words[key].startswith(" ")
    before = "".join(words[max(key - count, 0) : key]).replace("\n", BREAK).lstrip(" ")
    context = truncate_start(before, room - cell_len(word) - len(gap))
    return Text.assemble((context + gap if context else "", "dim"), (word, "bold"))


def format_position(key: int, own: int | None, width: int, full: bool) -> str:
    """Format the position of a key: its number and its distance from the query; without `full` only the distance."""
    if own is None:
        return f"{key:>{width},}"
    far = own - key
    distance = "itself" if far == 0 else f"{far:,} back" if far > 0 else f"{-far:,} ahead"
    return f"{key:>{width},}, {distance}" if full else distance


def format_bar(share: float, room: int, colours: str | None) -> str:
    """Format a bar to an eighth of a cell, or of # signs where there is no color."""
    if colours is None:
        return "#" * max(round(share * room), 1)
    eighths = max(round(8 * share * room), 1)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
