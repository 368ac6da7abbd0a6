"""Examples in the terminal: tables with words on rows and columns, heat as background color, lines of arithmetic."""

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

import torch
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.lectures.scenes import Line, Panel, Scene
from regard.printable import LINES, ReaderGoneError, escape_controls
from regard.show.numerals import aligned
from regard.show.ramp import PAPER, coarse, ink, shade

LABEL, HEADER, GAP = 16, 12, 3  # cells: maximum of a row label and of a column header; gap between two tables
PROSE = 100  # maximum cells of a line of prose
EQUALS, SIGN = re.compile(r" (?== )"), re.compile(r"(?:^| )([=+/-]) ")
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]+")


@dataclass(frozen=True)
class View:
    """The part of a long sentence that is shown: `count` words from the index `start` on, numbered if `numbers`.

    Vectors show `count` numbers too, or `wide` where that is not 0.
    """

    start: int = 0
    count: int = 12
    numbers: bool = False
    wide: int = 0

    def part(self, length: int, moves: bool) -> range:
        """Return the indices shown of an axis, from `start` on if the axis moves with the view, else from 0."""
        start = min(self.start, max(length - 1, 0)) if moves else 0
        return range(start, min(start + self.count, length))

    def across(self, panel: Panel) -> range:
        """Return the columns of a table that are shown."""
        if panel.axes == "pairs":
            return self.part(len(panel.columns), True)
        return range(min(self.wide or self.count, len(panel.columns)))


class Screen(Console):
    """A console that escapes control characters in any text, except for its own colors and bars.

    Raises ReaderGoneError where the reader of the output has gone; rich would exit with status 1.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escape_controls(one.text, LINES), one.style)

    def on_broken_pipe(self) -> None:
        raise ReaderGoneError


def open_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """Open a console that interprets no markup, and writes no escape codes to a pipe or where NO_COLOR is set."""
    stream = sys.stdout if file is None else file
    stream = getattr(stream, "unescaped", stream)  # Screen escapes by itself, and has its own colors
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal that cannot show √ shows ?
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich keeps bold and italics
    return Screen(file=stream, width=width, color_system=colours, markup=False, emoji=False, highlight=False)


def print_unpadded(console: Console, renderable: RenderableType) -> None:
    """Print something without the spaces with which rich fills its lines."""
    with console.capture() as captured:
        console.print(renderable)
    text = "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
    try:
        console.file.write(text + "\n")
    except BrokenPipeError:
        raise ReaderGoneError from None


def show(console: Console, scene: Scene, number: int, view: View) -> None:
    """Print a `Scene`: its number, name and formula, its tables or lines, and its sentence."""
    heading = Text(f"{number}  {literal(scene.heading)}")
    heading.stylize("bold", 0, len(heading) - len(literal(scene.formula)))
    write(console, heading, hang=3)
    for line in tables(scene.panels, view, console.width, palette(console)):
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    calculations(console, scene.lines)
    for note in left_out(scene.panels, view):
        write(console, Text(note, style="dim"))
    write(console, Text(literal(scene.sentence), style="italic"))
    console.print()


def write(console: Console, text: Text, hang: int = 0) -> None:
    """Print text over as many lines as it needs, the later ones indented."""
    width = min(console.width, PROSE)
    first, *rest = text.wrap(console, width)
    lines = [first]
    if rest:
        hang = hang if width > 4 * hang else 0
        lines += [Text.assemble(" " * hang, line) for line in Text(" ").join(rest).wrap(console, width - hang)]
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop")


def palette(console: Console) -> str | None:
    """Return the colors available for heat: "truecolor", "256", or None where they are too few."""
    return console.color_system if console.color_system in ("256", "truecolor") else None


def literal(text: str) -> str:
    """Escape control characters in text, and keep right-to-left text from reordering what follows."""
    return RIGHT_TO_LEFT.sub(lambda found: found[0] + "\u200e", escape_controls(text))  # numbers after it keep their columns


def fitted(text: str, width: int) -> str:
    """Cut text at its end to at most `width` cells."""
    shown = literal(text)
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def ending(text: str, width: int) -> str:
    """Cut text at its beginning to at most `width` cells."""
    shown = literal(text)
    if cell_len(shown) <= width:
        return shown
    while shown and cell_len(shown) > width - 1:
        shown = shown[1:]
    return f"…{shown}" if shown else ""


def left_out(panels: Sequence[Panel], view: View) -> Iterator[str]:
    """Generate a note on the columns of numbers that the tables do not show; omitted words are up to the caller."""
    cut = [panel for panel in panels if panel.axes != "pairs" and len(view.across(panel)) < len(panel.columns)]
    if cut:
        widest = max(cut, key=lambda panel: len(panel.columns))
        count = len(widest.columns)
        yield f"columns 1 to {len(view.across(widest))} of {count}; --rows {count} shows all"


def tables(panels: Sequence[Panel], view: View, width: int, colours: str | None) -> list[Text]:
    """Format the lines of all tables, side by side where they fit."""
    blocks = [block for panel in panels for block in pieces(panel, view, width, colours)]
    lines: list[Text] = []
    for row in packed(blocks, width):
        lines += [Text()] if lines else []
        lines += abreast(row)
    if not colours:
        for line in lines:
            line.rstrip()
    return lines


def abreast(blocks: Sequence[list[Text]]) -> Iterator[Text]:
    """Generate the lines of several blocks side by side."""
    for index in range(max(len(block) for block in blocks)):
        whole, edge = Text(), 0
        for block in blocks:
            whole.append(" " * (edge - whole.cell_len))
            if index < len(block):
                whole.append_text(block[index])
            edge += max(line.cell_len for line in block) + GAP
        yield whole


def packed(blocks: Sequence[list[Text]], width: int) -> Iterator[list[list[Text]]]:
    """Generate rows of blocks that are no wider than the screen."""
    row: list[list[Text]] = []
    used = 0
    for block in blocks:
        wide = max(line.cell_len for line in block)
        if row and used + GAP + wide > width:
            yield row
            row, used = [], 0
        used += wide + (GAP if row else 0)
        row.append(block)
    if row:
        yield row


def pieces(panel: Panel, view: View, width: int, colours: str | None) -> Iterator[list[Text]]:
    """Generate a panel as one block of lines, or as several where its columns do not fit on the screen."""
    rows = view.part(len(panel.rows), panel.axes != "numbers")
    columns = view.across(panel)
    texts = written(panel.values, rows, columns)
    heats = heat(panel.values)
    numbers = view.numbers and panel.axes != "numbers"
    labels = [f"{row + 1} " * numbers + fitted(panel.rows[row], LABEL) for row in rows]
    side = max((cell_len(label) for label in labels), default=0) + 1
    headers = [fitted(panel.columns[column], HEADER) for column in columns]
    wide = [max(cell_len(header), *(len(line[index]) for line in texts)) + 2 for index, header in enumerate(headers)]
    for chunk in chunks(wide, width - side):
        block = [Text(literal(panel.title), style="bold")] if panel.title else []
        if numbers and panel.axes == "pairs":
            block.append(beside("", side, [Text(padded(str(columns[i] + 1), wide[i]), style="dim") for i in chunk]))
        block.append(beside("", side, [Text(padded(headers[i], wide[i])) for i in chunk]))
        for label, row, line in zip(labels, rows, texts, strict=True):
            cells = [Text(padded(line[i], wide[i]), style=tint(float(heats[row, columns[i]]), colours)) for i in chunk]
            block.append(beside(label, side, cells))
        yield block


def written(values: Tensor, rows: range, columns: range) -> list[list[str]]:
    """Format the numbers of a table alike."""
    part = values[rows.start : rows.stop, columns.start : columns.stop]
    flat = aligned([float(number) for number in part.flatten()])
    return [flat[start : start + len(columns)] for start in range(0, len(flat), max(len(columns), 1))]


def heat(values: Tensor) -> Tensor:
    """Compute the position of each number between the smallest, 0, and the largest, 1; NaN where it is not finite."""
    values = values.double()
    finite = values.isfinite()
    if not finite.any():
        return torch.full_like(values, torch.nan)
    low, high = values[finite].min(), values[finite].max()
    share = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    return share.where(finite, torch.nan)


def tint(share: float, colours: str | None) -> Style:
    """Return the style of a cell: none without colors, dim where there is no heat."""
    if colours is None:
        return Style()
    if math.isnan(share):
        return Style(dim=True)
    if colours == "256":
        number, paper = coarse(share)
        return Style(color=Color.from_ansi(231 if ink(paper) == PAPER else 16), bgcolor=Color.from_ansi(number))
    paper = shade(share)
    return Style(color=Color.from_rgb(*ink(paper)), bgcolor=Color.from_rgb(*paper))


def chunks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split the columns into as few runs as fit beside the labels, as even as possible."""
    least = runs(widths, room)
    for tighter in range(max(widths, default=0), room):  # the narrowest room that needs no more runs
        if len(even := runs(widths, tighter)) == len(least):
            return even
    return least


