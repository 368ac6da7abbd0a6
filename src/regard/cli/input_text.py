"""The text that a command is given: a file, standard input, or the words themselves."""

import re
import sys
from pathlib import Path

from regard.errors import DataError

FILE_NAME_PATTERN = re.compile(r"[~.]*/\S*|\S*/\S*\.\w+|.*\.(txt|md)|\S*\w\.[a-z]\w{1,4}")  # pattern of a file name


def read_text(text: str) -> str:
    """Return the text of a file, of standard input, or the argument itself."""
    if text == "-":
        return sys.stdin.read()
    try:
        path = Path(text)
        found = path.read_text(encoding="utf-8") if path.is_file() else text
        folder = path.is_dir() and bool(text.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{text} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError:  # e.g. a name that is too long
        return text
    if folder:
        raise DataError(f"{text} is a folder: give a file in it. To use it as words, pass it on standard input: -.")
    if found == text and FILE_NAME_PATTERN.fullmatch(text):
        raise DataError(f"{text} is not a file. To use it as words, pass it on standard input: -.")
    return found
