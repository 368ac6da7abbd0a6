"""Number formats: exact in a calculation, rounded in a sentence, aligned in a table.

The numbers are float32 results, whose last bits differ between processors, and are formatted alike on all of them: a number
within RELATIVE_ERROR of one with fewer places is written as that one, and one within RELATIVE_ERROR of a half is rounded as
the half is, away from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_PLACES = 4  # decimal places, as the lectures print
RELATIVE_ERROR = 2**-21  # relative: at least 4 units in the last place of float32, more than the error of short sums


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun: 1 token, 2,000 tokens."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_number(number: Tensor | float, *, is_inner: bool = False) -> str:
    """Format a number of a calculation with at most four places; if `within`, a negative number is put in parentheses."""
    value = float(number)
    if not math.isfinite(value):
        text = str(value)
    elif value and not 1e-4 <= compute_upper_magnitude(value) < 1e6:
        text = f"{shift_from_half(value):.4g}"
    else:
        places = count_places([abs(value)], MAX_PLACES)
        text = f"{shift_from_half(value, places):.{places}f}"
        text = text.rstrip("0").rstrip(".") if places else text
    text = "0" if text == "-0" else text
    return f"({text})" if is_inner and text.startswith("-") else text


def format_rounded(number: Tensor | float) -> str:
    """Format a number of a sentence: two decimal places, or two significant digits below 0.095 and from 1e6 on."""
    value = float(number)
    if not math.isfinite(value) or value == 0:
        return format_number(value)
    return (
        f"{shift_from_half(value, 2):.2f}" if 0.095 <= compute_upper_magnitude(value) < 1e6 else f"{shift_from_half(value):.2g}"
    )


def format_aligned(numbers: list[float]) -> list[str]:
    """Format the numbers of a table alike, with the decimal places they need: at most four, or two from 1000 on.

    Exponents are used where the largest is at least 1e6 or below 1e-3.
    """
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    greatest = compute_upper_magnitude(max(sizes, default=0))
    if greatest >= 1e6 or 0 < greatest < 1e-3:
        return [format_styled(number, ".3e") for number in numbers]
    most = MAX_PLACES if greatest < 1e3 else 2
    places = count_places(sizes, most)
    return [format_styled(number, f".{places}f", places) for number in numbers]


def count_places(sizes: Sequence[float], most: int) -> int:
    """Return the fewest decimal places, at most `most`, in which each of these numbers can be written."""
    return next((places for places in range(most) if all(is_exact(size, places) for size in sizes)), most)


def is_exact(number: float, places: int) -> bool:
    """Return whether a float32 result has at most `places` decimal places, within RELATIVE_ERROR."""
    return math.isclose(round(number, places), number, rel_tol=RELATIVE_ERROR)


def compute_upper_magnitude(number: float) -> float:
    """Compute the magnitude of a number plus its possible error."""
    return abs(number) * (1 + RELATIVE_ERROR)


def shift_from_half(number: float, places: int | None = None) -> float:
    """Move a number away from 0 by its possible error, so that one just below a half of its last place is rounded up.

    The last place is the decimal place `places`; None means that of at most four significant digits.
    """
    if places is not None and is_exact(number, places):
        return number
    most = math.inf if places is None else 10.0**-places / 8
    return number + math.copysign(min(abs(number) * RELATIVE_ERROR, most), number)


def format_styled(number: float, style: str, places: int | None = None) -> str:
    """Format one number; exactly 0 is written 0, and nothing is written -0."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    text = f"{shift_from_half(number, places):{style}}"
    return text[1:] if text.startswith("-") and not float(text) else text
