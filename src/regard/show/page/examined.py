"""Examination of the page's model: the keys each word may see and sees, on the first words of the typed text."""

from typing import Any

import torch

from regard.errors import ConfigError
from regard.examination import examine
from regard.mechanism import EVERYTHING, Causal
from regard.show.page.entry import short
from regard.show.page.speaker import Speaker

MOST = 12  # words: few enough that examine changes every one, and that three squares fit side by side
RULES = {"earlier": Causal(), "all": EVERYTHING}  # the words that a word is expected to see, itself in any case


def examined(speaker: Speaker, text: str, sees: str) -> dict[str, Any]:
    """Return the report of regard.examine on the model that read a text, as JSON with tables labeled by the first words.

    Raises ConfigError for a rule that is not in RULES.
    """
    if sees not in RULES:
        raise ConfigError(f"sees is {' or '.join(RULES)}, got {sees[:20]!r}.")
    ids, words, _ = speaker.tokens(text, MOST)
    ids, words = ids[:, :MOST], words[:MOST]
    other = torch.where(ids > 0, ids - 1, ids + 1)  # a second text, different at every word: it must not leak into the first
    report = examine(speaker.model, expects=RULES[sees], sample=torch.cat([ids, other])).json()
    if report["reach"] is not None:
        report["reach"]["words"] = [short(word) for word in words]
    return report | {"sees": sees}
