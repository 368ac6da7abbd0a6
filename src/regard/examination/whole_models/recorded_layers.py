"""The recorded attention of each layer of a model, and what of it could not be recorded."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.examination.call_reading.inner_calls import NOTHING, InnerCall, RecordedCalls, record_inner_calls
from regard.examination.layer_rules import LayerRules
from regard.examination.subject.token_model import TokenModel
from regard.map import AttentionMap
from regard.observe import record
from regard.observe.map_view import MapView
from regard.observe.recording import Recording

BLOCK = 2**22  # pairs of queries and keys, of all sequences and heads, that are looked at together


class LayerSight(NamedTuple):
    """Who sees whom in any head of a layer, bool (b, q, k), by the mask and the bias of its map; None without a map."""

    name: str
    seen: Tensor
    attention: AttentionMap | None = None

    def get_weight(self, b: int, i: int, j: int) -> float:
        """Return the largest weight of a query on a key."""
        return 0.0 if self.attention is None else float(self.attention[b, :, i, j].max())


@dataclass(frozen=True, eq=False)
class RecordedLayers:
    """The layers whose attention was recorded, what was not, and whether a decoder also reads another sequence.

    `recorded` are their calls, with the projections that queries and keys come from.
    """

    layers: list[LayerSight] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    has_cross_attention: bool = False
    recorded: RecordedCalls = NOTHING

    @property
    def calls(self) -> list[InnerCall]:
        """The calls that were recorded."""
        return self.recorded.calls

    @property
    def unseen(self) -> list[tuple[str, str]]:
        """The layers of which it is not recorded who sees whom, with the reasons: also those whose weights are no softmax."""
        seen, why = {one.name for one in self.layers}, "its weights are no softmax"
        others = [*(one.name for one in self.recorded.matrices), *self.recorded.unstored]
        return [*self.missed, *((name, why) for name in dict.fromkeys(others) if name not in seen | dict(self.missed).keys())]

    @property
    def names(self) -> list[str]:
        """The names of all layers, those that could not be recorded last."""
        return [*(one.name for one in self.layers), *(name for name, _ in self.unseen)]


def record_layers(model: TokenModel, rules: LayerRules) -> RecordedLayers:
    """Record the attention of each layer; where one rule is for all, of the decoder if there is one."""
    seen, missed, recording = record_sights(model, model.ids, rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = record_inner_calls(model.module, model.run)
    return RecordedLayers(seen, missed, any(one.kind == "cross" for one in recording.calls), recorded)


def record_sights(
    model: TokenModel, ids: Tensor, rules: LayerRules
) -> tuple[list[LayerSight], list[tuple[str, str]], Recording]:
    """Return who sees whom in each layer with these ids, the layers of which it is not known and why, and the recording.

    Raises SubjectError if the model raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record(model.module) as recording:
            model.run(ids)
    missed = [(one.module, one.reason) for one in recording.missed]
    seen: list[LayerSight] = []
    for name, build in list_maps(recording, rules):
        try:
            attention = build()
        except RegardError as error:  # a layer that calls attention twice, as DiffLlama's does
            missed.append((name, str(error).splitlines()[0]))
            continue
        b, _, q, k = attention.shape
        if q == k and (rules.single is None or (b, q) == ids.shape[:2]):
            seen.append(LayerSight(name, find_visible_keys(attention), attention))
        else:
            missed.append((name, f"it has {k} keys for {q} queries"))
    return seen, missed, recording


def list_maps(recording: Recording, rules: LayerRules) -> Iterator[tuple[str, partial[AttentionMap]]]:
    """Yield the name of each layer that attends to its own tokens, and how to build its map."""
    if not recording.runs:
        return
    parts: Sequence[str | None] = (None,) if rules.single is not None else recording.last.parts or (None,)
    for part in parts:
        for number, name in enumerate(recording.layers(part=part)):
            yield name, partial(recording.map, number, part=part)


def find_visible_keys(attention: AttentionMap) -> Tensor:
    """Return which keys each query may see in any head, bool (b, q, k)."""
    b, h, q, k = attention.shape
    view, keys = MapView(attention), torch.arange(k, device=attention.device)
    rows = torch.arange(q, device=attention.device).unsqueeze(-1).split(max(1, BLOCK // max(b * h * k, 1)))
    return torch.cat([view.can_see_all(some, keys).any(1) for some in rows], 1).cpu()


def describe_missed(missed: Sequence[tuple[str, str]]) -> str:
    """Describe what was not recorded and why: `blocks.0 and 2 more: it is written out by hand`."""
    reasons: dict[str, list[str]] = {}
    for name, reason in missed:
        reasons.setdefault(reason, []).append(name)
    lines = [f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {why}" for why, names in reasons.items()]
    return "; ".join(lines[:2]) or "no attention was recorded"
