"""Text that is safe to print on a terminal: control characters, directions and surrogates are escaped."""

import re
from collections.abc import Iterable
from functools import cache

TYPE_CHECKING = False  # as in typing, whose import takes as long as Python's own start
if TYPE_CHECKING:
    from typing import Any, TextIO

# controls, ends of lines and paragraphs, directions, surrogates
CONTROL_CHARACTERS = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
LINES = "\n\t"  # allowed in text of several lines


def escape_controls(text: str, keep: str = "") -> str:
    """Return the text with control characters, and characters that no encoding has, written as Python escapes.

    Those in `keep` stay as they are.
    """
    return compile_escape_pattern(keep).sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@cache
def compile_escape_pattern(keep: str) -> "re.Pattern[str]":
    """Compile the pattern of the characters to escape."""
    return re.compile(f"(?![{re.escape(keep)}])[{CONTROL_CHARACTERS}]" if keep else f"[{CONTROL_CHARACTERS}]")


class ReaderGoneError(BrokenPipeError):
    """The reader of standard output is gone, as after `| head`."""


class EscapingStream:
    """A text stream that writes control characters as escapes, except newlines, tabs and those in `keep`.

    Raises ReaderGoneError if its reader is gone. `unescaped` is the wrapped stream, for code that writes colors itself;
    `is_over` makes it appear closed, while the wrapped stream stays open.
    """

    def __init__(self, stream: "TextIO", keep: str = LINES) -> None:
        self.unescaped, self.keep, self.is_over = stream, keep, False

    @property
    def closed(self) -> bool:
        return self.is_over or self.unescaped.closed

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

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.unescaped, name)
