"""Exact weights, rows and columns of a recording's heads."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.codes import encode_weights
from regard.observe.map_view import MapView
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, check_index, truncate_word

MAX_LARGEST = 100  # maximum count of the largest weights of a row or a column


def get_cell(entry: RecordingEntry, place: HeadPlace, q: int, k: int) -> dict[str, Any]:
    """Return one weight with its score, its rank in its row, 1 the largest, and the number of keys that its query sees."""
    m = entry.get_map(place)
    check_index("q", q, m.shape[2])
    check_index("k", k, m.shape[3])
    weights, seen = get_map_row(m, q)
    weight = float(weights[k])
    found: dict[str, Any] = {
        "weight": convert_number(weight),
        "score": None,
        "rank": None,
        "of": int(seen.sum()),
        "visible": bool(seen[k]),
    }
    if seen[k] and not math.isnan(weight):
        score = MapView(m).get_plane(0, 0).compute_masked_scores(torch.tensor([q]), torch.tensor([k]))
        found["score"] = convert_number(float(score))
        found["rank"] = 1 + int((weights[seen] > weight).sum())
    return found


def get_row(entry: RecordingEntry, place: HeadPlace, q: int, heads: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Compute the weights (k,) of query q, the mean of some heads or of the place's own, and which keys it may see."""
    check_index("q", q, entry.get_shape(place)[2])
    weights, seen = zip(*(get_map_row(entry.get_map(one), q) for one in list_places(entry, place, heads)), strict=True)
    return torch.stack(weights).mean(0), torch.stack(seen).any(0)


def get_map_row(m: AttentionMap, q: int) -> tuple[Tensor, Tensor]:
    """Compute the weights (k,) of a row of a map of one matrix, and which keys its query may see.

    A row whose bias hides every key has weights all the same.
    """
    keys, query = torch.arange(m.shape[3], device=m.device), torch.tensor([[q]], device=m.device)
    weights = m[0, 0, q]
    return weights, MapView(m).can_see(0, 0, query, keys)[0] | (weights > 0)


def get_column(maps: Sequence[AttentionMap], k: int) -> tuple[Tensor, Tensor]:
    """Compute the weights (q,) on key k, the mean of heads, each a map (1, 1, q, k), and which queries may see it.

    Needs the denominators of the rows: a map that has none yet traverses its whole matrix.
    """
    _, _, q, keys = maps[0].shape
    check_index("k", k, keys)
    queries, key = torch.arange(q, device=maps[0].device).unsqueeze(-1), torch.tensor([k], device=maps[0].device)
    weights = torch.stack([m[0, 0, :, [k]].squeeze(-1) for m in maps])
    seen = torch.stack([MapView(m).can_see(0, 0, queries, key)[:, 0] for m in maps]) | (weights > 0)
    return weights.mean(0), seen.any(0)


def list_largest(weights: Tensor, words: Sequence[str], n: int) -> list[dict[str, Any]]:
    """Return the n largest of some weights with their positions and words, without zeros.

    Raises ConfigError for n outside 1 to 100.
    """
    if not 1 <= n <= MAX_LARGEST:
        raise ConfigError(f"n must be at least 1 and at most {MAX_LARGEST}, got {n}.")
    values, places = weights.nan_to_num(0).topk(min(n, len(weights)))
    return [
        {"place": place, "word": truncate_word(words[place]), "weight": value}
        for place, value in zip(places.tolist(), values.tolist(), strict=True)
        if value > 0
    ]


def encode_visible_weights(weights: Tensor, seen: Tensor) -> Tensor:
    """Encode weights as codes, 0 where nothing is visible."""
    return encode_weights(weights, seen)


def list_places(entry: RecordingEntry, place: HeadPlace, heads: Sequence[int]) -> list[HeadPlace]:
    """Return the places of some heads of a place's layer, or the place itself where none are given."""
    count = entry.get_shape(place)[1]
    for head in heads:
        check_index("head", head, count)
    return [replace(place, head=head) for head in dict.fromkeys(heads)] or [place]


def convert_number(x: float) -> float | None:
    """Return a number, or None for NaN and the infinities, which are not JSON."""
    return x if math.isfinite(x) else None
