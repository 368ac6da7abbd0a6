"""Numbers: token ids as text, for a model without a vocabulary."""

from collections.abc import Sequence

from regard.errors import DataError


class NumberTokenizer:
    """A vocabulary in which the text of a token is its id in decimal."""

    def encode(self, text: str) -> list[int]:
        """Parse ids separated by spaces."""
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise DataError("the model has no vocabulary: write the text as token numbers, for example '3 1 2'.") from None

    def bytes(self, ids: Sequence[int]) -> bytes:
        """Return ids separated by spaces, as bytes."""
        return "".join(f" {number}" for number in ids).encode()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each id as text."""
        return [str(number) for number in ids]
