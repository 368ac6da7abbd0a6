"""Letters: a vocabulary of single letters, for models that read nothing else."""

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from regard.errors import DataError

FILE = "letters.txt"


class Letters:
    """Each letter of an alphabet as its place in it, from 0 on."""

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise DataError(f"an alphabet is some letters, each of them once; got {alphabet!r}.")
        self.alphabet = alphabet
        self.special: dict[str, int] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Letters":
        """The alphabet in a folder's letters.txt."""
        return cls((Path(folder) / FILE).read_text(encoding="utf-8").rstrip("\n"))

    def save(self, folder: str | Path) -> None:
        """Writes letters.txt into a folder, which is made where there is none."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / FILE).write_text(self.alphabet + "\n", encoding="utf-8")

    @property
    def vocabulary(self) -> int:
        """How many letters there are."""
        return len(self.alphabet)

    def encode(self, text: str, allowed: Collection[str] = ()) -> list[int]:
        """The numbers of a text; DataError for a letter that is none of the alphabet's."""
        wrong = [letter for letter in [*allowed, *text] if letter not in self.alphabet]
        if wrong:
            raise DataError(
                f"{wrong[0]!r} is no letter of this model, which reads {', '.join(self.alphabet)} and nothing else."
            )
        return [self.alphabet.index(letter) for letter in text]

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
        return f"Letters({self.alphabet!r})"
