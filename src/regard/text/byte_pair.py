"""BytePair: byte-pair encoding, a text as the numbers a model reads, and back, byte for byte.

The two files that hold one, vocab.bpe and encoder.json, are OpenAI's format: pairs in the order they were joined, and each
piece's number. GPT-2's own are carried in this package (`gpt2/`, with their licence). tiktoken does the encoding.
"""

import builtins
import json
from collections.abc import Collection, Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import tiktoken
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.writing import whole

OWN = Path(__file__).parent / "gpt2"
FILES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))  # pairs and numbers: OpenAI's names, and transformers'
PAIRS, NUMBERS = FILES[0]
END = "<|endoftext|>"
# how GPT-2 cuts a text before pairs are joined (Radford et al. 2019): contractions, words, numbers, signs, spaces
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class BytePair:
    """A byte-pair encoding: its pieces as bytes, numbered in the order of their joining, and its special tokens.

    The first 256 pieces are the single bytes, so that any text has an encoding.
    """

    def __init__(self, pieces: dict[bytes, int], special: dict[str, int]) -> None:
        self.special = special
        self._coding = tiktoken.Encoding("regard", pat_str=PATTERN, mergeable_ranks=pieces, special_tokens=special)
        self._pieces = pieces
        self._bytes = {number: piece for piece, number in pieces.items()}
        self._bytes |= {number: word.encode() for word, number in special.items()}

    @classmethod
    def gpt2(cls, folder: str | Path | None = None) -> "BytePair":
        """GPT-2's own: 50,000 joined pairs, 256 bytes and the end of text."""
        return own() if folder is None else cls.load(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "BytePair":
        """The encoding in a folder's vocab.bpe and encoder.json, or vocab.json and merges.txt, as transformers names them.

        Raises DataError where they are missing, damaged, or do not belong together.
        """
        folder = Path(folder)
        pairs, numbers = FILES[0] if (folder / PAIRS).exists() else FILES[1]
        return cls(*read(folder / pairs, folder / numbers))

    def save(self, folder: str | Path) -> None:
        """Writes the two files into a folder, which is made where there is none."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        spelled = {spell(piece): number for piece, number in self._pieces.items()}
        numbers = dict(sorted({**spelled, **self.special}.items(), key=lambda item: item[1]))
        lines = [f"{spell(left)} {spell(right)}" for left, right in self.pairs]
        with whole(folder / NUMBERS, folder / PAIRS) as (numbers_file, pairs_file):
            numbers_file.write_text(json.dumps(numbers), encoding="utf-8")
            pairs_file.write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int, special: Sequence[str] = (END,)) -> "BytePair":
        """An encoding of one's own: the pairs that occur most often in these texts, up to a vocabulary of this size.

        A small text has fewer pairs. Raises ConfigError where there is no room for the 256 bytes and the special tokens.
        """
        least = 256 + len(special)
        if vocabulary < least:
            raise ConfigError(
                f"vocabulary must be at least {least}, 256 bytes and {len(special)} special tokens; got {vocabulary}."
            )
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError:
            raise ConfigError("BytePair.train needs tokenizers: pip install tokenizers.") from None
        trainer = ByteLevelBPETokenizer()
        trainer.train_from_iterator(texts, vocab_size=vocabulary - len(special), min_frequency=2, show_progress=False)
        merges = json.loads(trainer.to_str())["model"]["merges"]
        pairs = [(unspell(left), unspell(right)) for left, right in merges]
        pieces = numbered(pairs)
        return cls(pieces, {word: len(pieces) + n for n, word in enumerate(special)})

    @property
    def end(self) -> int:
        """The number of the end of text; DataError where this encoding has none."""
        if END not in self.special:
            raise DataError(f"this encoding has no {END}; its special tokens are {', '.join(self.special) or 'none'}.")
        return self.special[END]

    @property
    def vocabulary(self) -> int:
        """How many numbers there are."""
        return len(self._bytes)

    @cached_property
    def pairs(self) -> list[tuple[bytes, bytes]]:
        """The pairs in the order they were joined."""
        joined = sorted((piece for piece in self._pieces if len(piece) > 1), key=lambda piece: self._pieces[piece])
        return [halves(piece, self._pieces) for piece in joined]

    def encode(self, text: str, allowed: Collection[str] = ()) -> list[int]:
        """The numbers of a text. A special token in it is plain text, unless it is among those allowed.

        Raises DataError for half of a surrogate pair, which no file of text holds, and for what is no special token.
        """
        unknown = [word for word in allowed if word not in self.special]
        if unknown:
            raise DataError(f"{unknown[0]!r} is no special token; there is {', '.join(self.special) or 'none'}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the text has half of a surrogate pair at {error.start}, which is no character.") from None
        return self._coding.encode(text, allowed_special=set(allowed), disallowed_special=())

    def bytes(self, ids: Sequence[int] | Tensor) -> builtins.bytes:
        """The bytes that numbers stand for. Raises DataError for a number that stands for none."""
        return b"".join(self._each(ids))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of numbers; half a character is U+FFFD."""
        return self.bytes(ids).decode(errors="replace")

    def pieces(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Each number's piece of the text, for the axes of a picture; bytes that are no whole character as in \\xe2."""
        return [piece.decode(errors="backslashreplace") for piece in self._each(ids)]

    def _each(self, ids: Sequence[int] | Tensor) -> list[builtins.bytes]:
        numbers = ids.tolist() if isinstance(ids, Tensor) else ids
        try:
            return [self._bytes[number] for number in numbers]
        except (KeyError, TypeError):
            wrong = next(one for one in numbers if not isinstance(one, int) or one not in self._bytes)
            raise DataError(f"{wrong!r} is no token: they are numbered from 0 to {self.vocabulary - 1}.") from None

    def __repr__(self) -> str:
        return f"BytePair({self.vocabulary:,} pieces, {len(self.special)} special)"


@cache
def own() -> BytePair:
    """GPT-2's, read once."""
    return BytePair.load(OWN)


@cache
def letters() -> dict[int, str]:
    """The letter that stands for each byte in the files: itself where it prints, else one from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@cache
def letter_bytes() -> dict[str, int]:
    """The way back."""
    return {letter: byte for byte, letter in letters().items()}


def spell(piece: bytes) -> str:
    """A piece as the files write it."""
    return "".join(letters()[byte] for byte in piece)


def unspell(word: str) -> bytes:
    """The way back; KeyError for a letter that stands for no byte."""
    return bytes(letter_bytes()[letter] for letter in word)


def numbered(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Every piece's number: the bytes in the order of the files, then the pairs in theirs."""
    pieces = [*(bytes([byte]) for byte in letters()), *(left + right for left, right in pairs)]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def halves(piece: bytes, numbers: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that were joined last to make one: those left when every earlier joining has been done."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 2:
        ranks = [numbers.get(left + right, len(numbers)) for left, right in pairwise(parts)]
        n = ranks.index(min(ranks))
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return parts[0], parts[1]


def read(pairs: Path, numbers: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    """Pieces and special tokens from the two files, which must agree."""
    for path in (pairs, numbers):
        if not path.is_file():
            raise DataError(f"{path} is missing: a byte-pair encoding is {PAIRS} and {NUMBERS} in one folder.")
    try:
        lines = pairs.read_text(encoding="utf-8").splitlines()
        joined = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        found = [(unspell(left), unspell(right)) for left, right in joined]
    except (UnicodeDecodeError, ValueError, KeyError) as error:
        raise DataError(f"{pairs} is no list of pairs, two words a line: {error}.") from None
    try:
        given = json.loads(numbers.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not all(isinstance(n, int) and not isinstance(n, bool) for n in given.values()):
            raise ValueError("it must say a whole number for each word")
    except ValueError as error:
        raise DataError(f"{numbers} is no JSON object of words and their numbers: {error}.") from None
    pieces = {piece: given.get(spell(piece)) for piece in numbered(found)}
    missing = next((piece for piece, number in pieces.items() if number is None), None)
    if missing is not None:
        raise DataError(f"{numbers} has no number for {spell(missing)!r}, which {pairs.name} joins.")
    ranks = {piece: number for piece, number in pieces.items() if number is not None}
    order = [ranks[left + right] for left, right in found]
    taken = set(ranks.values())
    special = {word: number for word, number in given.items() if number not in taken}
    if sorted(given.values()) != list(range(len(given))) or len(ranks) + len(special) != len(given) or order != sorted(order):
        raise DataError(f"{numbers} does not number the pieces of {pairs.name} from 0 on, in the order they are joined.")
    return ranks, special
