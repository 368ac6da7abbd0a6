"""The documents of an atlas: texts as tokens on disk, in pieces of at most so many tokens."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.errors import DataError
from regard.text.corpus.sources import DocumentPart, Source, iterate_parts

TOKENS, ENDS, PIECES = "tokens.npy", "documents.npy", "pieces.json"
BLOCK = 2**22  # tokens looked at at a time
SHORTEST = 32  # tokens of a piece; shorter ones are left out


@dataclass(frozen=True, eq=False)
class DocumentStore:
    """Documents as tokens on disk: ends (n,) is where each ends among the tokens, pieces the text of each token."""

    tokens: np.ndarray
    ends: np.ndarray
    pieces: dict[int, str]

    @classmethod
    def open(cls, folder: Path) -> "DocumentStore":
        """Open what `write_documents` wrote. Raises DataError."""
        try:
            tokens, ends = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (TOKENS, ENDS))
            pieces = json.loads((folder / PIECES).read_text(encoding="utf-8"))
            check_arrays(tokens, ends)
            "".join(pieces.values()).encode()  # a text, and none with half of a surrogate pair
            return cls(tokens, ends, {int(token): text for token, text in pieces.items()})
        except Exception as error:  # the parser of a damaged file may raise anything
            raise DataError(f"{folder} has no documents of an atlas: {error}.") from None

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Tensor:
        """Return the tokens of a document, (t,)."""
        start = int(self.ends[number - 1]) if number else 0
        return torch.from_numpy(self.tokens[start : int(self.ends[number])].astype(np.int64))

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each document, (n,)."""
        return torch.from_numpy(np.diff(self.ends, prepend=0))

    def has_all_pieces(self) -> bool:
        """Return whether each token has its text."""
        known = np.fromiter(self.pieces, np.int64)
        return all(np.isin(self.tokens[start : start + BLOCK], known).all() for start in range(0, len(self.tokens), BLOCK))


def check_arrays(tokens: np.ndarray, ends: np.ndarray) -> None:
    """Raise ValueError unless each document has a token, and the last one ends with the tokens."""
    if [str(x.dtype) for x in (tokens, ends)] != ["int32", "int64"] or tokens.ndim != 1 or ends.ndim != 1:
        raise ValueError(f"{TOKENS} and {ENDS} must be rows of int32 and of int64")
    if not len(ends) or ends[0] < 1 or (np.diff(ends) < 1).any() or ends[-1] != len(tokens):
        raise ValueError(f"the ends of the documents must increase up to {len(tokens)}, the number of tokens")


def write_documents(
    source: Source,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    places: Sequence[Path],
    *,
    tokens: int,
    begin: int | None,
    most: int | None,
) -> int:
    """Write a source's documents as tokens, where each ends, and the text of each token, to three files; return their number.

    Raises DataError if there are none.

    A document of more than `tokens` tokens, its begin token included, becomes several pieces; `most` is the most pieces.
    """
    room = tokens - (begin is not None)
    pieces = islice(cut_documents(encode_documents(source, encode), room), most)
    before = [] if begin is None else [begin]
    ends: list[int] = []
    known = set(before)
    with places[0].open("wb") as file:
        total = 0
        np.lib.format.write_array_header_1_0(file, make_header(0))
        for piece in pieces:
            file.write(np.asarray([*before, *piece], np.int32).tobytes())
            known.update(piece)
            total += len(before) + len(piece)
            ends.append(total)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, make_header(total))
    if not ends:
        raise DataError(f"the texts have no document of {SHORTEST} tokens or more.")
    np.save(places[1], np.asarray(ends, np.int64))
    texts = {str(token): decode([token]) for token in sorted(known)}
    places[2].write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8", errors="replace")
    return len(ends)


def make_header(size: int) -> dict[str, object]:
    """Return the header of an array of int32; those of all sizes have the same length."""
    return {"descr": "<i4", "fortran_order": False, "shape": (size,)}


def encode_documents(source: Source, encode: Callable[[str], list[int]]) -> Iterator[Iterator[list[int]]]:
    """Yield the tokens of each document, in parts of at most a megabyte of text. Each must be read before the next."""
    parts = iterate_parts(source)

    def encode_document(part: DocumentPart) -> Iterator[list[int]]:
        yield encode(part.text)
        while not part.ends:
            part = next(parts)
            yield encode(part.text)

    for first in parts:
        yield encode_document(first)


def cut_documents(documents: Iterable[Iterable[list[int]]], room: int) -> Iterator[list[int]]:
    """Yield documents in pieces of `room` tokens, the last one shorter; pieces of fewer than SHORTEST tokens are left out."""
    for document in documents:
        tokens = chain.from_iterable(document)
        while piece := list(islice(tokens, room)):
            if len(piece) >= SHORTEST:
                yield piece
