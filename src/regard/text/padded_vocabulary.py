"""The vocabulary of a model that has more tokens than its text, as nanoGPT rounds the number of GPT-2's up to 50,304."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.text.byte_pair import BytePair
from regard.text.letters import Letters

UNKNOWN = "\ufffd"  # the text of a token that the vocabulary lacks; at least one byte, as that of any token


@dataclass(frozen=True, eq=False)
class PaddedVocabulary:
    """A vocabulary in which each token from `text.vocabulary` on is U+FFFD."""

    text: BytePair | Letters

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.text.encode(text)

    def bytes(self, ids: Sequence[int] | Tensor) -> builtins.bytes:
        """Return the UTF-8 bytes of token ids."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else ids
        return b"".join(self.text.bytes([one]) if one < self.text.vocabulary else UNKNOWN.encode() for one in numbers)

    def pieces(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Return the text of each token id."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else ids
        return [self.text.pieces([one])[0] if one < self.text.vocabulary else UNKNOWN for one in numbers]


def pad_vocabulary(text: BytePair | Letters, vocabulary: int) -> BytePair | Letters | PaddedVocabulary:
    """Return a text that can write each token of a model with a vocabulary of this size: itself if it has as many."""
    return PaddedVocabulary(text) if text.vocabulary < vocabulary else text