def runs(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split the columns into runs, each with as many as fit, at least one."""
    found: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if found[-1] and used + width > room:
            found.append([])
            used = 0
        found[-1].append(index)
        used += width
    return found


def padded(text: str, width: int) -> str:
    """Right-align text in a cell, with a space on each side."""
    return " " * (width - 1 - cell_len(text)) + text + " "


def beside(label: str, side: int, cells: Sequence[Text]) -> Text:
    """Format a line: the label of the row, and its cells."""
    return Text.assemble(label + " " * (side - cell_len(label)), *cells)


def calculations(console: Console, lines: Sequence[Line]) -> None:
    """Print lines of arithmetic, each after its label, or below it on a narrow screen."""
    labels = [fitted(line.label, LABEL) for line in lines]
    side = max((cell_len(label) for label in labels), default=0) + 2
    above = side > console.width // 3
    for label, line in zip(labels, lines, strict=True):
        margin = "" if above else label + " " * (side - cell_len(label))
        if above:
            console.print(Text(label, style="bold"), no_wrap=True, overflow="crop")
        for part in broken(literal(line.calculation), console.width - (2 if above else side)):
            console.print(Text.assemble((margin or "  ", "bold"), part), no_wrap=True, overflow="crop")
            margin = "" if above else " " * side


def broken(calculation: str, width: int) -> Iterator[str]:
    """Split a calculation into lines of `width` cells: before each =, and at spaces where that is not enough.

    No line ends in a sign: the sign starts the next line.
    """
    if cell_len(calculation) <= width:
        yield calculation
        return
    for side in EQUALS.split(calculation):
        line = ""
        for part in SIGN.sub(" \\1\u2007", side).lstrip(" ").split(" "):
            if line and cell_len(line) + 1 + cell_len(part) > width:
                yield line.replace("\u2007", " ")
                line = part
            else:
                line = f"{line} {part}" if line else part
        yield line.replace("\u2007", " ")
