"""What can go wrong through what a caller passed in; caught once, at the boundary."""

from regard.printable import LINES, escape_controls

LONGEST = 500  # characters of a message
BEGINNING = 280  # of them before the gap: what was expected and what came; what to do stands at the end


class RegardError(Exception):
    """The root of every error regard raises on purpose.

    A message has at most 500 characters, its middle left out where it is longer, and no control characters.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(shorten(part) if isinstance(part, str) else part for part in parts))

    def __str__(self) -> str:
        return Exception.__str__(self)  # that of KeyError would put quotes around it


class ShapeError(RegardError, ValueError):
    """Tensors whose axes do not agree."""


class ConfigError(RegardError, ValueError):
    """A setting outside what is possible."""


class OutOfRangeError(ShapeError, ConfigError, IndexError):
    """An index, a layer or a head that is not there: also an IndexError."""


class MissingNameError(ConfigError, KeyError):
    """A name that is not there: also a KeyError."""


class WeightsError(RegardError):
    """A file of weights that is incomplete, damaged or of another model."""


class DataError(RegardError):
    """A text, table or recording that cannot be read as what it should be."""


class TooLargeError(RegardError):
    """An answer larger than the limit on memory."""


def shorten(message: str) -> str:
    """Return a message as it can be printed, with its middle left out where it has more than 500 characters."""
    if len(message) <= LONGEST and len(printed := escape_controls(message, LINES)) <= LONGEST:
        return printed
    gap = f" [... {len(message):,} characters in all ...] "
    first, last = (escape_controls(part, LINES) for part in (message[:LONGEST], message[-LONGEST:]))
    return first[:BEGINNING] + gap + last[len(last) - (LONGEST - BEGINNING - len(gap)) :]
