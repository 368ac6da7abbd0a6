"""The translation of a sentence for `regard walk --model`, and the attention from which each word was generated."""

from itertools import pairwise

import torch

from regard.errors import ConfigError
from regard.generate.translation import ending, translate
from regard.lectures.scenes import Example
from regard.lectures.translated import translated
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.show.page.translating import translating

SENTENCE = "A man is riding a horse."  # the default


def translated_example(name: str, sentence: str | None = None) -> Example:
    """Return every step of a trained translator's additive attention; raise ConfigError if it has none."""
    model = translator.load(name)
    speaker = translating(name, model)
    if not isinstance(model, RecurrentTranslator) or model.attention is None:
        raise ConfigError(f"{name} is a {model.KIND} with dot-product attention: --model takes a recurrent translator.")
    source = speaker.ids(SENTENCE if sentence is None else sentence)
    (found,) = translate(model, [source])
    with torch.no_grad():
        state, states = model.begin(model.encode(torch.tensor([source]), [len(source)])), []
        for token in [ending(model), *found.tokens[:-1]]:
            states.append(state.hidden[0][-1])  # the query is the state before the token is read
            _, state = model.read(torch.tensor([token]), state)
        written, read = speaker.pieces(found.tokens), speaker.pieces(source)
        words, sources = ([piece.strip() or piece for piece in side] for side in (written, read))
        annotations = state.memory.annotations[0]
        said = in_pieces([*read, *written])
        return translated(words, sources, torch.cat(states), annotations, model.attention, model=name, notes=said)


def in_pieces(pieces: list[str]) -> list[str]:
    """Return a note if a word consists of several tokens."""
    parts = next(((one, other) for one, other in pairwise(pieces) if one[-1:].isalpha() and other[:1].isalpha()), None)
    return [f"A word that is not in the vocabulary is split into pieces: {' '.join(parts).strip()}."] if parts else []
