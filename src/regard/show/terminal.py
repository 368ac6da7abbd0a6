"""Examples in the terminal: tables with words on rows and columns, heat as background color, lines of arithmetic."""

import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from regard.lectures.example_steps import ExampleStep, Line, StepTable
from regard.show.color_ramp import PAPER, choose_ink, find_terminal_shade, shade
from regard.show.number_format import format_aligned
from regard.terminal_escapes import LINES, ReaderGoneError, escape_controls

LABEL_CELLS, HEADER_CELLS, GAP = 16, 12, 3  # cells: maximum of a row label and of a column header; gap between two tables
MAX_PROSE_CELLS = 100  # maximum cells of a line of prose
QUOTED = re.compile(r"""(?<!\w)(['"])(?: +\S*? *|\S+? +)\1(?!\w)""")  # a token with a space at its beginning or end
KEPT_SPACE = "\ufdd0"  # no character of any text: a space at which no line ends
EQUALS, SIGN = re.compile(r" (?== )"), re.compile(r"(?:^| )([=+/-]) ")
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]+")


@dataclass(frozen=True)
class TableView:
    """The part of a long sentence that is shown: `count` words from the index `start` on, numbered if `numbers`.

    Vectors show `count` numbers too, or `wide` where that is not 0.
    """

    start: int = 0
    count: int = 12
    is_numbered: bool = False
    vector_count: int = 0

    def get_range(self, length: int, moves: bool) -> range:
        """Return the indices shown of an axis, from `start` on if the axis moves with the view, else from 0."""
        start = min(self.start, max(length - 1, 0)) if moves else 0
        return range(start, min(start + self.count, length))

    def get_columns(self, panel: StepTable) -> range:
        """Return the columns of a table that are shown."""
        if panel.axes == "pairs":
            return self.get_range(len(panel.columns), True)
        return range(min(self.vector_count or self.count, len(panel.columns)))


class EscapingConsole(Console):
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
    if width is None and "COLUMNS" in os.environ:
        width = shutil.get_terminal_size().columns  # rich takes a 0 for a width
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich keeps bold and italics
    return EscapingConsole(file=stream, width=width, color_system=colours, markup=False, emoji=False, highlight=False)


def print_unpadded(console: Console, renderable: RenderableType) -> None:
    """Print something without the spaces with which rich fills its lines."""
    with console.capture() as captured:
        console.print(renderable)
    text = "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
    try:
        console.file.write(text + "\n")
    except BrokenPipeError:
        raise ReaderGoneError from None


def print_step(console: Console, step: ExampleStep, number: int, view: TableView) -> None:
    """Print an `ExampleStep`: its number, name and formula, its tables or lines, and its sentence."""
    heading = Text(f"{number}  {escape_text(step.heading)}")
    heading.stylize("bold", 0, len(heading) - len(escape_text(step.formula)))
    print_wrapped(console, heading, hang=3)
    for line in render_tables(step.panels, view, console.width, get_palette(console)):
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    print_calculations(console, step.lines)
    for note in describe_hidden_columns(step.panels, view):
        print_wrapped(console, Text(note, style="dim"))
    print_wrapped(console, Text(escape_text(step.sentence), style="italic"))
    console.print()


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines that were formatted for the console's width."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop")


def print_wrapped(console: Console, text: Text, hang: int = 0) -> None:
    """Print text over as many lines as it needs, the later ones indented; a quoted token with its spaces stays on one line."""
    width = min(console.width, MAX_PROSE_CELLS)
    text = text.copy()
    text.plain = keep_quoted_tokens(text.plain, width - hang)
    first, *rest = text.wrap(console, width)
    lines = [first]
    if rest:
        hang = hang if width > 4 * hang else 0
        for line in rest:
            line.rstrip()  # wrap leaves the space at which a line ends
        lines += [Text.assemble(" " * hang, line) for line in Text(" ").join(rest).wrap(console, width - hang)]
    for line in lines:
        line.rstrip()
        line.plain = line.plain.replace(KEPT_SPACE, " ")
        console.print(line, no_wrap=True, overflow="crop")


