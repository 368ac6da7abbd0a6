"""Heat in the terminal: as colour, or where there is none as a digit, with the legend that says what it stands for."""

from dataclasses import dataclass

from rich.color import Color
from rich.console import Console
from rich.text import Text

from regard.show.ramp import coarse, shade
from regard.show.scale import Scale
from regard.show.terminal import palette, tint

STEPS = (5, 4, 3, 2)  # swatches of a legend, as many as fit
PIPED = 60  # lines of a picture that is written to a file
BELOW = 7  # lines of the screen beside a picture: its titles and the prompt
NARROW = 20  # cells of a row, at least


@dataclass(frozen=True)
class Window:
    """What there is to draw on: cells across, lines, and the colours; None where these or the blocks to fill are missing."""

    width: int
    lines: int
    colours: str | None


@dataclass(frozen=True)
class Heat:
    """What values are as colours or digits: a scale and its ends."""

    scale: Scale
    ends: tuple[float, float]

    def share(self, value: float) -> float:
        """How far along the scale a value is."""
        return self.scale.share(value, self.ends)

    def digit(self, value: float) -> str:
        """A tenth of the scale, 1 to 9, and a dot for less."""
        return "·123456789"[min(int(10 * self.share(value) + 1e-9), 9)]

    def legend(self, colours: str | None, room: int) -> Text:
        """The scale with its numbers, each in its colour or beside its digit: as many as there is room for."""
        if colours is None:
            low, high = (short(self.scale.at(share, self.ends)) for share in (0.1, 0.9))
            return Text(f"· below {low}, 9 from {high} on")
        for count in STEPS:
            shares = [step / (count - 1) for step in range(count)]
            line = Text.assemble(*((f" {short(self.scale.at(one, self.ends))} ", tint(one, colours)) for one in shares))
            if line.cell_len <= room:
                break
        return line


def window(console: Console) -> Window:
    """What a console has room for."""
    lines = console.height if console.is_terminal else PIPED
    blocks = console.encoding.lower().startswith("utf")
    return Window(max(console.width, NARROW), max(lines - BELOW, 4), palette(console) if blocks else None)


def short(value: float) -> str:
    """A number of a legend."""
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}".rstrip("0").rstrip(".") if value < 1e4 else f"{value:.0e}"


def colour(share: float, colours: str) -> Color:
    """The colour of a share, of those there are."""
    return Color.from_ansi(coarse(share)[0]) if colours == "256" else Color.from_rgb(*shade(share))
