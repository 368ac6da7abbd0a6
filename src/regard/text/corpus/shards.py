"""Corpus: the tokens of many documents on disk, read as if they were one row."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.errors import ConfigError, DataError
from regard.text.corpus import index as indices
from regard.text.corpus.columns import Column, Numbers
from regard.text.corpus.index import Index, Text

Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of documents, one after the other; corpus[start:stop] reads some of them, as int64.

    The shards are mapped into memory, and the checksum of each is compared when it is first touched.
    """

    folder: Path
    text: Text
    index: Index
    first: int  # of the folder's tokens, those from here
    last: int  # to here
    _held: dict[str, Numbers] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> "Corpus":
        """The corpus in a folder. DataError where a part of it is missing, cut short, altered, or of a newer regard."""
        folder = Path(folder)
        index = indices.read(folder)
        for column in (*index.shards, index.starts):
            column.weighed(folder)
        text = indices.text_of(folder, index.text)
        if text.vocabulary != index.vocabulary:
            raise indices.damaged(folder / indices.NAME, f"it says {index.vocabulary} tokens, and {text!r} has others")
        return cls(folder, text, index, 0, index.tokens)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.last - self.first

    @property
    def documents(self) -> int:
        """How many documents they are of."""
        inside = self.document_of(np.array([self.first, self.last - 1]) - self.first)
        return int(inside[1] - inside[0]) + 1

    @property
    def vocabulary(self) -> int:
        """How many numbers a token may be."""
        return self.index.vocabulary

    @property
    def checksum(self) -> str:
        """A word that two corpora share where they are the same tokens, documents and encoding."""
        return f"{self.index.checksum:08x}-{self.first}-{self.last}"

    @property
    def starts(self) -> Numbers:
        """The place, among all tokens of the folder, of each document's first."""
        return self._opened(self.index.starts)

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> Tokens:
        """Some tokens in a row."""
        start, stop, step = part.indices(self.tokens)
        if step != 1:
            raise ConfigError(f"a corpus is read in rows of neighbours, corpus[start:stop]; got a step of {step}.")
        found = np.empty(max(stop - start, 0), np.int64)
        size = self.index.shards[0].count
        at, end = self.first + start, self.first + stop
        while at < end:
            number, inside = divmod(at, size)
            shard = self._opened(self.index.shards[number])[inside : inside + end - at]
            found[at - self.first - start :][: len(shard)] = shard
            at += len(shard)
        return found

    def document_of(self, places: Tokens) -> Tokens:
        """The number of the document that each of these tokens is of, counted from the folder's first, 0."""
        return np.searchsorted(self.starts, np.asarray(places) + self.first, side="right") - 1

    def split(self, held_out: float) -> tuple["Corpus", "Corpus"]:
        """All but the last share of the tokens, and that share: cut at the border of documents that is nearest to it.

        A single document is cut within. ConfigError where one of both would have fewer than two tokens.
        """
        if not 0 < held_out < 1:
            raise ConfigError(f"held_out is the share of the tokens that is kept apart, above 0 and below 1; got {held_out!r}.")
        cut = self.last - round(held_out * self.tokens)
        least, most = np.searchsorted(self.starts, [self.first + 1, self.last]).tolist()  # of the documents that start inside
        right = min(max(int(np.searchsorted(self.starts, cut)), least), most)
        near = self.starts[max(right - 1, least) : min(right + 1, most)].tolist()
        cut = min(near, key=lambda start: abs(start - cut), default=cut)
        if min(cut - self.first, self.last - cut) < 2:
            raise ConfigError(f"of {self.tokens:,} tokens, {held_out} cannot be held out: each part needs two tokens at least.")
        return replace(self, last=cut), replace(self, first=cut)

    def check(self) -> None:
        """Reads all of it. DataError where anything is not as it was written."""
        for column in (*self.index.shards, self.index.starts):
            self._held.pop(column.name, None)
            self._opened(column)

    def _opened(self, column: Column) -> Numbers:
        """The numbers of a column, compared with their checksum the first time."""
        if column.name not in self._held:
            numbers = column.opened(self.folder)
            if column is self.index.starts:
                if numbers[0] != 0 or numbers[-1] >= self.index.tokens or not (numbers[1:] > numbers[:-1]).all():
                    raise DataError(f"{self.folder / column.name} is damaged: documents start at 0, one after the other.")
            elif numbers.max() >= self.vocabulary:
                raise DataError(f"{self.folder / column.name} is damaged: a token is below {self.vocabulary:,}.")
            self._held[column.name] = numbers
        return self._held[column.name]

    def __repr__(self) -> str:
        return f"Corpus({str(self.folder)!r}, {self.tokens:,} tokens of {self.documents:,} documents, {self.text!r})"
