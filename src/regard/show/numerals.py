"""Numbers as people read them: as in a calculation, roughly in a sentence, aligned in a table.

They are results of float32, of which the last bits differ from processor to processor, and are written alike on all of them: a
number within NOISE of one with fewer places is written as that one, and one within NOISE of a half is rounded as the half is,
away from 0.
"""

import math
from collections.abc import Sequence

from torch import Tensor

PLACES = 4  # as the lectures print
NOISE = 2**-21  # of a number: 4 units in the last place of float32 at least, more than short sums of it are off by


def numeral(number: Tensor | float, *, within: bool = False) -> str:
    """A number of a calculation, to four places and no more than it needs; in brackets where a sign would stand within."""
    value = float(number)
    if not math.isfinite(value):
        text = str(value)
    elif value and not 1e-4 <= increased(value) < 1e6:
        text = f"{from_half(value):.4g}"
    else:
        places = needed([abs(value)], PLACES)
        text = f"{from_half(value, places):.{places}f}"
        text = text.rstrip("0").rstrip(".") if places else text
    text = "0" if text == "-0" else text
    return f"({text})" if within and text.startswith("-") else text


def rough(number: Tensor | float) -> str:
    """A number of a sentence: two places, or two digits where it is smaller than that."""
    value = float(number)
    if not math.isfinite(value) or value == 0:
        return numeral(value)
    return f"{from_half(value, 2):.2f}" if 0.095 <= increased(value) < 1e6 else f"{from_half(value):.2g}"


def aligned(numbers: list[float]) -> list[str]:
    """The numbers of one table in one format: the places they need, four at most; exponents where four would say nothing."""
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    greatest = increased(max(sizes, default=0))
    if greatest >= 1e6 or 0 < greatest < 1e-3:
        return [text(number, ".3e") for number in numbers]
    most = PLACES if greatest < 1e3 else 2
    places = needed(sizes, most)
    return [text(number, f".{places}f", places) for number in numbers]


def needed(sizes: Sequence[float], most: int) -> int:
    """The fewest places in which each of these numbers can be written, `most` at most."""
    return next((places for places in range(most) if all(exact(size, places) for size in sizes)), most)


def exact(number: float, places: int) -> bool:
    """Whether a result of float32 is one of so many places."""
    return math.isclose(round(number, places), number, rel_tol=NOISE)


def increased(number: float) -> float:
    """The size of a number, by as much larger as it may be off."""
    return abs(number) * (1 + NOISE)


def from_half(number: float, places: int | None = None) -> float:
    """A number moved away from 0 by as much as it may be off, so that one just below a half of its last place is rounded up.

    The last place is that of `places` after the point; None: of four digits at most, whatever the number.
    """
    if places is not None and exact(number, places):
        return number
    most = math.inf if places is None else 10.0**-places / 8
    return number + math.copysign(min(abs(number) * NOISE, most), number)


def text(number: float, style: str, places: int | None = None) -> str:
    """One number; what is exactly 0 is written 0, and nothing is written -0."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    written = f"{from_half(number, places):{style}}"
    return written[1:] if written.startswith("-") and not float(written) else written
