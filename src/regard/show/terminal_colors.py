"""Heat in the terminal as colors, or as digits where there is no color, with a legend."""

import math
from dataclasses import dataclass

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from regard.show.color_ramp import PAPER as WHITE
from regard.show.color_ramp import RGB, choose_ink, find_signed_terminal_shade, find_terminal_shade, shade, shade_signed
from regard.show.color_scale import ColorScale, Signed
from regard.show.terminal import get_palette

NEAR_ZERO = 0.05  # part of a signed scale that has the color of the terminal
SWATCH_COUNTS = (5, 4, 3, 2)  # swatches of a legend, the most that fit
PIPE_LINES = 60  # lines of a picture that is written to a file
RESERVED_LINES = 7  # lines of the screen for titles and the prompt
MIN_WIDTH = 20  # minimum cells of a row


@dataclass(frozen=True)
class TerminalArea:
    """The area to draw on: width in cells, lines, and colors; None where colors or block characters are missing."""

    width: int
    lines: int
    colors: str | None


@dataclass(frozen=True)
class Heat:
    """A scale with its ends, which maps values to colors or digits."""

    scale: ColorScale
    ends: tuple[float, float]

    @property
    def is_signed(self) -> bool:
        """Return whether values below 0 have a hue, or letters, of their own."""
        return isinstance(self.scale, Signed)

    def share(self, value: float) -> float:
        """Return the position of a value on the scale, 0 to 1."""
        return self.scale.share(value, self.ends)

    def find_paper(self, value: float, colours: str) -> tuple[Color, RGB] | None:
        """Return the terminal color of a value, and nearly the same as RGB; None if it is near 0 on a signed scale."""
        share = self.share(value)
        distance = 2 * share - 1
        if self.is_signed and abs(distance) < NEAR_ZERO:
            return None
        if colours == "256":
            number, paper = find_signed_terminal_shade(distance) if self.is_signed else find_terminal_shade(share)
            return Color.from_ansi(number), paper
        paper = shade_signed(distance) if self.is_signed else shade(share)
        return Color.from_rgb(*paper), paper

    def get_style(self, value: float, colours: str | None) -> Style:
        """Return the style of a cell: none without colors or near 0 on a signed scale, dim for NaN."""
        if colours is None:
            return Style()
        if math.isnan(self.share(value)):
            return Style(dim=True)
        found = self.find_paper(value, colours)
        return Style() if found is None else Style(color=get_ink(found[1], colours), bgcolor=found[0])

    def get_digit(self, value: float) -> str:
        """Return the tenth of the scale that a value lies in, 1 to 9, or a dot if less; a question mark for NaN.

        On a signed scale the tenths of values below 0 are a to i.
        """
        share = self.share(value)
        if math.isnan(share):
            return "?"
        size = abs(2 * share - 1) if self.is_signed else share
        return ("·abcdefghi" if self.is_signed and share < 0.5 else "·123456789")[min(int(10 * size + 1e-9), 9)]

    def render_legend(self, colours: str | None, room: int) -> Text:
        """Format the scale with its numbers, in their colors or beside their digits, as many as fit."""
        if colours is None:
            low, high = (self.scale.get_value((1 + share) / 2 if self.is_signed else share, self.ends) for share in (0.1, 0.9))
            if self.is_signed:
                return Text(f"· less than {format_value(low)} in size; 9 above 0 and i below: {format_value(high)} or more")
            return Text(f"· below {format_value(low)}, 9 from {format_value(high)} on")
        for count in SWATCH_COUNTS:
            values = [self.scale.get_value(step / (count - 1), self.ends) for step in range(count)]
            line = Text.assemble(*((f" {self.format_mark(value)} ", self.get_style(value, colours)) for value in values))
            if line.cell_len <= room:
                break
        return line

    def format_mark(self, value: float) -> str:
        """Format a number of the legend."""
        return f"{value:+.2g}" if self.is_signed and value else format_value(value)


def measure_window(console: Console) -> TerminalArea:
    """Return the drawing area of a console."""
    lines = console.height if console.is_terminal else PIPE_LINES
    blocks = console.encoding.lower().startswith("utf")
    return TerminalArea(max(console.width, MIN_WIDTH), max(lines - RESERVED_LINES, 4), get_palette(console) if blocks else None)


def format_value(value: float) -> str:
    """Format a number of a legend."""
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}".rstrip("0").rstrip(".") if value < 1e4 else f"{value:.0e}"


def get_ink(paper: RGB, colours: str) -> Color:
    """Return black or white as a terminal color, whichever is more readable on the paper."""
    ink = choose_ink(paper)
    return Color.from_ansi(231 if ink == WHITE else 16) if colours == "256" else Color.from_rgb(*ink)


def get_color(share: float, colours: str) -> Color:
    """Return the terminal color of a share, in the palette `colours`."""
    return Color.from_ansi(find_terminal_shade(share)[0]) if colours == "256" else Color.from_rgb(*shade(share))
