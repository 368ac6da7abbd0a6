"""Encoder: what is needed of a vocabulary to make prompts."""

from typing import Protocol


class Encoder(Protocol):
    """A vocabulary: the tokens of a text."""

    def encode(self, text: str) -> list[int]:
        """Return all tokens of a text."""
