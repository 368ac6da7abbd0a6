"""The text that a command is given: a file, standard input, or the words themselves."""

import re
import sys
from pathlib import Path

from regard.errors import DataError

BYTE_ORDER_MARK = "\ufeff"  # written by some editors before a text, of which it is no part
FILE_NAME_PATTERN = re.compile(r"[~.]*/\S*|\S*/\S*\.\w+|.*\.(txt|md)|\S*\w\.[a-z]\w{1,4}")  # pattern of a file name


def read_text(text: str) -> str:
    """Return the text of a file, of standard input, or the argument itself."""
    if text == "-":
        return require_utf8(sys.stdin.read().removeprefix(BYTE_ORDER_MARK), "standard input")
    try:
        path = Path(text)
        found = read_exact_text(path, newline=None) if path.is_file() else text
        folder = path.is_dir() and bool(text.strip())
    except OSError:  # e.g. a name that is too long
        return text
    if folder:
        raise DataError(f"{text} is a folder: give a file in it. To use it as words, pass it on standard input: -.")
    if found == text and FILE_NAME_PATTERN.fullmatch(text):
        raise DataError(f"{text} is not a file. To use it as words, pass it on standard input: -.")
    return require_utf8(found, "the text")


def require_utf8(text: str, name: str) -> str:
    """Return a text, or raise DataError if bytes of it are no characters, which Python reads as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} is not UTF-8 text: its character {error.start} is a byte of no character.") from None
    return text


def read_exact_text(path: Path, newline: str | None = "") -> str:
    """Return the text of a file without a byte order mark, with the line ends that it has; all are \\n if newline is None."""
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
