"""Translation quality against references: BLEU and chrF by sacrebleu, with the signature that states how they were counted.

Source: Papineni et al. 2002; Popović 2015; Post 2018, A call for clarity in reporting BLEU scores.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.errors import ConfigError, DataError
from regard.generate.translation_search import Translator, get_end_token, translate
from regard.mechanism.arguments import check_count

BLOCK = 512  # sentences translated before the first of them is yielded


@dataclass(frozen=True)
class TranslationScore:
    """A score from 0 to 100, with sacrebleu's signature of how it was counted."""

    name: str
    score: float
    signature: str
    interval: float | None = None  # with bootstrap: 95 % of the draws are within this distance

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.1f}"
        return f"{self.name} {self.score:.1f}{interval}  {self.signature}"


def bleu(translations: Sequence[str], references: Sequence[str], draws: int = 0) -> TranslationScore:
    """Compute BLEU: how many runs of one to four words are in the reference too, over the whole text; shorter texts lose.

    If `draws` is not 0, this many bootstrap samples of as many sentences are drawn to estimate the interval; there is none if
    some of the samples have no word right.
    """
    return compute_score("BLEU", "BLEU", translations, references, draws)


def chrf(translations: Sequence[str], references: Sequence[str], draws: int = 0) -> TranslationScore:
    """Compute chrF: the mean of precision and recall of runs of one to six letters, recall counted twice."""
    return compute_score("chrF", "CHRF", translations, references, draws)


def compute_score(
    name: str, metric: str, translations: Sequence[str], references: Sequence[str], draws: int
) -> TranslationScore:
    """Compute a score by sacrebleu's metric of this name."""
    if check_count("draws", draws, 0) == 1:
        raise ConfigError("draws must be 0, which estimates no interval, or at least 2; got 1.")
    if len(translations) != len(references) or not translations:
        raise DataError(
            f"there are {len(translations):,} translations and {len(references):,} references: each sentence needs both."
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
        # sacrebleu cannot average if some draws have no word right
        return compute_score(name, metric, translations, references, 0)
    signature = str(counter.get_signature())
    if not draws:
        return TranslationScore(name, float(found.score), signature)
    result = json.loads(found.format(signature=signature, is_json=True))
    return TranslationScore(
        name, float(found.score), signature, float(result.get("confidence_var", 0.0))
    )  # absent if all draws score 0


def translate_sentences(
    model: Translator,
    sentences: Sequence[str],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    watch: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the translation of each sentence, in order; an empty one for a sentence without a word.

    White space counts as one space, as in training. `watch` is called with the number of sentences done.
    """
    end = get_end_token(model)
    for start in range(0, len(sentences), BLOCK):
        some = [" ".join(one.split()) for one in sentences[start : start + BLOCK]]
        ids = [[*model.text.encode(one), end] for one in some if one]
        found = iter(translate(model, ids, beams=beams, length_penalty=length_penalty))
        for one in some:
            tokens = next(found).tokens if one else []
            yield " ".join(model.text.decode([token for token in tokens if token != end]).split())
        if watch is not None:
            watch(start + len(some))
