"""Numbers as people read them: as in a calculation, roughly in a sentence, aligned in a table."""

import math

from torch import Tensor

PLACES = 4  # as the lectures print


def numeral(number: Tensor | float, *, within: bool = False) -> str:
    """A number of a calculation, to four places and no more than it needs; in brackets where a sign would stand within."""
    value = float(number)
    if not math.isfinite(value):
        text = str(value)
    elif value and not 1e-4 <= abs(value) < 1e6:
        text = f"{value:.4g}"
    else:
        text = f"{value:.{PLACES}f}".rstrip("0").rstrip(".")
    text = "0" if text == "-0" else text
    return f"({text})" if within and text.startswith("-") else text


def rough(number: Tensor | float) -> str:
    """A number of a sentence: two places, or two digits where it is smaller than that."""
    value = float(number)
    if not math.isfinite(value) or value == 0:
        return numeral(value)
    return f"{value:.2f}" if 0.095 <= abs(value) < 1e6 else f"{value:.2g}"


def aligned(numbers: list[float]) -> list[str]:
    """The numbers of one table in one format: the places they need, four at most; exponents where four would say nothing."""
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    greatest = max(sizes, default=0)
    if greatest >= 1e6 or 0 < greatest < 1e-3:
        return [text(number, ".3e") for number in numbers]
    most = PLACES if greatest < 1e3 else 2
    needed = next((places for places in range(most) if all(exact(size, places) for size in sizes)), most)
    return [text(number, f".{needed}f") for number in numbers]


def exact(number: float, places: int) -> bool:
    """Whether a float32 number is one of so many places."""
    return math.isclose(round(number, places), number, rel_tol=2e-7)


def text(number: float, style: str) -> str:
    """One number; what is exactly 0 is written 0, and nothing is written -0."""
    if number == 0:
        return "0"
    if not math.isfinite(number):
        return str(number)
    written = f"{number:{style}}"
    return written[1:] if written.startswith("-") and not float(written) else written
