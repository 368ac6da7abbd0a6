"""Tokenizers: text to token ids and back."""

from regard.text.byte_pair import BytePair
from regard.text.letters import Letters

__all__ = ["BytePair", "Letters"]
