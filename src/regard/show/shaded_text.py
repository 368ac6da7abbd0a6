"""A text in the terminal, each of its words shaded by a number, such as the attention it receives."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.observe import Recording
from regard.show.terminal import escape_text, truncate_end
from regard.show.terminal_colors import Heat, TerminalArea

MAX_LINES = 10  # lines of a text that is shown in part
WORD_CELLS = 24  # maximum cells of a word
MAX_TOKENS = 4096  # maximum tokens of a shaded text; a longer one would need another traversal of every matrix
MARKED = Style(bold=True)
BREAK, BLANK = "↵", "␣"  # a line end, and a token of blanks only


def compute_attention_shares(recording: Recording, kind: str = "self") -> Tensor:
    """Compute the share of all attention that each key of the first batch row receives, (k,), over all heads and layers.

    The shares sum to 1, or to what sinks leave of it.
    """
    maps = [recording.map(layer, kind=kind).select(batch=0) for layer in range(len(recording.layers(kind)))]
    return torch.stack([m.received()[0].mean(0) for m in maps]).mean(0) / maps[0].shape[2]


def render_shaded_text(
    words: Sequence[str], values: Tensor, heat: Heat, window: TerminalArea, marked: int | None = None
) -> Iterator[Text]:
    """Generate the lines of a text, each word on its color, or above its digit; the marked one in brackets."""
    line, below = Text(), ""
    for n, (space, word, ends) in enumerate(split_blanks(words)):
        shown = f"[{truncate_end(word, WORD_CELLS)}]" if n == marked else truncate_end(word, WORD_CELLS)
        if line.cell_len + len(space) + cell_len(shown) > window.width:
            yield from render_line(line, below, window)
            line, below = Text(), ""
        space = space if line.cell_len else ""
        value = float(values[n])
        is_plain = n == marked or value == 0  # a weight of 0 has no color
        style = (MARKED if n == marked else Style()) if is_plain else heat.get_style(value, window.colors)
        below += " " * (line.cell_len + len(space) - len(below)) + ("" if is_plain else heat.get_digit(value))
        line.append(space).append(shown, style=style)
        if ends:
            yield from render_line(line, below, window)
            line, below = Text(), ""
    if line.cell_len:
        yield from render_line(line, below, window)


def render_line(line: Text, below: str, window: TerminalArea) -> Iterator[Text]:
    """Generate a line of words, and its digits where there is no color."""
    yield line
    if window.colors is None:
        yield Text(below.rstrip())


def split_blanks(words: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Generate for each token the blank before it, its visible text, and whether a line ends with it.

    Tokens of which none starts with a blank were cut from words: they are separated, unless all are single letters.
    """
    is_cut = not any(word[:1].isspace() for word in words) and any(len(word.strip()) > 1 for word in words)
    for n, word in enumerate(words):
        ends = word.endswith("\n")
        yield (" " if (n and is_cut) or (word[:1] == " " and word.strip()) else "", escape_text(get_visible_text(word)), ends)


def get_visible_text(word: str) -> str:
    """Return the visible text of a token; blanks and line ends are shown only where there is nothing else."""
    return word.strip(" \n") or (BREAK * word.count("\n") if word.endswith("\n") else BLANK * len(word))


def limit_lines(
    lines: Iterable[Text], show_all: bool, window: TerminalArea, count: int, marked: bool = False
) -> Iterator[Text]:
    """Generate the first lines, or those up to the marked word, and a note on how to see the others."""
    all_lines, most = list(lines), MAX_LINES if window.colors else 2 * MAX_LINES
    ends = next(
        (n + most // MAX_LINES for n, line in enumerate(all_lines) if any(span.style == MARKED for span in line.spans)), most
    )
    shown = all_lines if show_all else all_lines[max(ends - most, 0) : max(ends, most)] if marked else all_lines[:most]
    yield from shown
    if len(shown) < len(all_lines):
        yield Text(f"a part of {count:,} tokens; --all shows all", style="dim")
