"""What length costs: captions joined to sentences of up to sixty words, against the same captions translated one at a time.

Long sentences are rare in both sets, and say other things than short ones. Here the words and the references are the same, and
what differs is how much is read at once.
"""

from collections.abc import Collection, Sequence
from typing import Any

from recipes.lineage.captions import AND, COUNTS, groups
from recipes.lineage.runs import SHORT
from recipes.lineage.table import BEAMS, DRAWS, by_length, said
from regard.evaluate.translation_scores import bleu, translate_sentences
from regard.models.translator import Translator
from regard.text.pairs import PairSet

MOST = max(BEAMS)


def measured(model: Translator, sources: Sequence[str], targets: Sequence[str]) -> list[dict[str, Any]]:
    """For each number of captions the BLEU of what is read together, and of what is read apart and joined then.

    Of two captions also for those that together are no longer than many that the models know: what the joining itself costs.
    """
    alone = list(translate_sentences(model, sources, beams=MOST))
    found = []
    for count in COUNTS:
        asked, references = groups(sources, count, AND["source"]), groups(targets, count, AND["target"])
        together = alone if count == 1 else list(translate_sentences(model, asked, beams=MOST))
        rows = list(zip(asked, references, together, groups(alone, count, AND["target"]), strict=True))
        short = [row for row in rows if words(row[:1]) <= SHORT]
        found += [{"captions": count, "most_words": SHORT, **compared(short)}] if count == 2 and short else []
        found.append({"captions": count, "most_words": 0, **compared(rows)})
    return found


def compared(rows: Sequence[tuple[str, str, str, str]]) -> dict[str, Any]:
    """How near sources, references, and translations made together and apart are to each other."""
    sources, references, together, apart = zip(*rows, strict=True)
    return {
        "sentences": len(rows),
        "words": words(sources) / len(rows),
        "written": words(together) / words(references),  # 1: as many words as people write
        "together": said(bleu(together, references, DRAWS)),
        "apart": said(bleu(apart, references, DRAWS)),
    }


def natural(part: PairSet, translated: Sequence[str], captions: Collection[str]) -> dict[str, Any]:
    """BLEU by the length of a sentence, of captions and of other sentences, each for itself.

    Together they would show which of the two are short: Tatoeba's are, and they are also of another kind.
    """
    triples = list(zip(part.decode_sentences("source"), translated, part.decode_sentences("target"), strict=True))
    kinds = {
        "captions": [one for one in triples if one[0] in captions],
        "others": [one for one in triples if one[0] not in captions],
    }
    return {kind: by_length(*zip(*some, strict=True)) for kind, some in kinds.items() if some}


def words(sentences: Sequence[str]) -> int:
    """The words of all of them."""
    return sum(len(one.split()) for one in sentences)
