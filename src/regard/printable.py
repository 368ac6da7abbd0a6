"""Text that a terminal shows and does not obey: control characters, directions and surrogates are written as escapes."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TextIO

# controls, ends of lines and paragraphs, directions, surrogates
STEERING = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
LINES = "\n\t"  # what text of several lines needs


def escape_controls(text: str, keep: str = "") -> str:
    """Return the text with each character that steers a terminal, or that no encoding has, written as Python escapes it.

    Those in `keep` stay as they are.
    """
    return steering(keep).sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@cache
def steering(keep: str) -> "re.Pattern[str]":
    """Compile the pattern of what is escaped."""
    return re.compile(f"(?![{re.escape(keep)}])[{STEERING}]" if keep else f"[{STEERING}]")


class ReaderGoneError(BrokenPipeError):
    """Nobody reads any more what is printed, as after `| head`."""


class EscapingStream:
    """A text stream that writes control characters as escapes, but for the ends of lines, tabs and those in `keep`.

    Raises ReaderGoneError where its reader is gone. `unescaped` is the stream behind it, for what writes colours itself.
    """

    def __init__(self, stream: TextIO, keep: str = LINES) -> None:
        self.unescaped, self.keep = stream, keep

    def write(self, text: str) -> int:
        try:
            self.unescaped.write(escape_controls(text, self.keep))
        except BrokenPipeError:
            raise ReaderGoneError from None
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.unescaped.flush()
        except BrokenPipeError:
            raise ReaderGoneError from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)
