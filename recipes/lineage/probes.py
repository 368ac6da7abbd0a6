"""How much of a word can be read, by a linear probe, from the encoder's last states as the sentence grows.

The encoder reads in both directions, so there are two of them: the forward state has read the first word first, and the last
word last; the backward state the other way about. What the decoder is given is both.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recipes.lineage.captions import AND, COUNTS, groups
from recipes.lineage.linear_probe import fit_probe
from recipes.lineage.word_alignment import WORD
from regard.generate.translation_search import get_end_token
from regard.models.recurrent import RecurrentTranslator
from regard.observe.score_interval import wilson_interval

CLASSES = 50  # words, the most frequent at a place among the sentences learned from
LEARNED = 5000  # sentences learned from, of each number of captions
EDGES = (0, 8, 11, 14, 20, 30, 40, 50, 1000)  # words of a sentence: more than the first, at most the second
LEAST = 50  # sentences of a bin
BATCH = 256
STATES = ("forward", "backward", "both")
PLACES = ("first", "second", "middle", "last")


def measured(model: RecurrentTranslator, train: Sequence[str], test: Sequence[str]) -> list[dict[str, Any]]:
    """For each place of a word and each state the share of held-out sentences whose word was read, by the sentence's length."""
    learned, asked = list(grown(train, LEARNED)), list(grown(test, len(test)))
    known, seen = (summaries(model, some) for some in (learned, asked))
    lengths = [len(one.split()) for one in asked]
    rows = []
    for place in PLACES:
        words = [at(place, one) for one in learned]
        names = [word for word, _ in Counter(words).most_common(CLASSES)]
        usable = [n for n, word in enumerate(words) if word in names]
        answers, own = torch.tensor([names.index(words[n]) for n in usable]), [at(place, one) for one in asked]
        for state in STATES:
            probe = fit_probe(part(known[usable], state), answers)
            right = [names[n] == word for n, word in zip(probe(part(seen, state)).tolist(), own, strict=True)]
            for above, upto in pairwise(EDGES):
                here = [n for n, count in enumerate(lengths) if above < count <= upto and own[n] in names]
                if len(here) >= LEAST:
                    hits, most = sum(right[n] for n in here), Counter(own[n] for n in here).most_common(1)[0][1]
                    row = {"place": place, "state": state, "above": above, "upto": upto, "sentences": len(here)}
                    row["words"] = sum(lengths[n] for n in here) / len(here)
                    rows.append(
                        {**row, "share": hits / len(here), "within": wilson_interval(hits, len(here)), "most": most / len(here)}
                    )
    return rows


def grown(captions: Sequence[str], most: int) -> Iterator[str]:
    """Captions alone, and two to five of them as one sentence; of each number at most so many sentences."""
    for count in COUNTS:
        yield from groups(captions, count, AND["source"])[:most]


def at(place: str, sentence: str) -> str:
    """The word of a sentence at a place, in small letters and without signs."""
    words = [word for word in WORD.findall(sentence.lower()) if word[0].isalnum()] or [""]
    number = {"first": 0, "second": 1, "middle": len(words) // 2, "last": len(words) - 1}[place]
    return words[min(number, len(words) - 1)]


def part(summary: Tensor, state: str) -> Tensor:
    """The forward or the backward half of summaries (b, 2 hidden), or both."""
    half = summary.shape[1] // 2
    return {"forward": summary[:, :half], "backward": summary[:, half:], "both": summary}[state]


@torch.no_grad()
def summaries(model: RecurrentTranslator, sentences: Sequence[str]) -> Tensor:
    """The encoder's last states of each sentence, (b, 2 hidden), in order."""
    end, text = get_end_token(model), model.text
    assert text is not None
    rows = [[*text.encode(one), end] for one in sentences]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    found = torch.empty(len(rows), 2 * model.sizes["hidden"])
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        lengths = torch.tensor([len(rows[n]) for n in numbers])
        sources = torch.tensor([[*rows[n], *[end] * (int(lengths.max()) - len(rows[n]))] for n in numbers])
        found[numbers] = model.encode(sources, lengths).summary
    return found
