"""The index of a corpus: corpus.json, which describes the files of the folder, with a checksum of itself."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zlib_ng.zlib_ng import crc32

from regard.errors import DataError
from regard.text import BytePair, Letters
from regard.text.byte_pair_files import FILES
from regard.text.corpus.columns import Column
from regard.text.letters import FILE_NAME as LETTERS
from regard.text.origin import NAME as ORIGIN

Tokenizer = BytePair | Letters
NAME, FORMAT, VERSION = "corpus.json", "regard corpus", 1


class HasChecksum(Protocol):
    """An index with a checksum."""

    @property
    def checksum(self) -> int:
        """A number computed from the whole index."""


T = TypeVar("T", bound=HasChecksum)


@dataclass(frozen=True)
class CorpusIndex:
    """The description of a corpus."""

    tokens: int
    documents: int
    vocabulary: int
    shards: tuple[Column, ...]  # the tokens, the same number in each but the last
    starts: Column  # the position of each document's first token
    text: dict[str, int]  # the files of the encoding, and the checksum of each

    @property
    def names(self) -> set[str]:
        """All files that the folder may have."""
        return {NAME, ORIGIN, self.starts.name, *(shard.name for shard in self.shards), *self.text}

    @property
    def checksum(self) -> int:
        """A number computed from the whole index: two corpora with the same checksum are the same."""
        return crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def write(self, folder: Path) -> None:
        """Write corpus.json."""
        header = {"format": FORMAT, "version": VERSION, "checksum": self.checksum, **asdict(self)}
        (folder / NAME).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def read_index(folder: Path) -> CorpusIndex:
    """Read the index of a folder; raise DataError if there is none of a supported version."""
    path = folder / NAME
    if not path.is_file():
        raise DataError(f"{folder} is not a corpus: it has no {NAME}. regard.text.corpus.prepare creates one from texts.")
    return read_checked_index(path, FORMAT, "a corpus", VERSION, parse_index)


def read_checked_index(path: Path, form: str, name: str, version: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read the index in a file of this form and verify its version and checksum; raise DataError if one does not match."""
    try:
        header = json.loads(path.read_bytes())
        if not isinstance(header, dict) or header.get("format") != form:
            raise DataError(f"{path} is not an index of {name} that regard prepared.")
        if not isinstance(header["version"], int) or header["version"] > version:
            raise DataError(f"{path} has version {header['version']}, and this regard reads up to {version}: update regard.")
        index = parse(header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise make_damage_error(path, f"{type(error).__name__}: {error}") from None
    if index.checksum != header.get("checksum"):
        raise make_damage_error(path, "its content is not what was written")
    return index


def parse_index(header: dict[str, Any]) -> CorpusIndex:
    """Parse an index; raise KeyError, TypeError or ValueError if it is invalid."""
    shards, starts = tuple(Column(**shard) for shard in header["shards"]), Column(**header["starts"])
    counts = [shard.count for shard in shards]
    if (
        not counts
        or sum(counts) != header["tokens"]
        or any(one != counts[0] for one in counts[:-1])
        or not 0 < counts[-1] <= counts[0]
    ):
        raise ValueError(f"{header['tokens']!r} tokens are not those of its shards")
    if starts.count != header["documents"] or not starts.count or starts.dtype != "<i8":
        raise ValueError(f"{header['documents']!r} documents are not those of {starts.name}")
    return CorpusIndex(
        header["tokens"], header["documents"], header["vocabulary"], shards, starts, check_tokenizer_files(header["text"])
    )


def check_tokenizer_files(text: Any) -> dict[str, int]:
    """Return the files of an encoding and their checksums; raise ValueError for other files."""
    if not isinstance(text, dict) or not text.keys() <= {LETTERS, *FILES[0]} or not text:
        raise ValueError(f"text must name the files of an encoding; got {text!r}")
    return text


def make_damage_error(path: Path, why: str) -> DataError:
    """Return the error for an index that is not as it was written."""
    return DataError(f"{path} is damaged or altered: {why}. Prepare the corpus again.")


def compute_tokenizer_checksums(folder: Path) -> dict[str, int]:
    """Return the files of an encoding in a folder, with the checksum of each."""
    found = [folder / name for name in (LETTERS, *FILES[0]) if (folder / name).is_file()]
    return {path.name: crc32(path.read_bytes()) for path in found}


def load_tokenizer(folder: Path, files: dict[str, int]) -> Tokenizer:
    """Load the encoding in a corpus folder; raise DataError if its files are not those the corpus was prepared with."""
    for name, checksum in files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing, but is part of this corpus: prepare it again.")
        if crc32(path.read_bytes()) != checksum:
            raise make_damage_error(path, "it is not the file that was written")
    return Letters.load(folder) if LETTERS in files else BytePair.load(folder)