def keep_quoted_tokens(text: str, width: int) -> str:
    """Return text with KEPT_SPACE for the spaces in quoted tokens, unless what then stands together is wider than a line."""
    kept = QUOTED.sub(lambda found: found[0].replace(" ", KEPT_SPACE), text)
    return re.sub(r"\S+", lambda found: found[0] if cell_len(found[0]) <= width else found[0].replace(KEPT_SPACE, " "), kept)


def print_entries(console: Console, entries: Sequence[str], hang: int, style: str) -> None:
    """Print entries two spaces apart on indented lines, as many as they need; only one wider than a line is broken."""
    width = min(console.width, MAX_PROSE_CELLS)
    lines: list[str] = []
    for entry in entries:
        if lines and cell_len(f"{lines[-1]}  {entry}") <= width:
            lines[-1] += f"  {entry}"
        else:
            lines.append(" " * hang + entry)
    for line in lines:
        print_wrapped(console, Text(line, style=style), hang)


def get_palette(console: Console) -> str | None:
    """Return the colors available for heat: "truecolor", "256", or None where they are too few."""
    return console.color_system if console.color_system in ("256", "truecolor") else None


def escape_text(text: str) -> str:
    """Escape control characters in text, and keep right-to-left text from reordering what follows."""
    return RIGHT_TO_LEFT.sub(lambda found: found[0] + "\u200e", escape_controls(text))  # numbers after it keep their columns


def quote_token(word: str) -> str:
    """Quote a token, so that its spaces are visible."""
    quote = '"' if "'" in word and '"' not in word else "'"  # as Python does
    return f"{quote}{escape_text(word)}{quote}"


def truncate_end(text: str, width: int) -> str:
    """Cut text at its end to at most `width` cells."""
    shown = escape_text(text)
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def truncate_start(text: str, width: int) -> str:
    """Cut text at its beginning to at most `width` cells."""
    shown = escape_text(text)
    if cell_len(shown) <= width:
        return shown
    while shown and cell_len(shown) > width - 1:
        shown = shown[1:]
    return f"…{shown}" if shown else ""


def describe_hidden_columns(panels: Sequence[StepTable], view: TableView) -> Iterator[str]:
    """Generate a note on the columns of numbers that the tables do not show; omitted words are up to the caller."""
    cut = [panel for panel in panels if panel.axes != "pairs" and len(view.get_columns(panel)) < len(panel.columns)]
    if cut:
        widest = max(cut, key=lambda panel: len(panel.columns))
        count = len(widest.columns)
        yield f"columns 1 to {len(view.get_columns(widest))} of {count}; --rows {count} shows all"


def render_tables(panels: Sequence[StepTable], view: TableView, width: int, colours: str | None) -> list[Text]:
    """Format the lines of all tables, side by side where they fit."""
    blocks = [block for panel in panels for block in render_panel(panel, view, width, colours)]
    lines: list[Text] = []
    for row in pack_blocks(blocks, width):
        lines += [Text()] if lines else []
        lines += join_blocks(row)
    if not colours:
        for line in lines:
            line.rstrip()
    return lines


def join_blocks(blocks: Sequence[list[Text]]) -> Iterator[Text]:
    """Generate the lines of several blocks side by side."""
    for index in range(max(len(block) for block in blocks)):
        whole, edge = Text(), 0
        for block in blocks:
            whole.append(" " * (edge - whole.cell_len))
            if index < len(block):
                whole.append_text(block[index])
            edge += max(line.cell_len for line in block) + GAP
        yield whole


def pack_blocks(blocks: Sequence[list[Text]], width: int) -> Iterator[list[list[Text]]]:
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


