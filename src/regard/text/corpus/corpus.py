"""Corpus: the tokens of many documents on disk, read as one sequence."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from regard.errors import ConfigError, DataError
from regard.text.corpus.columns import Column, Numbers
from regard.text.prepared_folder import ORIGIN, FolderIndex, Tokenizer, check_tokenizer_files, load_tokenizer, make_damage_error

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class CorpusIndex(FolderIndex):
    """The description of a corpus, corpus.json."""

    NAME, FORMAT, DATA = "corpus.json", "regard corpus", "a corpus"
    MISSING = "is not a corpus: it has no corpus.json. regard.text.corpus.prepare creates one from texts."

    tokens: int
    documents: int
    vocabulary: int
    shards: tuple[Column, ...]  # the tokens, the same number in each but the last
    starts: Column  # the position of each document's first token
    text: dict[str, int]  # the files of the encoding, and the checksum of each

    @property
    def names(self) -> set[str]:
        return {self.NAME, ORIGIN, self.starts.name, *(shard.name for shard in self.shards), *self.text}

    @classmethod
    def parse(cls, header: dict[str, Any]) -> Self:
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
        return cls(
            header["tokens"], header["documents"], header["vocabulary"], shards, starts, check_tokenizer_files(header["text"])
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """The concatenated tokens of documents; corpus[start:stop] reads a range of them, as int64.

    The shards are memory-mapped, and the checksum of each is verified when it is first accessed.
    """

    folder: Path
    text: Tokenizer
    index: CorpusIndex
    first: int  # the first of the folder's tokens that belongs to this corpus
    last: int  # the end of its tokens, exclusive
    _held: dict[str, Numbers] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> "Corpus":
        """Load the corpus in a folder. Raises DataError if a file is missing, cut short, altered, or of a newer version."""
        folder = Path(folder)
        index = CorpusIndex.read(folder)
        for column in (*index.shards, index.starts):
            column.check_size(folder)
        text = load_tokenizer(folder, index.text)
        if text.vocabulary != index.vocabulary:
            raise make_damage_error(folder / index.NAME, f"it states {index.vocabulary} tokens, but {text!r} has others")
        return cls(folder, text, index, 0, index.tokens)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.last - self.first

    @property
    def documents(self) -> int:
        """The number of documents that the tokens belong to."""
        inside = self.find_documents(np.array([self.first, self.last - 1]) - self.first)
        return int(inside[1] - inside[0]) + 1

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.index.vocabulary

    @property
    def checksum(self) -> str:
        """A string that is equal for corpora with the same tokens, documents and encoding."""
        return f"{self.index.checksum:08x}-{self.first}-{self.last}"

    @property
    def starts(self) -> Numbers:
        """The position of each document's first token among all tokens of the folder."""
        return self._open_column(self.index.starts)

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> Tokens:
        """Return a range of tokens."""
        start, stop, step = part.indices(self.tokens)
        if step != 1:
            raise ConfigError(f"a corpus is read in rows of neighbours, corpus[start:stop]; got a step of {step}.")
        found = np.empty(max(stop - start, 0), np.int64)
        size = self.index.shards[0].count
        at, end = self.first + start, self.first + stop
        while at < end:
            number, inside = divmod(at, size)
            shard = self._open_column(self.index.shards[number])[inside : inside + end - at]
            found[at - self.first - start :][: len(shard)] = shard
            at += len(shard)
        return found

    def find_documents(self, places: Tokens) -> Tokens:
        """Return the number of the document that each of these tokens belongs to, counted from 0 in the whole folder."""
        return np.searchsorted(self.starts, np.asarray(places) + self.first, side="right") - 1

    def split(self, held_out: float) -> tuple["Corpus", "Corpus"]:
        """Split off the last share of the tokens, at the boundary of documents that is nearest to it: (all but it, it).

        A single document is split inside. Raises ConfigError if either part would have fewer than two tokens.
        """
        if not 0 < held_out < 1:
            raise ConfigError(f"held_out is the share of the tokens that is held out, above 0 and below 1; got {held_out!r}.")
        cut = self.last - round(held_out * self.tokens)
        least, most = np.searchsorted(self.starts, [self.first + 1, self.last]).tolist()  # of the documents that start inside
        right = min(max(int(np.searchsorted(self.starts, cut)), least), most)
        near = self.starts[max(right - 1, least) : min(right + 1, most)].tolist()
        cut = min(near, key=lambda start: abs(start - cut), default=cut)
        if min(cut - self.first, self.last - cut) < 2:
            raise ConfigError(f"of {self.tokens:,} tokens, {held_out} cannot be held out: each part needs at least two tokens.")
        return replace(self, last=cut), replace(self, first=cut)

    def check(self) -> None:
        """Read and verify the whole corpus. Raises DataError if anything is not as it was written."""
        for column in (*self.index.shards, self.index.starts):
            self._held.pop(column.name, None)
            self._open_column(column)

    def _open_column(self, column: Column) -> Numbers:
        """Return the numbers of a column, verified the first time."""
        if column.name not in self._held:
            numbers = column.open_verified(self.folder)
            if column is self.index.starts:
                if numbers[0] != 0 or numbers[-1] >= self.index.tokens or not (numbers[1:] > numbers[:-1]).all():
                    raise DataError(f"{self.folder / column.name} is damaged: documents start at 0, one after the other.")
            elif numbers.max() >= self.vocabulary:
                raise DataError(f"{self.folder / column.name} is damaged: a token is below {self.vocabulary:,}.")
            self._held[column.name] = numbers
        return self._held[column.name]

    def __repr__(self) -> str:
        return f"Corpus({str(self.folder)!r}, {self.tokens:,} tokens of {self.documents:,} documents, {self.text!r})"
