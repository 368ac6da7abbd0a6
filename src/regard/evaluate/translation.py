"""How near translations are to those of people: BLEU and chrF by sacrebleu, with the signature that says how they were counted.

Source: Papineni et al. 2002; Popović 2015; Post 2018, A call for clarity in reporting BLEU scores.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.errors import ConfigError, DataError
from regard.generate.translation import Translator, ending, translate

BLOCK = 512  # sentences that are translated before the first of them is given


@dataclass(frozen=True)
class Score:
    """A score from 0 to 100, and sacrebleu's words for how it was counted."""

    name: str
    score: float
    signature: str
    interval: float | None = None  # where sentences were drawn again: 95 % of the draws lie within so much of the score

    def __str__(self) -> str:
        within = "" if self.interval is None else f" ± {self.interval:.1f}"
        return f"{self.name} {self.score:.1f}{within}  {self.signature}"


def bleu(translations: Sequence[str], references: Sequence[str], draws: int = 0) -> Score:
    """BLEU: how many runs of one to four words stand in the reference too, of a text as a whole; shorter texts lose.

    Where `draws` is not 0, so many times as many sentences are drawn at random, which says how much of it is chance; where some
    of the draws have no word right, nothing is said of it.
    """
    return scored("BLEU", "BLEU", translations, references, draws)


def chrf(translations: Sequence[str], references: Sequence[str], draws: int = 0) -> Score:
    """chrF: the mean of precision and recall of runs of one to six letters, recall counted twice."""
    return scored("chrF", "CHRF", translations, references, draws)


def scored(name: str, metric: str, translations: Sequence[str], references: Sequence[str], draws: int) -> Score:
    """A score by sacrebleu's metric of this name."""
    if len(translations) != len(references) or not translations:
        raise DataError(
            f"there are {len(translations):,} translations and {len(references):,} references: one of each for a sentence."
        )
    try:
        metrics: Any = importlib.import_module("sacrebleu.metrics")
    except ImportError:
        raise ConfigError(f"{name} needs sacrebleu: pip install sacrebleu.") from None
    counter = getattr(metrics, metric)()
    try:
        found = counter.corpus_score(list(translations), [list(references)], n_bootstrap=max(draws, 1))
    except TypeError:
        if not draws:
            raise
        return scored(name, metric, translations, references, 0)  # sacrebleu takes no mean where draws have no word right
    signature = str(counter.get_signature())
    if not draws:
        return Score(name, float(found.score), signature)
    said = json.loads(found.format(signature=signature, is_json=True))
    return Score(name, float(found.score), signature, float(said.get("confidence_var", 0.0)))  # none where all draws score 0


def translations(
    model: Translator,
    sentences: Sequence[str],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    watch: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """The translation of each sentence, in order; of one without a word, nothing. watch is told how many are done.

    White space counts as one space, as where the model learned.
    """
    end = ending(model)
    for start in range(0, len(sentences), BLOCK):
        some = [" ".join(one.split()) for one in sentences[start : start + BLOCK]]
        ids = [[*model.text.encode(one), end] for one in some if one]
        found = iter(translate(model, ids, beams=beams, length_penalty=length_penalty))
        for one in some:
            tokens = next(found).tokens if one else []
            yield " ".join(model.text.decode([token for token in tokens if token != end]).split())
        if watch is not None:
            watch(start + len(some))
