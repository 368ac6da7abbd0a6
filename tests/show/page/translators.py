"""Small translators that have learned two sentences by heart, in a second, in float64: all processors train them alike."""

import functools

import torch

from models.translators import MADE, pad_sentences
from regard.models.translator import Translator
from regard.text import BytePair

PAIRS = [
    ("A man rides a horse.", "Un homme monte à cheval."),
    ("The woman reads a good book in the park.", "La femme lit un bon livre dans le parc."),
]
READ, WRITTEN = PAIRS[0]
STEPS = 80
SIZES = {"additive": {"width": 24, "hidden": 24}, "transformer": {"width": 24, "heads": 3, "layers": 3}}


@functools.cache
def train_small_translator(kind: str) -> Translator:
    """A translator of a kind: "additive" or "transformer"."""
    torch.manual_seed(0)
    text = BytePair.train([side for pair in PAIRS for side in pair] * 9, 340)
    model = MADE[kind](vocabulary=text.vocabulary, **SIZES[kind]).double()
    model.text = text
    sources, before, after = ([] for _ in range(3))
    for english, french in PAIRS:
        ids = [*text.encode(french), text.end]
        sources.append([*text.encode(english), text.end])
        before.append([text.end, *ids[:-1]])
        after.append(ids)
    given = *pad_sentences(sources), pad_sentences(before)[0]
    wanted = pad_sentences(after, -100)[0].flatten()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(*given).flatten(0, 1), wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()