def render_panel(panel: StepTable, view: TableView, width: int, colours: str | None) -> Iterator[list[Text]]:
    """Generate a panel as one block of lines, or as several where its columns do not fit on the screen."""
    rows = view.get_range(len(panel.rows), panel.axes != "numbers")
    columns = view.get_columns(panel)
    texts = format_numbers(panel.numbers, rows, columns)
    heats = compute_heat(panel.numbers)
    numbers = view.is_numbered and panel.axes != "numbers"
    labels = [f"{row} " * numbers + truncate_end(panel.rows[row], LABEL_CELLS) for row in rows]
    side = max((cell_len(label) for label in labels), default=0) + 1
    headers = [truncate_end(panel.columns[column], HEADER_CELLS) for column in columns]
    widths = [max(cell_len(header), *(len(line[index]) for line in texts)) + 2 for index, header in enumerate(headers)]
    for chunk in split_columns(widths, width - side):
        block = [Text(escape_text(panel.title), style="bold")] if panel.title else []
        if numbers and panel.axes == "pairs":
            block.append(join_cells("", side, [Text(pad_cell(str(columns[i]), widths[i]), style="dim") for i in chunk]))
        block.append(join_cells("", side, [Text(pad_cell(headers[i], widths[i])) for i in chunk]))
        for label, row, line in zip(labels, rows, texts, strict=True):
            cells = [Text(pad_cell(line[i], widths[i]), style=get_heat_style(heats[row][columns[i]], colours)) for i in chunk]
            block.append(join_cells(label, side, cells))
        yield block


def format_numbers(numbers: Sequence[Sequence[float]], rows: range, columns: range) -> list[list[str]]:
    """Format the numbers of a table alike."""
    flat = format_aligned([numbers[row][column] for row in rows for column in columns])
    return [flat[start : start + len(columns)] for start in range(0, len(flat), max(len(columns), 1))]


def compute_heat(numbers: Sequence[Sequence[float]]) -> list[list[float]]:
    """Compute the position of each number between the smallest, 0, and the largest, 1; NaN where it is not finite."""
    finite = [number for row in numbers for number in row if math.isfinite(number)]
    low, size = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return [
        [((number - low) / size if size else 0.0) if math.isfinite(number) else math.nan for number in row] for row in numbers
    ]


def get_heat_style(share: float, colours: str | None) -> Style:
    """Return the style of a cell: none without colors, dim where there is no heat."""
    if colours is None:
        return Style()
    if math.isnan(share):
        return Style(dim=True)
    if colours == "256":
        number, paper = find_terminal_shade(share)
        return Style(color=Color.from_ansi(231 if choose_ink(paper) == PAPER else 16), bgcolor=Color.from_ansi(number))
    paper = shade(share)
    return Style(color=Color.from_rgb(*choose_ink(paper)), bgcolor=Color.from_rgb(*paper))


def split_columns(widths: Sequence[int], room: int) -> list[list[int]]:
    """Split the columns into as few runs as fit beside the labels, as even as possible."""
    least = fill_runs(widths, room)
    for tighter in range(max(widths, default=0), room):  # the narrowest room that needs no more runs
        if len(even := fill_runs(widths, tighter)) == len(least):
            return even
    return least


def fill_runs(widths: Sequence[int], room: int) -> list[list[int]]:
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


def pad_cell(text: str, width: int) -> str:
    """Right-align text in a cell, with a space on each side."""
    return " " * (width - 1 - cell_len(text)) + text + " "


def join_cells(label: str, side: int, cells: Sequence[Text]) -> Text:
    """Format a line: the label of the row, and its cells."""
    return Text.assemble(label + " " * (side - cell_len(label)), *cells)


def print_calculations(console: Console, lines: Sequence[Line]) -> None:
    """Print lines of arithmetic, each after its label, or below it on a narrow screen."""
    labels = [truncate_end(line.label, LABEL_CELLS) for line in lines]
    side = max((cell_len(label) for label in labels), default=0) + 2
    above = side > console.width // 3
    for label, line in zip(labels, lines, strict=True):
        margin = "" if above else label + " " * (side - cell_len(label))
        if above:
            console.print(Text(label, style="bold"), no_wrap=True, overflow="crop")
        for part in wrap_calculation(escape_text(line.calculation), console.width - (2 if above else side)):
            console.print(Text.assemble((margin or "  ", "bold"), part), no_wrap=True, overflow="crop")
            margin = "" if above else " " * side


def wrap_calculation(calculation: str, width: int) -> Iterator[str]:
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
