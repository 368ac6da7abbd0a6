"""Pairs: sentences and their translations as tokens on disk, in three parts.

folder/   pairs.json, the index, with a checksum of every file     vocab.bpe, encoder.json: the encoding of both languages
          train.source.npy, train.target.npy: the concatenated tokens of all sentences of a part, without end tokens
          train.source-starts.npy, train.target-starts.npy: where each begins, and where the last one ends
          train.words.npy: the number of words of the longer side of each pair
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from regard.text.byte_pair import BytePair
from regard.text.corpus.columns import Column, Numbers
from regard.text.pairs.sources import PARTS
from regard.text.prepared_folder import ORIGIN, FolderIndex, check_tokenizer_files, load_tokenizer, make_damage_error

COLUMNS = {"source": "", "source-starts": "<i8", "target": "", "target-starts": "<i8", "words": "<i4"}  # tokens: smallest dtype

Places = NDArray[np.int64]


@dataclass(frozen=True)
class PairsIndex(FolderIndex):
    """The description of a folder of pairs, pairs.json."""

    NAME, FORMAT, DATA = "pairs.json", "regard pairs", "sentence pairs"
    MISSING = "holds no sentence pairs: it has no pairs.json. regard.text.pairs.prepare creates it from files."

    vocabulary: int
    rule: str  # that pairs were split by
    parts: dict[str, dict[str, Column]]
    text: dict[str, int]  # the files of the encoding, and the checksum of each

    @property
    def names(self) -> set[str]:
        return {self.NAME, ORIGIN, *self.text, *(column.name for part in self.parts.values() for column in part.values())}

    @classmethod
    def parse(cls, header: dict[str, Any]) -> Self:
        parts = {name: {one: Column(**header["parts"][name][one]) for one in COLUMNS} for name in PARTS}
        return cls(header["vocabulary"], header["rule"], parts, check_tokenizer_files(header["text"]))


@dataclass(frozen=True, eq=False)
class PairSet:
    """The pairs of a part, or some of them: the tokens of each sentence, the lengths and the word counts."""

    name: str
    text: BytePair
    columns: dict[str, Numbers]
    places: Places  # indices of these pairs in the folder's part

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens on both sides of each pair, (n, 2), without end tokens."""
        sides = [np.diff(self.columns[f"{side}-starts"])[self.places] for side in ("source", "target")]
        return np.stack(sides, 1)

    @property
    def words(self) -> NDArray[np.int64]:
        """The number of words of the longer side of each pair."""
        return self.columns["words"][self.places].astype(np.int64)

    def get_sentence(self, side: str, number: int) -> list[int]:
        """Return the tokens of a sentence, of the "source" or the "target" of a pair."""
        start, stop = self.columns[f"{side}-starts"][self.places[number] :][:2].tolist()
        found: list[int] = self.columns[side][start:stop].tolist()
        return found

    def decode_sentences(self, side: str) -> list[str]:
        """Return the sentences of a side as texts."""
        return [self.text.decode(self.get_sentence(side, number)) for number in range(len(self))]

    def limit_words(self, words: int) -> "PairSet":
        """Return the pairs of which neither side has more than `words` words."""
        return replace(self, places=self.places[self.words <= words])

    def __repr__(self) -> str:
        return f"Part({self.name!r}, {len(self):,} pairs)"


@dataclass(frozen=True, eq=False)
class Pairs:
    """The sentence pairs in a folder: those to train on, those to evaluate during training, and those for the final test."""

    folder: Path
    text: BytePair
    index: PairsIndex
    train: PairSet
    valid: PairSet
    test: PairSet

    @classmethod
    def load(cls, folder: str | Path) -> "Pairs":
        """Load the pairs in a folder. Raises DataError if a file is missing, cut short, altered, or of a newer version."""
        folder = Path(folder)
        index = PairsIndex.read(folder)
        text = load_tokenizer(folder, index.text)
        if not isinstance(text, BytePair):
            raise make_damage_error(folder / PairsIndex.NAME, "its encoding is not a byte-pair encoding")
        return cls(folder, text, index, **{name: load_part(folder, text, index, name) for name in PARTS})

    @property
    def checksum(self) -> str:
        """A string that is equal for folders with the same pairs."""
        return f"{self.index.checksum:08x}"

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(getattr(self, name)):,} {name}" for name in PARTS)
        return f"Pairs({str(self.folder)!r}, {counts}, {self.text!r})"


def load_part(folder: Path, text: BytePair, index: PairsIndex, name: str) -> PairSet:
    """Load a part and verify all its columns."""
    columns = {one: column.open_verified(folder) for one, column in index.parts[name].items()}
    count = len(columns["words"])
    for side in ("source", "target"):
        starts = columns[f"{side}-starts"]
        if len(starts) != count + 1 or (np.diff(starts) < 1).any() or starts[0] or starts[-1] != len(columns[side]):
            raise make_damage_error(folder / PairsIndex.NAME, f"the {side} sentences of {name} do not follow one another")
        if columns[side].max(initial=0) >= text.vocabulary:
            raise make_damage_error(folder / PairsIndex.NAME, f"a {side} token of {name} is not below {text.vocabulary:,}")
    return PairSet(name, text, columns, np.arange(count))
