"""The pull on a number in the Image view: which layers have one, and its entries in a file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.mechanism.arguments import check_instance
from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.recorded_runs.run import Run
from regard.observe.token_places.places import PatchGrid

MAX_PULL_BYTES, NUMBER_BYTES = 8 * 2**20, 4  # of all entries in a file, before compression; of one
UNNAMED = "the number"
LayerKey = tuple[str, str | None, int]  # kind, part and number of a layer
Shape = tuple[int, int, int, int]  # (b, h, q, k)


@dataclass(frozen=True, eq=False)
class NumberPull:
    """What the weights of a recording did to a number: its attribution, and the number in words."""

    attribution: Attribution
    number: str = UNNAMED

    def select_run(self, run: Run) -> "NumberPull":
        """Return the pull by the layers of a run that holds the same calls."""
        return replace(self, attribution=replace(self.attribution, run=run))

    def get_map(self, layer: LayerKey) -> AttributionMap:
        """Return the map (b, h, q, k) of a layer. Raises ConfigError where it has none."""
        kind, part, n = layer
        return self.attribution.map(n, attention=kind, part=part)


def check_pull(recording: Recording, attribution: Attribution | None, number: str, has_image: bool) -> NumberPull | None:
    """Return the pull on a number of a recording, None without one. Raises ConfigError for one that the page cannot show."""
    check_instance("number", number, str, "It names the number that was attributed, such as 'the logit of cat'.")
    if attribution is None:
        return None
    check_instance("attribution", attribution, Attribution, "Make one with recording.attribute(number).")
    if not has_image:
        raise ConfigError("attribution is shown in an image: pass image= too.")
    if attribution.run is not recording.last:
        raise ConfigError(
            "attribution must be of the last run of this recording, which the page shows: make it with recording.attribute."
        )
    return NumberPull(attribution, number)


def count_pull_heads(recording: Recording, pull: NumberPull, shapes: Mapping[LayerKey, Shape]) -> dict[LayerKey, int]:
    """Return the number of heads of those layers that look at patches of an image and have a pull."""
    found = {}
    for layer, shape in shapes.items():
        kind, part, n = layer
        try:
            pull.get_map(layer)
        except ConfigError:  # without values, or none of those that the number depends on
            continue
        if any(isinstance(one, PatchGrid) for one in recording.axis_places(n, kind, part)[1]):
            found[layer] = shape[1]
    return found


def limit_pull_heads(heads: dict[LayerKey, int], shapes: Mapping[LayerKey, Shape]) -> tuple[dict[LayerKey, int], list[str]]:
    """Return how many matrices of each layer a file holds: all heads, or one, their mean, or none; and what a note says."""
    entries = {layer: shapes[layer][0] * shapes[layer][2] * shapes[layer][3] for layer in heads}
    if NUMBER_BYTES * sum(count * heads[layer] for layer, count in entries.items()) <= MAX_PULL_BYTES:
        return heads, []
    if NUMBER_BYTES * sum(entries.values()) <= MAX_PULL_BYTES:
        return dict.fromkeys(heads, 1), [
            "This file contains the pull as the mean over the heads of each layer; regard.serve shows each head."
        ]
    return {}, ["This file does not contain the pull, whose numbers would take more than 8 MiB; regard.serve shows it."]


def iterate_pulls(pull: NumberPull, heads: dict[LayerKey, int]) -> Iterator[tuple[LayerKey, int, Tensor]]:
    """Yield each layer and batch row with its entries (n, q, k) of all heads, or of their mean; NaN where they are hidden."""
    for layer, count in heads.items():
        found = pull.get_map(layer)
        b, h, q, _ = found.shape
        for row in range(b):
            m = found.select(batch=row)
            groups = [list(range(h))] if count == 1 else [[head] for head in range(h)]
            yield layer, row, torch.stack([compute_visible_rows(m, group, torch.arange(q)) for group in groups]).float()


def compute_visible_rows(m: AttributionMap, heads: Sequence[int], rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """Compute the mean over some heads of rows and columns of a map of one batch row, (q, k); NaN where no head may see."""
    columns = torch.arange(m.shape[3]) if columns is None else columns
    h, i, j = torch.meshgrid(torch.tensor(list(heads)), rows, columns, indexing="ij")
    index = torch.zeros_like(h), h, i, j
    seen = m.is_visible(*index) | (m.weights[index] > 0)  # as of a weight: see exact_weights.get_map_row
    return m[index].mean(0).masked_fill(~seen.any(0), torch.nan)
