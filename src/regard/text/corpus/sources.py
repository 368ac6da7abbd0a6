"""Documents from files, folders, JSON lines, strings, or rows of a table.

A text file is one document, unless it has lines that consist of <|endoftext|>: these separate documents, and belong with the
line breaks around them to none. A .jsonl file has a document per line, under "text" or another field. A folder is all its .txt,
.md and .jsonl files, also those in its subfolders, in the order of their paths. Any other iterable gives a document per item: a
string, or a row {"text": ...} as in a datasets.Dataset. A document of white space only is dropped.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import ConfigError, DataError
from regard.text.byte_pair import END
from regard.text.letters import Letters

Source = str | Path | Iterable[Any]
Cut = Callable[[str], int]  # maps a text without a safe place to the number of characters that may be encoded separately
SUFFIXES = (".txt", ".md", ".jsonl")
BLOCK = 1 << 20  # bytes read at a time, and characters of a part
SEPARATOR_LINE = re.compile(re.escape(END) + r"(?:\r?\n|\Z)")
# where a text can be cut without changing tokens: no piece continues from another character into white space
SAFE_PLACE = re.compile(r"\S(?=[ \r\n])")
MARGIN = 32  # characters at the end of a block in which a line of <|endoftext|> may begin
NEAR = 1 << 12  # characters before the limit that are searched for a place to cut


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A document, or a part of a long one."""

    text: str
    ends: bool  # whether its document ends here
    size: int  # bytes read for it
    place: str  # where it comes from, for errors


def documents(source: Source, field: str = "text") -> Iterator[str]:
    """Yield the documents of a source, each as one text."""
    parts: list[str] = []
    for part in iterate_parts(source, field):
        parts.append(part.text)
        if part.ends:
            yield "".join(parts)
            parts = []


def iterate_parts(source: Source, field: str = "text", cut: Cut = Letters.find_cut) -> Iterator[DocumentPart]:
    """Yield the documents of a source in order, long ones in parts, so that at most one part of a document is in memory.

    Parts end before white space; if a block has none, at the place that cut finds.
    """
    if isinstance(source, str | Path):
        for path in list_files(Path(source)):
            yield from read_json_lines(path, field, cut) if path.suffix == ".jsonl" else read_text_parts(path, cut)
    elif isinstance(source, Mapping):
        raise ConfigError(f"source is several corpora: {', '.join(map(str, source))}. Give a single one: source[name].")
    else:
        for number, item in enumerate(source):
            place = f"document {number}"
            text = item if isinstance(item, str) else get_row_text(item, field, place)
            yield from split_document(text, place, cut)


def count_bytes(source: Source) -> int | None:
    """Return the number of bytes of a source that consists of files, else None."""
    return sum(path.stat().st_size for path in list_files(Path(source))) if isinstance(source, str | Path) else None


