"""Letters: a vocabulary of single characters, for models that read only these."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from regard.atomic_write import write_atomically
from regard.errors import DataError

FILE_NAME = "letters.txt"
SHOWN = 40  # letters of an alphabet that an error lists
MANY = 200  # most letters that repr lists


class Letters:
    """A vocabulary in which each letter's token id is its index in an alphabet."""

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise DataError(f"an alphabet must have at least one letter, each given once; got {alphabet[:SHOWN]!r}.")
        if any("\ud800" <= letter <= "\udfff" for letter in alphabet):
            raise DataError("an alphabet must be whole characters; it has half of a surrogate pair, which no text file holds.")
        self.alphabet = alphabet
        self.special: dict[str, int] = {}
        self._numbers = {letter: number for number, letter in enumerate(alphabet)}

    @classmethod
    def from_texts(cls, texts: str | Iterable[str]) -> "Letters":
        """Create the alphabet of all letters in one or several texts, ordered by code point."""
        found: set[str] = set()
        for text in [texts] if isinstance(texts, str) else texts:
            found.update(text)
        if not found:
            raise DataError("these texts have no letters; an alphabet needs at least one.")
        return cls("".join(sorted(found)))

    @classmethod
    def load(cls, folder: str | Path) -> "Letters":
        """Load the alphabet in a folder's letters.txt."""
        path = Path(folder) / FILE_NAME
        try:
            letters = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
        return cls(letters.removesuffix("\r\n") if letters.endswith("\r\n") else letters.removesuffix("\n"))

    def save(self, folder: str | Path) -> None:
        """Write the letters and a line end to letters.txt in a folder, which is created if needed."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        line_end = "" if self.alphabet.endswith("\r") else "\n"  # "\r\n" would be read as one line end
        with write_atomically(Path(folder) / FILE_NAME) as (partial,):
            partial.write_bytes((self.alphabet + line_end).encode("utf-8"))

    @property
    def vocabulary(self) -> int:
        """The number of letters."""
        return len(self.alphabet)

    def encode(self, text: str, allowed: Collection[str] = ()) -> list[int]:
        """Return the token ids of a text; raise DataError for a letter that is not in the alphabet.

        The line end at the end of a text file is dropped if the alphabet has none.
        """
        if text.endswith("\n") and "\n" not in self._numbers:
            text = text.removesuffix("\n").removesuffix("\r" * ("\r" not in self._numbers))
        try:
            if allowed:
                raise KeyError(next(iter(allowed)))  # an alphabet has no special tokens
            return list(map(self._numbers.__getitem__, text))
        except KeyError as error:
            shown = (letter if letter.isalnum() else repr(letter) for letter in self.alphabet[:SHOWN])
            letters = ", ".join(shown) + (", ..." if self.vocabulary > SHOWN else "")
            raise DataError(f"{error.args[0]!r} is not a letter of this model, which reads only {letters}.") from None

    @staticmethod
    def find_cut(text: str) -> int:
        """Return a number of leading characters that may be encoded separately from the rest: all but line ends at the end."""
        return len(text.rstrip("\r\n")) or max(len(text) - 2, 1)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of token ids; raise DataError for an unknown id."""
        return "".join(self.pieces(ids))

    def bytes(self, ids: Sequence[int] | Tensor) -> bytes:
        """Return the UTF-8 bytes of the text of token ids."""
        return self.decode(ids).encode()

    def pieces(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Return the letter of each token id."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        wrong = [one for one in numbers if not isinstance(one, int) or not 0 <= one < self.vocabulary]
        if wrong:
            raise DataError(f"{wrong[0]!r} is not a token: they are numbered from 0 to {self.vocabulary - 1}.")
        return [self.alphabet[number] for number in numbers]

    def __repr__(self) -> str:
        return f"Letters({self.alphabet!r})" if self.vocabulary <= MANY else f"Letters({self.vocabulary:,} of them)"
