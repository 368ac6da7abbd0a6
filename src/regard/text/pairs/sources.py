"""Sentence pairs from two aligned files, a folder of such files, one tab-separated file, or an archive of one.

    folder          train.en and train.fr, valid.en (val, dev), test.en (test_...) and theirs: parts that are given
    name            name.en and name.fr, line n of one the translation of line n of the other
    name.tsv, .txt  a sentence, a tab, its translation; anything after another tab is ignored
    name.zip        an archive with one such file, as distributed by the Tatoeba project

White space of any kind counts as one space, and a pair with an empty side is dropped.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.errors import DataError

PARTS = ("train", "valid", "test")
PART_NAMES = {"train": "train", "valid": "valid", "val": "valid", "dev": "valid", "test": "test"}  # by the first word of a file
TABLES = (".tsv", ".txt", ".tab")
LARGEST = 1 << 30  # most unpacked bytes


@dataclass(frozen=True, slots=True)
class SentencePair:
    """A sentence and its translation, and the part that a file's name assigns them to."""

    source: str
    target: str
    part: str | None = None


def read_pairs(path: str | Path, languages: tuple[str, str]) -> Iterator[SentencePair]:
    """Yield the pairs of a source; languages are the suffixes of aligned files, the source's first."""
    path, found = Path(path), list_files(path, languages)
    if path.is_file():
        yield from read_archive(path) if path.suffix == ".zip" else parse_table(read_text(path).split("\n"), str(path))
    else:
        for source, target in zip(found[::2], found[1::2], strict=True):
            yield from read_aligned_files(source, target, find_part_name(source) if path.is_dir() else None)


def list_files(path: str | Path, languages: tuple[str, str]) -> list[Path]:
    """Return the files that the pairs of a source are read from: a table, an archive, or each source and its translation."""
    path = Path(path)
    if path.is_dir():
        return list_folder_files(path, languages)
    if path.suffix in (*TABLES, ".zip") and path.is_file():
        return [path]
    if get_language_path(path, languages[0]).is_file():
        return [get_language_path(path, language) for language in languages]
    first, second = (get_language_path(path, one).name for one in languages)
    raise DataError(
        f"{path} is not sentence pairs: give a folder of train.{languages[0]}, train.{languages[1]} and so on, a file that "
        f"ends in {', '.join(TABLES)} or .zip, or a name for which {first} and {second} exist."
    )


def get_language_path(path: Path, language: str) -> Path:
    """Return the path of the aligned file of a language."""
    return path.with_name(f"{path.name}.{language}")


def list_folder_files(folder: Path, languages: tuple[str, str]) -> list[Path]:
    """Return the aligned files of a folder that belong to a part, each followed by its translation."""
    files = sorted(path for path in folder.glob(f"*.{languages[0]}") if find_part_name(path) in PARTS)
    if not any(find_part_name(path) == "train" for path in files):
        raise DataError(f"{folder} has no train.{languages[0]}, whose translation is train.{languages[1]}.")
    return [each for path in files for each in (path, path.with_name(f"{path.stem}.{languages[1]}"))]


def find_part_name(path: Path) -> str | None:
    """Return the part that a file belongs to, by the first word of its name."""
    return PART_NAMES.get(path.stem.replace("-", "_").partition("_")[0].lower())


def read_aligned_files(source: Path, target: Path, part: str | None) -> Iterator[SentencePair]:
    """Yield the pairs of two aligned files."""
    sides = [read_text(path).removesuffix("\n").split("\n") for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: "
            "line n of one must translate line n of the other."
        )
    for one, other in zip(*sides, strict=True):
        yield from make_pair(one, other, part)


def read_archive(path: Path) -> Iterator[SentencePair]:
    """Yield the pairs of the only table in an archive; files whose name starts with _ or . are ignored."""
    try:
        with zipfile.ZipFile(path) as archive:
            tables = [name for name in archive.namelist() if Path(name).suffix in TABLES and Path(name).name[0] not in "._"]
            if len(tables) != 1:
                raise DataError(f"{path} must have one file that ends in {', '.join(TABLES)}; it has {len(tables)}.")
            if archive.getinfo(tables[0]).file_size > LARGEST:
                raise DataError(f"{path} has a file of more than {LARGEST:,} bytes: unpack it, and divide it into several.")
            data = archive.read(tables[0])
    except DataError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise DataError(f"{path} is not a readable archive: {error}.") from None
    yield from parse_table(decode_text(data, path).split("\n"), str(path))


def parse_table(lines: Iterable[str], place: str) -> Iterator[SentencePair]:
    """Yield the pairs of tab-separated lines."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            sides = line.split("\t")
            if len(sides) < 2:
                raise DataError(f"{place}:{number} has no tab: a line is a sentence, a tab, and its translation.")
            yield from make_pair(sides[0], sides[1], None)


def make_pair(source: str, target: str, part: str | None) -> Iterator[SentencePair]:
    """Yield the pair of two sentences if neither is empty."""
    one, other = (" ".join(side.split()) for side in (source, target))
    if one and other:
        yield SentencePair(one, other, part)


def read_text(path: Path) -> str:
    """Read a text file in UTF-8."""
    try:
        return decode_text(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def decode_text(data: bytes, path: Path) -> str:
    """Decode bytes as UTF-8, with the line ends of any system."""
    try:
        return io.IncrementalNewlineDecoder(None, translate=True).decode(data.decode("utf-8-sig"), final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
