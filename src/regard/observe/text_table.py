"""Text tables: rows of cells as aligned lines."""

import math
import unicodedata
from collections.abc import Sequence

WIDTH = 80  # columns of the screen
LEAST_NAME = 12  # columns of the name of a row


def align_columns(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Return a line of titles and one line for each row, aligned to the right except the columns named in `left`."""
    lines = [list(titles), *map(list, rows)]
    widths = [max(measure_width(line[n]) for line in lines) for n in range(len(titles))]
    return [
        "  ".join(
            pad_cell(cell, width, title in left) for cell, width, title in zip(line, widths, titles, strict=True)
        ).rstrip()
        for line in lines
    ]


def count_fitting_columns(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> int:
    """Return the number of leading columns that fit the width."""
    total = -2
    for n in range(len(titles)):
        total += 2 + max(measure_width(line[n]) for line in (titles, *rows))
        if total > width:
            return n
    return len(titles)


def align_in_blocks(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return aligned lines with all columns, those that do not fit the width below, beside the first column again.

    The cells of the first column are shortened to what the two widest others leave of the width, but not below LEAST_NAME.
    """
    widths = sorted(2 + max(measure_width(line[n]) for line in (titles, *rows)) for n in range(1, len(titles)))
    room = max(LEAST_NAME, width - sum(widths[-2:]))
    rows = [[format_token(row[0], room), *row[1:]] for row in rows]
    lines: list[str] = []
    first = 1
    while first < len(titles):
        wanted = [0, *range(first, len(titles))]
        block = [[line[n] for n in wanted] for line in (titles, *rows)]
        count = max(count_fitting_columns(block[0], block[1:], width), 2)
        lines += align_columns(block[0][:count], [line[:count] for line in block[1:]], left=titles[:1])
        first += count - 1
    return lines


def format_score(number: float) -> str:
    """Format a number with two digits after the point, fewer if it is large; - for NaN."""
    if math.isnan(number):
        return "-"
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def format_token(text: str, width: int = 16) -> str:
    """Return a token as Python writes it, without control and combining characters, shortened to the width."""
    shown = "".join(one if one.isprintable() and not unicodedata.combining(one) else ascii(one)[1:-1] for one in text)
    while measure_width(shown) > width:
        shown = shown.removesuffix("…")[:-1] + "…"
    return shown


def pad_cell(text: str, width: int, left: bool) -> str:
    """Return text padded with blanks to this many columns of the screen."""
    blanks = " " * (width - measure_width(text))
    return text + blanks if left else blanks + text


def measure_width(text: str) -> int:
    """Return how many columns of the screen a text takes."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as `0 and 1`, `0 to 3`, or `0, 2 and 5 to 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
