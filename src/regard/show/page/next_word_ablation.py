"""The next tokens that a model predicts without some of its heads, and the heads without which a prediction falls most."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.observe.attention_changes import KnockOut, name_layer
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.intervene import intervene
from regard.observe.recorded_runs.part_names import find_module_path
from regard.show.page.attributions import Target
from regard.show.page.model_adapter import MAX_NEXT_WORDS, ModelAdapter, name_token
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from regard.show.word_pulls import sum_over_queries

MAX_NEW_WORDS = 5  # likeliest tokens without the heads that are listed too
MEASURED_HEADS = 10  # those that pull a prediction up the most, each of which is taken out
MEASURED_TOKENS = 512  # of the copies of a text that one forward reads, each without another head

HeadsOff = Mapping[int | str, Sequence[int]]  # heads that are off, by their layer as KnockOut takes it


@dataclass(frozen=True)
class HeadAblation:
    """The probability of a token with all heads and without one, and the likeliest token without it."""

    place: HeadPlace
    before: float
    after: float
    instead: int

    @property
    def loss(self) -> float:
        """By how much the probability falls without the head."""
        return self.before - self.after


def predict_without_heads(adapter: ModelAdapter, ids: Tensor, off: HeadsOff, at: int = -1) -> list[dict[str, Any]]:
    """Return tokens after the position `at` of (1, t), with their probabilities: `before` with all heads, `after` without some.

    The contexts of heads that are off are 0, so that they add nothing. The tokens are the likeliest ten with all heads and the
    likeliest five without these, the likeliest before first.
    """
    (before,) = (after,) = predict_next(adapter, ids, at)
    if off:
        (after,) = predict_next(adapter, ids, at, [KnockOut(layer=layer, head=list(heads)) for layer, heads in off.items()])
    tokens = [part.topk(min(count, len(part))).indices for part, count in ((before, MAX_NEXT_WORDS), (after, MAX_NEW_WORDS))]
    listed = torch.cat(tokens).unique()
    listed = listed[before[listed].argsort(descending=True, stable=True)]
    shares = zip(listed.tolist(), before[listed].tolist(), after[listed].tolist(), strict=True)
    return [name_token(adapter, token) | {"before": own, "after": other} for token, own, other in shares]


def measure_heads(adapter: ModelAdapter, ids: Tensor, entry: RecordingEntry, target: Target) -> Iterator[HeadAblation]:
    """Generate what the prediction of a target loses without each of the heads that pull its logit up the most.

    The gradient of the logit ranks all heads (attribution patching, Nanda 2023); each of the first ten is then measured.
    """
    pulls = sum_over_queries(target.attribution).sum(-1)
    before = dict(target.likeliest).get(target.token)
    if before is None:
        before = float(predict_next(adapter, ids, target.at)[0, target.token])
    numbers = pulls.flatten().argsort(descending=True)[:MEASURED_HEADS].tolist()
    count = max(MEASURED_TOKENS // ids.shape[1], 1)
    for first in range(0, len(numbers), count):
        some = numbers[first : first + count]
        places = [HeadPlace(layer=number // pulls.shape[1], head=number % pulls.shape[1]) for number in some]
        for place, shares in zip(places, predict_without_each(adapter, ids, entry, places, target.at), strict=True):
            yield HeadAblation(place, before, float(shares[target.token]), int(shares.argmax()))


@dataclass(frozen=True, eq=False)
class KnockOutInRow(KnockOut):
    """Set the context of a head to 0 in one row of the batch alone."""

    row: int = 0

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        changed = super().change_context(context, call, name, number)
        return torch.cat((context[: self.row], changed[self.row : self.row + 1], context[self.row + 1 :]))


def predict_without_each(
    adapter: ModelAdapter, ids: Tensor, entry: RecordingEntry, places: Sequence[HeadPlace], at: int
) -> Tensor:
    """Return the probability of every token after the position `at` of (1, t) without each of some heads, (heads, n)."""
    changes = [
        KnockOutInRow(layer=layer, head=list(heads), row=row)
        for row, place in enumerate(places)
        for layer, heads in list_heads_off(entry, [place]).items()
    ]
    return predict_next(adapter, ids.repeat(len(places), 1), at, changes)


def list_heads_off(entry: RecordingEntry, places: Sequence[HeadPlace]) -> HeadsOff:
    """Return heads of a recording as KnockOut takes them. Raises ConfigError for those of modules that attend several times."""
    heads: dict[int | str, list[int]] = {}
    for place in places:
        number, names = entry.get_head_number(place), entry.get_layers(place).names
        if (path := find_module_path(names[place.layer])) != names[place.layer]:
            raise ConfigError(f"{path} calls attention several times in one forward, so that its heads are off in all calls.")
        heads.setdefault(name_layer(names, place.layer), []).append(number)
    return heads


@torch.inference_mode()
def predict_next(adapter: ModelAdapter, ids: Tensor, at: int, changes: Sequence[KnockOut] = ()) -> Tensor:
    """Return the probability of every token after the position `at` of (b, t), (b, n), with some changes."""
    with intervene(adapter.model, *changes) if changes else nullcontext():
        output: Any = adapter.run(ids)
    logits: Tensor = getattr(output, "logits", output)
    return logits[:, at].float().softmax(-1).cpu()
