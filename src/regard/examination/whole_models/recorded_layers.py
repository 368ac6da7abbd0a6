"""The recorded attention of each layer of a model, and what of it could not be recorded."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.examination.call_reading.inner_calls import NOTHING, InnerCall, RecordedCalls, record_inner_calls
from regard.examination.subject.token_model import TokenModel
from regard.observe import record


class LayerWeights(NamedTuple):
    """A layer's recorded attention: its name, and the largest weight of any head in the first sequence, (q, k)."""

    name: str
    weights: Tensor


@dataclass(frozen=True, eq=False)
class RecordedLayers:
    """The layers whose attention was recorded, what was not, and whether a decoder also reads another sequence.

    `recorded` are their calls, with the projections that queries and keys come from.
    """

    layers: list[LayerWeights] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    has_cross_attention: bool = False
    recorded: RecordedCalls = NOTHING

    @property
    def calls(self) -> list[InnerCall]:
        """The calls that were recorded."""
        return self.recorded.calls


def record_layers(model: TokenModel) -> RecordedLayers:
    """Record the attention of each layer, of the decoder if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record(model.module) as recording:
            model.run()
        recorded = record_inner_calls(model.module, model.run)
    missed, t = [(one.module, one.reason) for one in recording.missed], model.ids.shape[1]
    seen: list[LayerWeights] = []
    try:
        names = recording.layers()
    except RegardError:
        return RecordedLayers(seen, missed, recorded=recorded)
    for number, name in enumerate(names):
        try:
            weights = recording.map(number).dense()
        except RegardError as error:  # a layer that calls attention twice, as DiffLlama's does
            missed.append((name, str(error).splitlines()[0]))
            continue
        if weights.shape[2:] == (t, t):
            seen.append(LayerWeights(name, weights[0].amax(0).double().cpu()))
        else:
            missed.append((name, f"it has {weights.shape[3]} keys for {weights.shape[2]} queries"))
    return RecordedLayers(seen, missed, any(one.kind == "cross" for one in recording.calls), recorded)


def is_full_or_window(seen: Tensor, allowed: Tensor) -> bool:
    """Return whether each query sees all that it may, or the near part of it: a window, or its chunk of a fixed size."""
    if torch.equal(seen, allowed):
        return True
    place = torch.arange(len(seen))
    back = place[:, None] - place
    if not seen.diagonal().all():
        return False
    if torch.equal(seen, allowed & (back <= int(back[seen].max())) & (back >= int(back[seen].min()))):
        return bool((seen & (back < 0)).any()) or not (allowed & (back < 0)).any()  # a causal layer is not a window
    chunks = (place // size for size in range(2, len(seen)))
    return any(torch.equal(seen, allowed & (chunk[:, None] == chunk)) for chunk in chunks)


def format_layer_count(layers: Sequence[LayerWeights]) -> str:
    """Format the number of further layers: `; the same in 3 more layers`."""
    more = len({one.name for one in layers}) - 1
    return f"; the same in {more} more layer{'s' * (more > 1)}" if more else ""


def describe_missed(missed: Sequence[tuple[str, str]]) -> str:
    """Describe what was not recorded and why: `blocks.0 and 2 more: it is written out by hand`."""
    reasons: dict[str, list[str]] = {}
    for name, reason in missed:
        reasons.setdefault(reason, []).append(name)
    lines = [f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {why}" for why, names in reasons.items()]
    return "; ".join(lines[:2]) or "no attention was recorded"
