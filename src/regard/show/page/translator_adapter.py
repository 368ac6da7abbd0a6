"""Translators that the page runs on typed text, with the translation and what each of its words attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.errors import ConfigError, DataError
from regard.generate.translation_search import END_LABEL, get_end_token, translate
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer
from regard.observe import Recording, record
from regard.weights.translator_weights import INCLUDED_TRANSLATORS

EXAMPLE, SENTENCE = "translator", "A man in a blue shirt is riding a horse."  # in the package; what it reads
SENTENCES = (SENTENCE, "Two young girls are playing in the snow.", "The old woman is reading a book in the park.")
Translator = RecurrentTranslator | Transformer


@dataclass(frozen=True, eq=False)
class TranslatorAdapter:
    """A translator of regard, with its vocabulary."""

    name: str
    model: Translator

    @property
    def context(self) -> int | None:
        """Maximum number of tokens that the model reads, or None."""
        return self.model.context

    def encode_sentence(self, text: str) -> list[int]:
        """Return the tokens of a sentence and its end, with white space as in training.

        Raises DataError where there is no word, ConfigError if the model has no vocabulary.
        """
        if self.model.text is None:
            raise ConfigError(f"{self.name} has no vocabulary, so it cannot read a text: set model.text.")
        words, end = " ".join(text.split()), get_end_token(self.model)
        if not words:
            raise DataError("the text has no word to translate.")
        return [*self.model.text.encode(words), end]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        end = get_end_token(self.model)
        words = self.model.text.pieces(ids) if self.model.text is not None else map(str, ids)
        return [END_LABEL if one == end else word for one, word in zip(ids, words, strict=True)]


def adapt_translator(name: str, model: Translator) -> TranslatorAdapter:
    """Wrap a translator under a name. Raises ConfigError where it has no attention."""
    if isinstance(model, RecurrentTranslator) and model.attention is None:
        raise ConfigError(f"{name} has no attention to show: regard translate prints its translations.")
    return TranslatorAdapter(name, model)


def has_example() -> bool:
    """Return whether the example's translator is in this package."""
    return INCLUDED_TRANSLATORS[EXAMPLE].is_dir()


def record_example() -> Recording:
    """Record the translation of the example sentence."""
    return record_translation(
        adapt_translator(EXAMPLE, translator.load(INCLUDED_TRANSLATORS[EXAMPLE])), SENTENCE, len(SENTENCE)
    )


def record_translation(adapter: TranslatorAdapter, text: str, most: int) -> Recording:
    """Record the attention of a translator as it writes the likeliest translation of a sentence.

    A row of the cross attention is the word that was written there; the decoder's self attention is of the words it had read.
    Raises ConfigError where the sentence is too long.
    """
    model, source, end = adapter.model, adapter.encode_sentence(text), get_end_token(adapter.model)
    bound = min(most, adapter.context or most)
    if len(source) > bound:
        raise ConfigError(f"{adapter.name} reads at most {bound:,} tokens here, but the text has {len(source):,}: shorten it.")
    (found,) = translate(model, [source])
    read = [end, *found.tokens[:-1]]
    with torch.inference_mode(), record(model, keep="values") as recording:
        model(torch.tensor([source]), [len(source)], torch.tensor([read]))
    recording.model = adapter.name
    words = {"rows": found.tokens, "columns": source, "read": read}
    recording.tokens = {axis: adapter.pieces(ids) for axis, ids in words.items()}
    return recording
