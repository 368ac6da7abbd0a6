"""Translating: a translator that the page runs on what is typed: what it writes, and what it looked at for each word of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.errors import ConfigError, DataError
from regard.generate.translation import END, ending, translate
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer
from regard.observe import Recording, record
from regard.weights.translators import CARRIED

EXAMPLE, SENTENCE = "translator", "A man in a blue shirt is riding a horse."  # which is carried, and what it reads
SENTENCES = (SENTENCE, "Two young girls are playing in the snow.", "The old woman is reading a book in the park.")
Translator = RecurrentTranslator | Transformer


@dataclass(frozen=True, eq=False)
class Translating:
    """A translator of this house, with its vocabulary."""

    name: str
    model: Translator

    @property
    def context(self) -> int | None:
        """How many tokens it reads at most, where there is a bound."""
        return self.model.context

    def ids(self, text: str) -> list[int]:
        """The tokens of a sentence and its end, white space as where the model learned."""
        words, end = " ".join(text.split()), ending(self.model)
        if not words or self.model.text is None:
            raise DataError("there is no word to translate.")
        return [*self.model.text.encode(words), end]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Tokens as they are shown."""
        end = ending(self.model)
        words = self.model.text.pieces(ids) if self.model.text is not None else map(str, ids)
        return [END if one == end else word for one, word in zip(ids, words, strict=True)]


def translating(name: str, model: Translator) -> Translating:
    """A translator under a name; ConfigError where it has no attention."""
    if isinstance(model, RecurrentTranslator) and model.attention is None:
        raise ConfigError(f"{name} has no attention to look at: regard translate prints what it writes.")
    return Translating(name, model)


def carried() -> bool:
    """Whether the example's translator is in this package."""
    return CARRIED[EXAMPLE].is_dir()


def example() -> Recording:
    """The recording of the sentence that is the example."""
    return recorded(translating(EXAMPLE, translator.load(CARRIED[EXAMPLE])), SENTENCE, len(SENTENCE))


def recorded(speaker: Translating, text: str, most: int) -> Recording:
    """What a translator looks at as it writes the likeliest translation of a sentence.

    A row of its cross attention is the word that was written there; the decoder's own attention is of the words it had read.
    """
    model, source, end = speaker.model, speaker.ids(text), ending(speaker.model)
    bound = min(most, speaker.context or most)
    if len(source) > bound:
        raise ConfigError(f"{speaker.name} reads {bound:,} tokens here, and the text has {len(source):,}: shorten it.")
    (found,) = translate(model, [source])
    read = [end, *found.tokens[:-1]]
    with torch.inference_mode(), record(model, keep="values") as recording:
        model(torch.tensor([source]), [len(source)], torch.tensor([read]))
    recording.model = speaker.name
    words = {"rows": found.tokens, "columns": source, "read": read}
    recording.tokens = {axis: speaker.pieces(ids) for axis, ids in words.items()}  # type: ignore[assignment]
    return recording
