"""The next words that a model predicts with some of its heads switched off, beside those that it predicts with all heads."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.observe.attention_changes import KnockOut
from regard.observe.intervene import intervene
from regard.show.page.model_adapter import MAX_NEXT_WORDS, ModelAdapter
from regard.show.page.recording_entry import truncate_word

MAX_NEW_WORDS = 5  # likeliest words without the heads that are listed too


def predict_without_heads(adapter: ModelAdapter, ids: Tensor, off: Mapping[int | str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return words after the tokens (1, t) with their probability `before`, with all heads, and `after`, without some.

    off maps a layer, as KnockOut takes it, to its heads that are off: their contexts are 0, so that they add nothing. The words
    are the likeliest ten with all heads and the likeliest five without these, the likeliest before first.
    """
    with torch.inference_mode():
        before = predict_last(adapter, ids)
        with intervene(adapter.model, *(KnockOut(layer=layer, head=list(heads)) for layer, heads in off.items())):
            after = predict_last(adapter, ids)
    tokens = [part.topk(min(count, len(part))).indices for part, count in ((before, MAX_NEXT_WORDS), (after, MAX_NEW_WORDS))]
    listed = torch.cat(tokens).unique()
    listed = listed[before[listed].argsort(descending=True, stable=True)]
    words = [truncate_word(adapter.decode([token])) for token in listed.tolist()]
    shares = zip(words, before[listed].tolist(), after[listed].tolist(), strict=True)
    return [{"word": word, "before": own, "after": other} for word, own, other in shares]


def predict_last(adapter: ModelAdapter, ids: Tensor) -> Tensor:
    """Return the probability of every token after the last one, (n,)."""
    output: Any = adapter.run(ids)
    logits: Tensor = getattr(output, "logits", output)
    return logits[0, -1].float().softmax(-1).cpu()
