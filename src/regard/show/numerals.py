"""Number formats: exact in a calculation, rounded in a sentence, aligned in a table.

The numbers are float32 results, whose last bits differ between processors, and are formatted alike on all of them: a number
within NOISE of one with fewer places is written as that one, and one within NOISE of a half is rounded as the half is, away
from 0.
"""

import math
from collections.abc import Sequence

from torch import Tensor

PLACES = 4  # decimal places, as the lectures print
NOISE = 2**-21  # relative: at least 4 units in the last place of float32, more than the error of short sums


def numeral(number: Tensor | float, *, within: bool = False) -> str:
    """Format a number of a calculation with at most four places; if `within`, a negative number is put in parentheses."""
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
    """Format a number of a sentence: two decimal places, or two significant digits below 0.095 and from 1e6 on."""
    value = float(number)
    if not math.isfinite(value) or value == 0:
        return numeral(value)
    return f"{from_half(value, 2):.2f}" if 0.095 <= increased(value) < 1e6 else f"{from_half(value):.2g}"


def aligned(numbers: list[float]) -> list[str]:
    """Format the numbers of a table alike, with the decimal places they need: at most four, or two from 1000 on.

    Exponents are used where the largest is at least 1e6 or below 1e-3.
    """
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    greatest = increased(max(sizes, default=0))
    if greatest >= 1e6 or 0 < greatest < 1e-3:
        return [text(number, ".3e") for number in numbers]
    most = PLACES if greatest < 1e3 else 2
    places = needed(sizes, most)
    return [text(number, f".{places}f", places) for number in numbers]


def needed(sizes: Sequence[float], most: int) -> int:
    """Return the fewest decimal places, at most `most`, in which each of these numbers can be written."""
    return next((places for places in range(most) if all(exact(size, places) for size in sizes)), most)


def exact(number: float, places: int) -> bool:
    """Return whether a float32 result has at most `places` decimal places, within NOISE."""
    return math.isclose(round(number, places), number, rel_tol=NOISE)


def increased(number: float) -> float:
    """Compute the magnitude of a number plus its possible error."""
    return abs(number) * (1 + NOISE)


def from_half(number: float, places: int | None = None) -> float:
    """Move a number away from 0 by its possible error, so that one just below a half of its last place is rounded up.

    The last place is the decimal place `places`; None means that of at most four significant digits.
    """
    if places is not None and exact(number, places):
        return number
    most = math.inf if places is None else 10.0**-places / 8
    return number + math.copysign(min(abs(number) * NOISE, most), number)


def text(number: float, style: str, places: int | None = None) -> str:
    """Format one number; exactly 0 is written 0, and nothing is written -0."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    written = f"{from_half(number, places):{style}}"
    return written[1:] if written.startswith("-") and not float(written) else written
