"""The translation of a sentence for `regard walk --model`, and the attention from which each word was generated."""

from itertools import pairwise

import torch

from regard.errors import ConfigError
from regard.generate.translation_search import get_end_token, translate
from regard.lectures.example_steps import Example
from regard.lectures.translation_example import build_translation_example
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.show.page.translator_adapter import adapt_translator

SENTENCE = "A man is riding a horse."  # the default


def make_translation_example(name: str, sentence: str | None = None) -> Example:
    """Return every step of a trained translator's additive attention; raise ConfigError if it has none."""
    model = translator.load(name)
    adapter = adapt_translator(name, model)
    if not isinstance(model, RecurrentTranslator) or model.attention is None:
        raise ConfigError(f"{name} is a {model.KIND} with dot-product attention: --model takes a recurrent translator.")
    source = adapter.encode_sentence(SENTENCE if sentence is None else sentence)
    (found,) = translate(model, [source])
    with torch.no_grad():
        state, states = model.begin(model.encode(torch.tensor([source]), [len(source)])), []
        for token in [get_end_token(model), *found.tokens[:-1]]:
            states.append(state.hidden[0][-1])  # the query is the state before the token is read
            _, state = model.read(torch.tensor([token]), state)
        written, read = adapter.pieces(found.tokens), adapter.pieces(source)
        words, sources = ([piece.strip() or piece for piece in side] for side in (written, read))
        annotations = state.memory.annotations[0]
        split_notes = make_split_word_notes([*read, *written])
        return build_translation_example(
            words, sources, torch.cat(states), annotations, model.attention, model=name, notes=split_notes
        )


def make_split_word_notes(pieces: list[str]) -> list[str]:
    """Return a note if a word consists of several tokens."""
    parts = next(((one, other) for one, other in pairwise(pieces) if one[-1:].isalpha() and other[:1].isalpha()), None)
    return [f"A word that is not in the vocabulary is split into pieces: {' '.join(parts).strip()}."] if parts else []