def list_files(path: Path) -> list[Path]:
    """Return the file itself, or the files of a folder in the order of their paths."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder of texts.")
    found = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    if not found:
        raise DataError(f"{path} has no file that ends in {', '.join(SUFFIXES)}.")
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def read_text_parts(path: Path, cut: Cut) -> Iterator[DocumentPart]:
    """Yield the documents of a text file, with one block of it in memory at a time."""
    # text read but not yielded, its bytes, whether the beginning of its document has been yielded
    pending, size, has_begun = "", 0, False
    for block, read, last in read_blocks(path):
        pending, size, at = pending + block, size + read, 0
        for border in SEPARATOR_LINE.finditer(pending):
            start = border.start()
            is_own_line = pending[start - 1] == "\n" if start > at else at or not has_begun
            if not is_own_line or (border.end() == start + len(END) and not last):
                continue
            text = pending[at:start].removesuffix("\n").removesuffix("\r")
            if has_begun or text.strip():
                yield DocumentPart(text, True, size, str(path))
                size = 0
            at, has_begun = border.end(), False
        pending = pending[at:]
        stop = 0 if last else find_cut_in_block(pending, len(pending) - MARGIN, cut)
        if stop and (has_begun or pending[:stop].strip()):  # a document of white space only is dropped
            yield DocumentPart(pending[:stop], False, size, str(path))
            pending, size, has_begun = pending[stop:], 0, True
    if has_begun or pending.strip():
        yield DocumentPart(pending, True, size, str(path))


def read_blocks(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield a text file in blocks: the characters, the number of bytes read for them, and whether it is the last block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            offset, last = 0, False
            while not last:
                data = file.read(BLOCK)
                last = len(data) < BLOCK or offset + len(data) == left
                waiting = len(decoder.getstate()[0])  # bytes of an incomplete character
                try:
                    text = decoder.decode(data, last)
                except UnicodeDecodeError as error:
                    at = offset - waiting + error.start
                    raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {at}.") from None
                yield text if offset else text.removeprefix("\ufeff"), len(data), last  # byte order mark
                offset += len(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_json_lines(path: Path, field: str, cut: Cut) -> Iterator[DocumentPart]:
    """Yield the documents of a file of JSON lines."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}:{number}"
                    plain = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    yield from split_document(get_row_text(parse_json_line(plain, place), field, place), place, cut, len(line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def parse_json_line(line: bytes, place: str) -> Any:
    """Parse a line of JSON."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text: {error.reason} at byte {error.start} of the line.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}.") from None


def get_row_text(row: Any, field: str, place: str) -> str:
    """Return the text of a row."""
    if not isinstance(row, Mapping):
        raise DataError(f'{place} must be a row {{"{field}": a text}}; it is of type {type(row).__name__}.')
    if field not in row:
        raise DataError(f'{place} has no field "{field}"; it has {", ".join(map(str, row)) or "none"}.')
    if not isinstance(row[field], str):
        raise DataError(f'{place}: the field "{field}" must be a text; it is of type {type(row[field]).__name__}.')
    return str(row[field])


def split_document(text: str, place: str, cut: Cut, size: int | None = None) -> Iterator[DocumentPart]:
    """Yield a document that is in memory, in parts if it is long; size is the number of bytes read for it."""
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(f"{place} has half of a surrogate pair at {error.start}, which is not a character.") from None
    if text.strip():
        *before, last = split_text(text, BLOCK, cut)
        yield from (DocumentPart(one, False, 0, place) for one in before)
        yield DocumentPart(last, True, length if size is None else size, place)


def split_text(text: str, limit: int, cut: Cut) -> Iterator[str]:
    """Yield portions of about limit characters, at most twice that, whose tokens in sequence are those of the whole text."""
    start = 0
    while len(text) - start > limit:
        stop = find_cut_near_limit(text, start, start + limit, cut)
        yield text[start:stop]
        start = stop
    if start < len(text) or not text:
        yield text[start:]


def find_cut_in_block(text: str, sure: int, cut: Cut) -> int:
    """Return where to cut a block of a file within its first `sure` characters; 0 if more must be read first."""
    if len(text) <= BLOCK:
        return 0
    near = [found.end() for found in SAFE_PLACE.finditer(text, max(0, sure - NEAR), sure)]
    if near:
        return near[-1]
    return find_cut_near_limit(text, 0, BLOCK, cut) if sure >= 2 * BLOCK else 0


def find_cut_near_limit(text: str, start: int, limit: int, cut: Cut) -> int:
    """Return the last place shortly before the limit where a text can be cut, else the first one after it.

    A place after the limit is searched for within another limit - start characters. If there is none, return the text's end if
    it is within that range, else the place that cut finds.
    """
    near = [found.end() for found in SAFE_PLACE.finditer(text, max(start, limit - NEAR), limit)]
    if near:
        return near[-1]
    farthest = 2 * limit - start
    found = SAFE_PLACE.search(text, max(start, limit - 1), farthest)
    if found:
        return found.end()
    return len(text) if len(text) <= farthest else start + max(cut(text[start:limit]), 1)
