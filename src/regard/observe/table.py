"""Rows of cells as lines of text, in columns."""

import math
import unicodedata
from collections.abc import Sequence

WIDTH = 80  # columns of the screen


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """A line of titles and one for each row, in columns, set to the right but for those named in `left`."""
    lines = [list(titles), *map(list, rows)]
    widths = [max(cells(line[n]) for line in lines) for n in range(len(titles))]
    return [
        "  ".join(padded(cell, width, title in left) for cell, width, title in zip(line, widths, titles, strict=True)).rstrip()
        for line in lines
    ]


def fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> int:
    """How many of the columns, from the first one on, have room beside one another."""
    total = -2
    for n in range(len(titles)):
        total += 2 + max(cells(line[n]) for line in (titles, *rows))
        if total > width:
            return n
    return len(titles)


def brief(number: float) -> str:
    """Two digits after the point, fewer of a large number, and - for none."""
    if math.isnan(number):
        return "-"
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def word(text: str, width: int = 16) -> str:
    """A token as Python writes it, without what would steer a terminal, its end left out where it is long."""
    shown = "".join(one if one.isprintable() and not unicodedata.combining(one) else ascii(one)[1:-1] for one in text)
    while cells(shown) > width:
        shown = shown.removesuffix("…")[:-1] + "…"
    return shown


def padded(text: str, width: int, left: bool) -> str:
    """Text with blanks to this many cells."""
    blanks = " " * (width - cells(text))
    return text + blanks if left else blanks + text


def cells(text: str) -> int:
    """How many columns of the screen a text takes."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)
