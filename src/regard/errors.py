"""The errors that a caller can cause; caught once, at the boundary."""

from regard.terminal_escapes import LINES, escape_controls

LONGEST = 500  # characters of a message
LONGEST_BEGINNING = 280  # characters before the gap: what was expected and what came; what to do is at the end


class RegardError(Exception):
    """Base class of every error that regard raises on purpose.

    A message has at most 500 characters, with its middle left out if it is longer, and no control characters.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*(shorten_message(part) if isinstance(part, str) else part for part in parts))

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's would add quotes


class ShapeError(RegardError, ValueError):
    """The axes of tensors do not agree."""


class ConfigError(RegardError, ValueError):
    """A setting is impossible."""


class OutOfRangeError(ShapeError, ConfigError, IndexError):
    """An index, a layer or a head does not exist; also an IndexError."""


class MissingNameError(ConfigError, KeyError):
    """A name does not exist; also a KeyError."""


class WeightsError(RegardError):
    """A file of weights is incomplete, damaged or of another model."""


class DataError(RegardError):
    """A text, table or recording cannot be read in the expected form."""


class TooLargeError(RegardError):
    """A result is larger than the limit on memory."""


def shorten_message(message: str) -> str:
    """Return a message in printable form, with its middle left out if it has more than 500 characters."""
    if len(message) <= LONGEST and len(printed := escape_controls(message, LINES)) <= LONGEST:
        return printed
    gap = f" [... {len(message):,} characters in all ...] "
    first, last = (escape_controls(part, LINES) for part in (message[:LONGEST], message[-LONGEST:]))
    return first[:LONGEST_BEGINNING] + gap + last[len(last) - (LONGEST - LONGEST_BEGINNING - len(gap)) :]
