"""Examination of the page's model: the keys each word may see and sees, on the first words of the typed text."""

from typing import Any

import torch

from regard.errors import ConfigError
from regard.examination import examine
from regard.mechanism import EVERYTHING, Causal
from regard.show.page.model_adapter import ModelAdapter
from regard.show.page.recording_entry import truncate_word

MAX_WORDS = 12  # words: few enough that examine changes every one, and that three squares fit side by side
RULES = {"earlier": Causal(), "all": EVERYTHING}  # the words that a word is expected to see, itself in any case


def examine_model(adapter: ModelAdapter, text: str, sees: str) -> dict[str, Any]:
    """Return the report of regard.examine on the model that read a text, as JSON with tables labeled by the first words.

    Raises ConfigError for a rule that is not in RULES.
    """
    if sees not in RULES:
        raise ConfigError(f"sees must be {' or '.join(RULES)}, got {sees[:20]!r}.")
    ids, words, _ = adapter.tokens(text, MAX_WORDS)
    ids, words = ids[:, :MAX_WORDS], words[:MAX_WORDS]
    other = torch.where(ids > 0, ids - 1, ids + 1)  # a second text, different at every word: it must not leak into the first
    report = examine(adapter.model, expects=RULES[sees], sample=torch.cat([ids, other])).json()
    if report["reach"] is not None:
        report["reach"]["words"] = [truncate_word(word) for word in words]
    return report | {"sees": sees}
