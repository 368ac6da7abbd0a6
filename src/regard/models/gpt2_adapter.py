"""GPT2Adapter: a GPT-2 in regard's own format with its tokenizer, whatever vocabulary it has."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import DataError
from regard.models.gpt2 import GPT2
from regard.text import BytePair, Letters
from regard.text.number_tokenizer import NumberTokenizer
from regard.text.padded_vocabulary import PaddedVocabulary, pad_vocabulary


@dataclass(frozen=True, eq=False)
class GPT2Adapter:
    """A GPT-2 in regard's own format, with weights from anywhere."""

    name: str
    model: GPT2

    @property
    def context(self) -> int:
        """The most tokens that the model reads."""
        return self.model.config.context

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.model.config.layers

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def words(self) -> BytePair | Letters | PaddedVocabulary | NumberTokenizer:
        """The vocabulary; if the model has none, tokens are written as numbers."""
        text = self.model.text
        return NumberTokenizer() if text is None else pad_vocabulary(text, self.model.config.vocabulary)

    def tokens(self, text: str, most: int | None) -> tuple[Tensor, list[str], int]:
        """Return the first tokens of a text, as many as the model reads, their pieces, and the number of all tokens."""
        found = self.encode(text)
        if not found:
            raise DataError("the text has no tokens: pass at least one word.")
        ids = found[: min(self.context, len(found) if most is None else most)]
        return torch.tensor([ids]), self.words.pieces(ids), len(found)

    def encode(self, text: str) -> list[int]:
        """Return all tokens of a text."""
        return self.words.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.words.bytes(ids).decode(errors="replace")

    def list_ends(self) -> list[int]:
        """List the tokens that end a text."""
        return [end for end in [self.model.get_end_settings().get("end")] if end is not None]

    def pieces(self) -> list[str]:
        """Return the text of every token of the vocabulary."""
        return self.words.pieces(range(self.model.config.vocabulary if self.model.text is None else self.model.text.vocabulary))

    def run(self, ids: Tensor) -> Tensor:
        """Compute the logits of tokens."""
        logits: Tensor = self.model(ids.to(self.device))
        return logits
