"""Heat in the terminal as colors, or as digits where there is no color, with a legend."""

import math
from dataclasses import dataclass

from rich.color import Color
from rich.console import Console
from rich.text import Text

from regard.show.color_ramp import find_terminal_shade, shade
from regard.show.color_scale import Scale
from regard.show.terminal import get_heat_style, get_palette

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

    scale: Scale
    ends: tuple[float, float]

    def share(self, value: float) -> float:
        """Return the position of a value on the scale, 0 to 1."""
        return self.scale.share(value, self.ends)

    def get_digit(self, value: float) -> str:
        """Return the tenth of the scale that a value lies in, 1 to 9, or a dot if less; a question mark for NaN."""
        share = self.share(value)
        return "?" if math.isnan(share) else "·123456789"[min(int(10 * share + 1e-9), 9)]

    def render_legend(self, colours: str | None, room: int) -> Text:
        """Format the scale with its numbers, in their colors or beside their digits, as many as fit."""
        if colours is None:
            low, high = (format_value(self.scale.get_value(share, self.ends)) for share in (0.1, 0.9))
            return Text(f"· below {low}, 9 from {high} on")
        for count in SWATCH_COUNTS:
            shares = [step / (count - 1) for step in range(count)]
            line = Text.assemble(
                *((f" {format_value(self.scale.get_value(one, self.ends))} ", get_heat_style(one, colours)) for one in shares)
            )
            if line.cell_len <= room:
                break
        return line


def measure_window(console: Console) -> TerminalArea:
    """Return the drawing area of a console."""
    lines = console.height if console.is_terminal else PIPE_LINES
    blocks = console.encoding.lower().startswith("utf")
    return TerminalArea(max(console.width, MIN_WIDTH), max(lines - RESERVED_LINES, 4), get_palette(console) if blocks else None)


def format_value(value: float) -> str:
    """Format a number of a legend."""
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}".rstrip("0").rstrip(".") if value < 1e4 else f"{value:.0e}"


def get_color(share: float, colours: str) -> Color:
    """Return the terminal color of a share, in the palette `colours`."""
    return Color.from_ansi(find_terminal_shade(share)[0]) if colours == "256" else Color.from_rgb(*shade(share))
