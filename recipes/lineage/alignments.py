"""What the models look at: alignments of five sentences, and the weight on words spelled alike in both languages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.lineage.word_alignment import Alignment, align
from regard.evaluate.translation_scores import translate_sentences
from regard.models.recurrent import RecurrentTranslator
from regard.models.translator import Translator

CAPTIONS = (  # of the test part, chosen because a colour or a kind goes after its noun in French
    "Four white dogs with muzzles jump over a red wall.",
    "The woman in the brown shirt is sitting on a bright red bench.",
    "A big black poodle running on the grass with a toy in its mouth.",
    "A young child wearing green boots playing in a mud puddle",
)
LECTURES = "The cat that was sitting on the mat, which was next to the dog, jumped"
FRENCH = "Le chat qui était assis sur le tapis, qui était à côté du chien, a sauté"
JUMPED, WORDS = "jumped", ("a", "sauté")
BEAMS = 4
PAIRS = 500  # of the held-out part, in which twins are looked for
LETTERS = 4  # of a twin, at least: "a", "on" and "pour" mean other things in French


def measured(model: Translator, sources: Sequence[str], targets: Sequence[str]) -> dict[str, Any]:
    """The model's own words for the captions and the lectures' sentence, and what it looked at where it has attention.

    The lectures' sentence is aligned with the French given here, so that the words asked about are there whatever it wrote.
    """
    said = list(translate_sentences(model, [*CAPTIONS, LECTURES], beams=BEAMS))
    row: dict[str, Any] = {"says": said[-1]}
    if isinstance(model, RecurrentTranslator) and model.attention is None:
        return row
    shares, counted = twins(model, sources[:PAIRS], targets[:PAIRS])
    layer = max(range(len(shares)), key=shares.__getitem__)
    found = [align(model, source, target) for source, target in zip((*CAPTIONS, LECTURES), (*said[:-1], FRENCH), strict=True)]
    row |= {"twins": counted, "layers": [round(share, 3) for share in shares], "layer": layer}
    return row | {"alignments": [told(one, layer) for one in found]}


def twins(model: Translator, sources: Sequence[str], targets: Sequence[str]) -> tuple[list[float], int]:
    """Of each layer the mean weight on the source word that is spelled as the target word, and how many such pairs there are.

    They stand once on either side: names, numbers, orange, taxi. What they should look at is known without a dictionary.
    """
    weights: list[Tensor] = []
    for source, target in zip(sources, targets, strict=True):
        if any(len(word) >= LETTERS and word in source for word in target.split()):
            found = align(model, source, target)
            weights += [found.weights[:, row, column] for row, column in alike(found)]
    shares: list[float] = torch.stack(weights).mean(0).tolist()
    return shares, len(weights)


def alike(found: Alignment) -> list[tuple[int, int]]:
    """Row and column of each word that stands once on either side."""
    words = [word for word in found.target[:-1] if len(word) >= LETTERS and word[0].isalnum()]
    alone = [word for word in words if found.target.count(word) == found.source.count(word) == 1]
    return [(found.target.index(word), found.source.index(word)) for word in alone]


def told(found: Alignment, layer: int) -> dict[str, Any]:
    """An alignment as JSON, weights to three digits."""
    weights = [[round(weight, 3) for weight in row] for row in found.weights[layer].tolist()]
    return {"source": found.source, "target": found.target, "weights": weights}
