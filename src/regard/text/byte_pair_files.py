"""The two files of a byte-pair encoding: the merges in order, and the number of each piece.

A byte is written as a character: itself if it is printable, else one from U+0100 on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.errors import DataError

FILES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))  # merges and numbers: OpenAI's names, then transformers'
PAIRS, NUMBERS = FILES[0]
LARGEST = 1 << 27  # bytes of a file; GPT-2's files have about half a million and a million
LONGEST = 1 << 12  # bytes of a piece; GPT-2's pieces have at most 128
SPECIALS = 1 << 14  # most special tokens; they are searched for one after the other


@dataclass(frozen=True)
class EncodingFiles:
    """The content of the two files: the number of each piece and of each special token, and the merges in order."""

    pieces: dict[bytes, int]
    special: dict[str, int]
    pairs: list[tuple[bytes, bytes]]


@cache
def map_bytes_to_letters() -> dict[int, str]:
    """Return the character that represents each byte in the files: itself if it is printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(unprintable)}


@cache
def map_letters_to_bytes() -> dict[str, int]:
    """Return the byte of each character that represents one."""
    return {letter: byte for byte, letter in map_bytes_to_letters().items()}


def spell_piece(piece: bytes) -> str:
    """Return a piece as it is written in the files."""
    return "".join(map_bytes_to_letters()[byte] for byte in piece)


def parse_piece(word: str) -> bytes:
    """Return the bytes of a piece that is written as in the files; raise KeyError for a character that represents no byte."""
    return bytes(map_letters_to_bytes()[letter] for letter in word)


def number_pieces(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Return the number of every piece: first the bytes in the order of the files, then the merged pairs in order."""
    pieces = [*(bytes([byte]) for byte in map_bytes_to_letters()), *(left + right for left, right in pairs)]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def read_encoding(pairs: Path, numbers: Path) -> EncodingFiles:
    """Read pieces, special tokens and merges from the two files, and check that they agree."""
    for path in (pairs, numbers):
        if not path.is_file():
            raise DataError(f"{path} is missing: a byte-pair encoding is {PAIRS} and {NUMBERS} in one folder.")
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} has {path.stat().st_size:,} bytes; a vocabulary has at most {LARGEST:,}.")
    joined, given = read_pairs(pairs), read_numbers(numbers)
    ranks = {}
    for piece in number_pieces(joined):
        if (number := given.get(spell_piece(piece))) is None:
            raise DataError(f"{numbers} has no number for {spell_piece(piece)[:40]!r}, which {pairs.name} joins.")
        ranks[piece] = number
    check_pairs(pairs, joined, ranks)
    taken = set(ranks.values())
    special = {word: number for word, number in given.items() if number not in taken}
    order = [ranks[left + right] for left, right in joined]
    if sorted(given.values()) != list(range(len(given))) or len(ranks) + len(special) != len(given) or order != sorted(order):
        raise DataError(f"{numbers} does not number the pieces of {pairs.name} from 0 on, in the order they are joined.")
    check_special(numbers, special)
    return EncodingFiles(ranks, special, joined)


def read_pairs(path: Path) -> list[tuple[bytes, bytes]]:
    """Read the merges in a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        joined = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        return [(parse_piece(left), parse_piece(right)) for left, right in joined]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a list of pairs, two words a line: {error}.") from None


def read_numbers(path: Path) -> dict[str, int]:
    """Read the number of each word in a file."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not all(isinstance(n, int) and not isinstance(n, bool) for n in given.values()):
            raise ValueError("it must map each word to a whole number")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object of words and their numbers: {error}.") from None
    return given


def check_pairs(path: Path, joined: Sequence[tuple[bytes, bytes]], ranks: dict[bytes, int]) -> None:
    """Raise DataError if a piece is too long, or is merged from pieces that do not come before it."""
    for left, right in joined:
        piece = left + right
        if len(piece) > LONGEST:
            raise DataError(f"{path} joins a piece of {len(piece):,} bytes; a piece has at most {LONGEST:,}.")
        for half in (left, right):
            if ranks.get(half, len(ranks)) >= ranks[piece]:
                raise DataError(f"{path} joins {spell_piece(half)[:40]!r} to another piece, but no earlier line makes it.")


def check_special(path: Path, special: dict[str, int]) -> None:
    """Raise DataError if special tokens are invalid or too many."""
    if len(special) > SPECIALS:
        raise DataError(f"{path} has {len(special):,} words that no pair makes; at most {SPECIALS:,} may be special.")
    for word in special:
        if not word or len(word) > LONGEST:
            raise DataError(f"{path} has a special token of {len(word):,} characters: it must have 1 to {LONGEST:,}.")
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise DataError(f"{path} has a special token with half of a surrogate pair: {word[:40]!r}.")
