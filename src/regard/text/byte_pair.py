"""BytePair: byte-pair encoding, which converts a text to token ids and back, byte for byte.

An encoding is stored in two files in OpenAI's format, vocab.bpe and encoder.json: the merges in order, and the number of each
piece. GPT-2's files are included in this package (`gpt2/`, with their license). Encoding is done by tiktoken.
"""

import builtins
import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import tiktoken
from torch import Tensor

from regard.atomic_write import write_atomically
from regard.errors import ConfigError, DataError
from regard.text.byte_pair_files import FILES as FILES
from regard.text.byte_pair_files import NUMBERS, PAIRS, number_pieces, parse_piece, read_encoding, spell_piece
from regard.text.safe_cuts import is_safe_cut, limit_runs

GPT2_FOLDER = Path(__file__).parent / "gpt2"
END = "<|endoftext|>"
# how GPT-2 splits a text before merging pairs (Radford et al. 2019): contractions, words, numbers, signs, spaces
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
LARGEST_VOCABULARY = 1 << 30  # the largest vocabulary
WINDOW = 1 << 16  # characters encoded at a time
UNSURE = 256  # tokens at the end of a text that may differ in a longer one


class BytePair:
    """A byte-pair encoding: its pieces as bytes, numbered in the order of their merges, and its special tokens.

    The first 256 pieces are the single bytes, so that any text can be encoded.
    """

    def __init__(
        self, pieces: dict[bytes, int], special: dict[str, int], pairs: Sequence[tuple[bytes, bytes]] | None = None
    ) -> None:
        self.special, self._given = special, pairs
        self._coding = tiktoken.Encoding("regard", pat_str=PATTERN, mergeable_ranks=pieces, special_tokens=special)
        self._pieces = pieces
        self._bytes = {number: piece for piece, number in pieces.items()}
        self._bytes |= {number: word.encode() for word, number in special.items()}

    @classmethod
    def gpt2(cls, folder: str | Path | None = None) -> "BytePair":
        """Return GPT-2's encoding: 256 bytes, 50,000 merges and the end-of-text token."""
        return load_gpt2_encoding() if folder is None else cls.load(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "BytePair":
        """Load the encoding in a folder's vocab.bpe and encoder.json, or vocab.json and merges.txt, as in transformers.

        Raises DataError if they are missing, damaged, or do not belong together.
        """
        folder = Path(folder)
        pairs, numbers = FILES[0] if (folder / PAIRS).exists() else FILES[1]
        found = read_encoding(folder / pairs, folder / numbers)
        return cls(found.pieces, found.special, found.pairs)

    def save(self, folder: str | Path) -> None:
        """Write the two files into a folder, which is created if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        spelled = {spell_piece(piece): number for piece, number in self._pieces.items()}
        numbers = dict(sorted({**spelled, **self.special}.items(), key=lambda item: item[1]))
        lines = [f"{spell_piece(left)} {spell_piece(right)}" for left, right in self.pairs]
        with write_atomically(folder / NUMBERS, folder / PAIRS) as (numbers_file, pairs_file):
            numbers_file.write_text(json.dumps(numbers), encoding="utf-8")
            pairs_file.write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int, special: Sequence[str] = (END,)) -> "BytePair":
        """Train an encoding: merge the most frequent pairs in these texts, up to a vocabulary of this size.

        A small text has fewer pairs. Raises ConfigError if there is no room for the 256 bytes and the special tokens.
        """
        least = 256 + len(special)
        if vocabulary > LARGEST_VOCABULARY:
            raise ConfigError(f"vocabulary must be {LARGEST_VOCABULARY:,} at most; got {vocabulary}.")
        if vocabulary < least:
            raise ConfigError(
                f"vocabulary must be at least {least}, 256 bytes and {len(special)} special tokens; got {vocabulary}."
            )
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError:
            raise ConfigError("BytePair.train needs tokenizers: pip install tokenizers.") from None
        trainer = ByteLevelBPETokenizer()
        try:
            trainer.train_from_iterator(
                limit_runs(texts), vocab_size=vocabulary - len(special), min_frequency=2, show_progress=False
            )
        except UnicodeEncodeError as error:
            raise DataError(f"a text has half of a surrogate pair at {error.start}, which is not a character.") from None
        merges = json.loads(trainer.to_str())["model"]["merges"]
        pairs = [(parse_piece(left), parse_piece(right)) for left, right in merges]
        pieces = number_pieces(pairs)
        return cls(pieces, {word: len(pieces) + n for n, word in enumerate(special)}, pairs)

    @property
    def end(self) -> int:
        """The id of the end-of-text token; raises DataError if this encoding has none."""
        if END not in self.special:
            raise DataError(f"this encoding has no {END}; its special tokens are {', '.join(self.special) or 'none'}.")
        return self.special[END]

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return len(self._bytes)

    @cached_property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        """The merges in order: as given, else derived from the numbers of the pieces."""
        if self._given is not None:
            return list(self._given)
        joined = sorted((piece for piece in self._pieces if len(piece) > 1), key=lambda piece: self._pieces[piece])
        return [find_last_merge(piece, self._pieces) for piece in joined]

    def encode(self, text: str, allowed: Collection[str] = ()) -> list[int]:
        """Return the token ids of a text. A special token in it is plain text, unless it is in `allowed`.

        Raises DataError for half of a surrogate pair, which no text file contains, and for an allowed word that is no special
        token.
        """
        unknown = [word for word in allowed if word not in self.special]
        if unknown:
            raise DataError(f"{unknown[0]!r} is not a special token; these are: {', '.join(self.special) or 'none'}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the text has half of a surrogate pair at {error.start}, which is not a character.") from None
        try:
            return self._coding.encode(text, allowed_special=set(allowed), disallowed_special=())
        except ValueError:  # a run of white space exceeds tiktoken's stack
            return self._encode_in_windows(text, allowed)

    def _encode_in_windows(self, text: str, allowed: Collection[str]) -> list[int]:
        """Return the token ids of a text, encoding only a window of it at a time."""
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, allowed))})", text) if allowed else [text]:
            at = len(part) if part in allowed else 0
            ids += [self.special[part]] if at else []
            while at < len(part):
                window = part[at : at + WINDOW]
                window = window[: self.find_cut(window)] if at + len(window) < len(part) else window
                ids += self._coding.encode(window, disallowed_special=())
                at += len(window)
        return ids

    def find_cut(self, text: str) -> int:
        """Return a number of leading characters whose tokens are the same whatever follows: nearly all of the text.

        The rest of the text, encoded by itself, then continues as in the whole.
        """
        data = text.encode()
        ids = self.encode(text)
        at, place = len(data), len(text)  # the end of the remaining tokens, in bytes and in characters
        for number in range(len(ids) - 1, 0, -1):
            piece = self._bytes[ids[number]]
            at, place = at - len(piece), place - sum(byte & 0xC0 != 0x80 for byte in piece)
            whole_character = data[at] & 0xC0 != 0x80
            if len(ids) - number > UNSURE and whole_character and is_safe_cut(text, place):
                return place
        return len(text)

    def bytes(self, ids: Sequence[int] | Tensor) -> builtins.bytes:
        """Return the bytes of token ids. Raises DataError for an unknown id."""
        return b"".join(self._look_up_pieces(ids))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of token ids; an incomplete character is U+FFFD."""
        return self.bytes(ids).decode(errors="replace")

    def pieces(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Return the text of each token id, for the axes of a plot; bytes of incomplete characters are written like \\xe2."""
        return [piece.decode(errors="backslashreplace") for piece in self._look_up_pieces(ids)]

    def _look_up_pieces(self, ids: Sequence[int] | Tensor) -> list[builtins.bytes]:
        numbers = ids.tolist() if isinstance(ids, Tensor) else ids
        try:
            return [self._bytes[number] for number in numbers]
        except (KeyError, TypeError):
            wrong = next(one for one in numbers if not isinstance(one, int) or one not in self._bytes)
            raise DataError(f"{wrong!r} is not a token: they are numbered from 0 to {self.vocabulary - 1}.") from None

    def __repr__(self) -> str:
        return f"BytePair({self.vocabulary:,} pieces, {len(self.special)} special)"


@cache
def load_gpt2_encoding() -> BytePair:
    """Return GPT-2's encoding, loaded once."""
    return BytePair.load(GPT2_FOLDER)


def find_last_merge(piece: bytes, numbers: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two pieces of the last merge that makes a piece: those left when all earlier merges are done."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        ranks = [numbers.get(left + right, len(numbers)) for left, right in pairwise(parts)]
        n = ranks.index(min(ranks))
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return parts[0], parts[1]
