"""What every word of a text did to one next word, over all heads: where the model looked, and what moved its choice."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.observe.attribution import Attribution
from regard.observe.map_view import MapView
from regard.show.generated_tokens import select_last_layers
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from regard.show.word_pulls import find_largest_part, sum_over_queries


def average_last_rows(entry: RecordingEntry, at: int, norms: list[Tensor] | None = None) -> Tensor:
    """Compute the mean row of a query, (k,), over the heads of the last layers: of weights, or given norms of what is carried.

    The layers are those of the list of what a generated word attends to; keys that are hidden in all of them are NaN.
    """
    layers = select_last_layers(len(entry.get_layers(HeadPlace()).names))
    maps = [entry.get_layer_map(HeadPlace(layer=layer)) for layer in layers]
    rows = [one[0, :, at] for one in maps]
    keys, query = torch.arange(maps[0].shape[3]), torch.tensor(at)
    seen = torch.stack([MapView(one).can_see_all(query, keys)[0] | (row > 0) for one, row in zip(maps, rows, strict=True)])
    if norms is not None:
        rows = [row * norms[layer][0, :, :, 0].to(row) for layer, row in zip(layers, rows, strict=True)]
    return torch.cat(rows).mean(0).masked_fill(~seen.any(0).any(0), torch.nan)


def sum_influence(found: Attribution, setting: str) -> dict[str, Any]:
    """Return the sum over all heads and queries of each word, and the head with the largest part, as JSON."""
    parts = sum_over_queries(found, setting)
    heads = [find_largest_part(parts[..., position])[0] for position in range(parts.shape[2])]
    return {"numbers": parts.sum((0, 1)).tolist(), "heads": heads}


def encode_row(row: Tensor) -> dict[str, Any]:
    """Return the numbers of a row as JSON, null where a key is hidden."""
    return {"numbers": [None if math.isnan(value) else value for value in row.double().tolist()], "heads": None}
