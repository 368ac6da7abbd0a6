"""Numbers: the text of a model that has no vocabulary beside it."""

from collections.abc import Sequence

from regard.errors import DataError


class Numbers:
    """The text of a model that has none: the numbers of its tokens."""

    def encode(self, text: str) -> list[int]:
        """Numbers with space between them."""
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise DataError(
                "the model has no vocabulary beside it: write the numbers of tokens as the text, '3 1 2' say."
            ) from None

    def bytes(self, ids: Sequence[int]) -> bytes:
        """The way back."""
        return "".join(f" {number}" for number in ids).encode()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each by itself."""
        return [str(number) for number in ids]
