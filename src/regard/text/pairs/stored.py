"""Pairs: sentences and their translations as tokens on disk, in three parts.

folder/   pairs.json, the index, with a checksum of every file     vocab.bpe, encoder.json: the encoding of both languages
          train.source.npy, train.target.npy: the tokens of all sentences of a part, one after the other, without ends
          train.source-starts.npy, train.target-starts.npy: where each begins, and where the last one ends
          train.words.npy: of each pair, the words of the longer side
"""

import json
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import DataError
from regard.text.byte_pair import BytePair
from regard.text.corpus.columns import Column, Numbers
from regard.text.corpus.index import checked, damaged, names_of, text_of
from regard.text.origin import NAME as ORIGIN
from regard.text.pairs.sources import PARTS

NAME, FORMAT, VERSION = "pairs.json", "regard pairs", 1
COLUMNS = {"source": "", "source-starts": "<i8", "target": "", "target-starts": "<i8", "words": "<i4"}  # tokens as they need

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Index:
    """What lies in a folder of pairs."""

    vocabulary: int
    rule: str  # by which pairs were divided
    parts: dict[str, dict[str, Column]]
    text: dict[str, int]  # the files of the encoding, and the checksum of each

    @property
    def names(self) -> set[str]:
        """Every file that the folder may have."""
        return {NAME, ORIGIN, *self.text, *(column.name for part in self.parts.values() for column in part.values())}

    @property
    def checksum(self) -> int:
        """One number for all of it: two that share it are the same pairs."""
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def write(self, folder: Path) -> None:
        """Writes pairs.json."""
        said = {"format": FORMAT, "version": VERSION, "checksum": self.checksum, **asdict(self)}
        (folder / NAME).write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Part:
    """The pairs of a part, or some of them: the numbers of each, and what is known of all."""

    name: str
    text: BytePair
    columns: dict[str, Numbers]
    places: Places  # of these pairs among those of the folder's part

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of both sides of each pair, (n, 2), without an end."""
        sides = [np.diff(self.columns[f"{side}-starts"])[self.places] for side in ("source", "target")]
        return np.stack(sides, 1)

    @property
    def words(self) -> NDArray[np.int64]:
        """The words of the longer side of each pair."""
        return self.columns["words"][self.places].astype(np.int64)

    def sentence(self, side: str, number: int) -> list[int]:
        """The tokens of a sentence, of the "source" or the "target" of a pair."""
        start, stop = self.columns[f"{side}-starts"][self.places[number] :][:2].tolist()
        found: list[int] = self.columns[side][start:stop].tolist()
        return found

    def sentences(self, side: str) -> list[str]:
        """The sentences of a side as texts."""
        return [self.text.decode(self.sentence(side, number)) for number in range(len(self))]

    def upto(self, words: int) -> "Part":
        """Those pairs of which neither side has more words than this."""
        return replace(self, places=self.places[self.words <= words])

    def __repr__(self) -> str:
        return f"Part({self.name!r}, {len(self):,} pairs)"


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sentence pairs in a folder: those to train on, those to see how it goes, those to say at the end how well it went."""

    folder: Path
    text: BytePair
    index: Index
    train: Part
    valid: Part
    test: Part

    @classmethod
    def load(cls, folder: str | Path) -> "Pairs":
        """The pairs in a folder. DataError where a part of it is missing, cut short, altered, or of a newer regard."""
        folder = Path(folder)
        index = read(folder)
        text = text_of(folder, index.text)
        if not isinstance(text, BytePair):
            raise damaged(folder / NAME, "its encoding is none of byte pairs")
        return cls(folder, text, index, **{name: part_of(folder, text, index, name) for name in PARTS})

    @property
    def checksum(self) -> str:
        """A word that two folders share where they hold the same pairs."""
        return f"{self.index.checksum:08x}"

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(getattr(self, name)):,} {name}" for name in PARTS)
        return f"Pairs({str(self.folder)!r}, {counts}, {self.text!r})"


def part_of(folder: Path, text: BytePair, index: Index, name: str) -> Part:
    """A part, every column of it checked."""
    columns = {one: column.opened(folder) for one, column in index.parts[name].items()}
    count = len(columns["words"])
    for side in ("source", "target"):
        starts = columns[f"{side}-starts"]
        if len(starts) != count + 1 or (np.diff(starts) < 1).any() or starts[0] or starts[-1] != len(columns[side]):
            raise damaged(folder / NAME, f"the {side} sentences of {name} do not follow one another")
        if columns[side].max(initial=0) >= text.vocabulary:
            raise damaged(folder / NAME, f"a {side} token of {name} is not below {text.vocabulary:,}")
    return Part(name, text, columns, np.arange(count))


def read(folder: Path) -> Index:
    """The index of a folder; DataError where there is none, or none that this regard reads."""
    path = folder / NAME
    if not path.is_file():
        raise DataError(f"{folder} holds no sentence pairs: it has no {NAME}. regard.text.pairs.prepare makes it of files.")
    return checked(path, FORMAT, "sentence pairs", VERSION, parsed)


def parsed(said: dict[str, Any]) -> Index:
    """The index that is said; KeyError, TypeError or AttributeError where it is none."""
    parts = {name: {one: Column(**said["parts"][name][one]) for one in COLUMNS} for name in PARTS}
    return Index(said["vocabulary"], said["rule"], parts, names_of(said["text"]))
