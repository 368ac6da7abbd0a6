"""Letters: a vocabulary of single letters, for models that read nothing else."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from regard.errors import DataError
from regard.writing import whole

FILE = "letters.txt"
SHOWN = 40  # letters of an alphabet that an error spells out
MANY = 200  # more letters than a line shows


class Letters:
    """Each letter of an alphabet as its place in it, from 0 on."""

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise DataError(f"an alphabet is some letters, each of them once; got {alphabet[:SHOWN]!r}.")
        if any("\ud800" <= letter <= "\udfff" for letter in alphabet):
            raise DataError("an alphabet is of whole characters; it has half of a surrogate pair, which no file of text holds.")
        self.alphabet = alphabet
        self.special: dict[str, int] = {}
        self._numbers = {letter: number for number, letter in enumerate(alphabet)}

    @classmethod
    def of(cls, texts: str | Iterable[str]) -> "Letters":
        """Every letter that occurs in a text, or in several, in the order of their code points."""
        found: set[str] = set()
        for text in [texts] if isinstance(texts, str) else texts:
            found.update(text)
        if not found:
            raise DataError("there is no letter in these texts, and an alphabet has one at least.")
        return cls("".join(sorted(found)))

    @classmethod
    def load(cls, folder: str | Path) -> "Letters":
        """The alphabet in a folder's letters.txt."""
        path = Path(folder) / FILE
        try:
            held = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from None
        return cls(held.removesuffix("\r\n") if held.endswith("\r\n") else held.removesuffix("\n"))

    def save(self, folder: str | Path) -> None:
        """Writes letters.txt into a folder, which is made where there is none: the letters, and the end of their line."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        line_end = "" if self.alphabet.endswith("\r") else "\n"  # after \r it would be read as a line's end of two letters
        with whole(Path(folder) / FILE) as (beside,):
            beside.write_bytes((self.alphabet + line_end).encode("utf-8"))

    @property
    def vocabulary(self) -> int:
        """How many letters there are."""
        return len(self.alphabet)

    def encode(self, text: str, allowed: Collection[str] = ()) -> list[int]:
        """The numbers of a text; DataError for a letter that is none of the alphabet's.

        The line's end with which files of text end is left out where the alphabet has none.
        """
        if text.endswith("\n") and "\n" not in self._numbers:
            text = text.removesuffix("\n").removesuffix("\r" * ("\r" not in self._numbers))
        try:
            if allowed:
                raise KeyError(next(iter(allowed)))  # there are no special tokens
            return list(map(self._numbers.__getitem__, text))
        except KeyError as error:
            letters = ", ".join(self.alphabet[:SHOWN]) + (", ..." if self.vocabulary > SHOWN else "")
            raise DataError(f"{error.args[0]!r} is no letter of this model, which reads {letters} and nothing else.") from None

    @staticmethod
    def find_cut(text: str) -> int:
        """Return how many of a text's first characters may be encoded apart from what follows: all that end no line."""
        return len(text.rstrip("\r\n")) or max(len(text) - 2, 1)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of numbers; DataError for a number that stands for no letter."""
        return "".join(self.pieces(ids))

    def bytes(self, ids: Sequence[int] | Tensor) -> bytes:
        """The same in UTF-8."""
        return self.decode(ids).encode()

    def pieces(self, ids: Sequence[int] | Tensor) -> list[str]:
        """The letter of each number."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        wrong = [one for one in numbers if not isinstance(one, int) or not 0 <= one < self.vocabulary]
        if wrong:
            raise DataError(f"{wrong[0]!r} is no token: they are numbered from 0 to {self.vocabulary - 1}.")
        return [self.alphabet[number] for number in numbers]

    def __repr__(self) -> str:
        return f"Letters({self.alphabet!r})" if self.vocabulary <= MANY else f"Letters({self.vocabulary:,} of them)"
