"""What the weights of a typed text do: how much a head carries, the pull on a next word, and the change by a cut."""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.attribution.contributions import contributions
from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.map.plane import Plane
from regard.map.pooling import bin_edges
from regard.map.pyramid import MOST_LEVELS, TILE
from regard.map.visible_pixels import find_visible_pixels
from regard.observe import Recording, record
from regard.observe.attribution import Attribution
from regard.observe.classification.repeated_calls import split_calls
from regard.observe.stored_calls.kv_history import StoredCall
from regard.show.page.head_pictures import THUMBNAIL_PIXELS
from regard.show.page.image_pulls import compute_visible_rows
from regard.show.page.memory_size import count_storage_bytes
from regard.show.page.model_adapter import ModelAdapter, get_device
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, check_index, truncate_word

SETTINGS = ("carried", "pull", "cut")  # besides the weight itself
MAX_LIKELIEST = 10  # next words that are offered
MAX_GRADIENT_BYTES = 64 * 2**20  # of all targets; the newest is always kept
MAX_MAPS = 8  # whose denominators are kept
PROBED_TOKENS = 8  # on which the output projections are looked for

TargetKey = tuple[str, int, int]  # id of the recording, position, token


@dataclass(frozen=True, eq=False)
class Target:
    """The logit of a token as the word after a position, the likeliest tokens there, and the gradient of all contexts."""

    at: int
    token: int
    logit: float
    likeliest: list[tuple[int, float]]  # tokens and their probabilities
    attribution: Attribution

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return count_storage_bytes(self.attribution.gradients.values())


class AttributionCache:
    """Targets by recording, position and token, and what each head carries: one forward and backward for each, O(T) numbers."""

    def __init__(self) -> None:
        self._targets: OrderedDict[TargetKey, Target] = OrderedDict()
        self._default_tokens: dict[tuple[str, int], int] = {}
        self._norms: dict[str, list[Tensor]] = {}
        self._maps: OrderedDict[tuple[Any, ...], AttributionMap] = OrderedDict()
        self._lock = threading.Lock()

    def find_target(self, entry: RecordingEntry, at: int, token: int | None) -> Target | None:
        """Return a target if it is known; token None is the likeliest one."""
        with self._lock:
            chosen = self._default_tokens.get((entry.id, at)) if token is None else token
            if chosen is None or (entry.id, at, chosen) not in self._targets:
                return None
            self._targets.move_to_end((entry.id, at, chosen))
            return self._targets[entry.id, at, chosen]

    def add_target(self, entry: RecordingEntry, target: Target) -> None:
        """Store a target; the least recently used ones are removed where there are too many."""
        with self._lock:
            self._targets[entry.id, target.at, target.token] = target
            self._default_tokens[entry.id, target.at] = target.likeliest[0][0]
            while len(self._targets) > 1 and sum(one.nbytes for one in self._targets.values()) > MAX_GRADIENT_BYTES:
                self._targets.popitem(last=False)

    def find_norms(self, entry: RecordingEntry) -> list[Tensor] | None:
        """Return how long the values of each layer are after the output projection, (1, h, k, 1), if that is known."""
        with self._lock:
            return self._norms.get(entry.id)

    def add_norms(self, entry: RecordingEntry, norms: list[Tensor]) -> None:
        """Store the norms of all layers."""
        with self._lock:
            self._norms[entry.id] = norms

    def get_map(self, entry: RecordingEntry, setting: str, layer: int, found: Target | list[Tensor]) -> AttributionMap:
        """Return the map (1, h, q, k) of a layer, given a target, or for the setting "carried" the norms of all layers."""
        key = entry.id, setting, layer, (found.at, found.token) if isinstance(found, Target) else None
        with self._lock:
            if key not in self._maps:
                if isinstance(found, Target):
                    self._maps[key] = found.attribution.map(layer, kind=setting)
                else:
                    weights = entry.get_layer_map(HeadPlace(layer=layer))
                    norms = found[layer].to(weights.device)
                    self._maps[key] = AttributionMap(weights, norms.new_ones(*weights.shape[:3], 1), norms)
            self._maps.move_to_end(key)
            while len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)
            return self._maps[key]

    def remove_recording(self, name: str) -> None:
        """Remove everything about a recording."""
        with self._lock:
            for kept in (self._targets, self._default_tokens, self._maps):
                for key in [key for key in kept if key[0] == name]:
                    del kept[key]
            self._norms.pop(name, None)


def require_ids(entry: RecordingEntry, place: HeadPlace) -> Tensor:
    """Return the tokens (1, t) of a recording. Raises ConfigError unless the page's model, a language model, read them."""
    if entry.ids is None or place.kind != "self":
        raise ConfigError(
            "only the weights of a text that a language model read on this page can be shown in this way: start regard serve "
            "with --model, and type the text."
        )
    entry.get_shape(place)
    return entry.ids


def compute_target(adapter: ModelAdapter, ids: Tensor, entry: RecordingEntry, at: int, token: int | None) -> Target:
    """Run the model on the tokens (1, t) of a recording, and the gradient of one logit backward; keep no graph."""
    check_index("at", at, ids.shape[1])
    with torch.enable_grad(), record(adapter.model, keep="values") as recording:
        output: Any = adapter.run(ids)
    logits: Tensor = getattr(output, "logits", output)[0, at]
    values, tokens = logits.detach().float().softmax(-1).topk(min(MAX_LIKELIEST, len(logits)))
    chosen = int(tokens[0]) if token is None else token
    check_index("token", chosen, len(logits))
    gradients = replace(recording.attribute(logits[chosen]), run=split_calls(recording)[0].last)
    found = split_gradients(gradients, entry.recording)
    likeliest = list(zip(tokens.tolist(), values.tolist(), strict=True))
    return Target(at, chosen, float(logits[chosen].detach()), likeliest, Attribution(entry.recording.last, found))


def split_gradients(found: Attribution, shown: Recording) -> dict[StoredCall, Tensor]:
    """Split the gradients of a forward in one call among the calls of a recording of the same tokens in several."""
    own = {}
    for layer in range(len(shown.layers())):
        gradient, start = found.join_layer(found.gradients, layer, "self", None), 0
        for history in shown.last.find_histories(layer, "self", None):
            for stored in history.stored_calls:
                own[stored] = gradient[:, :, start : start + stored.q.shape[2]].to(stored.q.device)
                start += stored.q.shape[2]
    return own


def compute_norms(adapter: ModelAdapter, ids: Tensor) -> list[Tensor]:
    """Compute ‖v_j W_O‖ of every layer, (1, h, k, 1). Raises ConfigError where an output projection is not found."""
    found = contributions(adapter.model, ids.to(get_device(adapter.model)), 0)
    return [found.map(layer, kind="carried").right.cpu() for layer in range(len(found.recording.layers()))]


def explain_missing_projection(adapter: ModelAdapter, ids: Tensor) -> str | None:
    """Return why it is not known what the heads of a model carry, None if it is known."""
    try:
        compute_norms(adapter, ids[:, :PROBED_TOKENS])
    except ConfigError as error:
        return " ".join(str(error).split())
    return None


def describe_target(adapter: ModelAdapter, target: Target) -> dict[str, Any]:
    """Describe a target, with the words that are likeliest in its place."""
    return {
        "at": target.at,
        "token": target.token,
        "word": truncate_word(adapter.decode([target.token])),
        "logit": target.logit,
        "likeliest": [
            {"token": token, "word": truncate_word(adapter.decode([token])), "probability": probability}
            for token, probability in target.likeliest
        ],
    }


def compute_line(m: AttributionMap, heads: Sequence[int], *, q: int | None = None, k: int | None = None) -> Tensor:
    """Compute the mean over some heads of a row (k,) or of a column (q,); NaN where no head may see."""
    queries, keys = m.shape[2:]
    if q is None:
        check_index("k", k or 0, keys)
        return compute_visible_rows(m, heads, torch.arange(queries), torch.tensor([k])).flatten()
    check_index("q", q, queries)
    return compute_visible_rows(m, heads, torch.tensor([q])).flatten()


def draw_tile(m: AttributionMap, level: int, row: int, column: int, how: str) -> Tensor:
    """Draw a tile of a map of one matrix at a zoom level: the mean, or the entry that is largest in size, of each pixel.

    At level z a pixel covers 2^z queries by 2^z keys; NaN where nothing is visible. The rows of the tile are traversed.
    """
    rows, columns = (
        find_tile_edges(name, place, level, m.shape[axis]) for name, place, axis in (("row", row, 2), ("column", column, 3))
    )
    (pixels,) = m.draw_pictures(rows, columns)
    picture = pixels.pool("max" if how == "max" else "mean")
    return picture.masked_fill(~find_seen_pixels(m, 0, picture, rows, columns), torch.nan)


def find_seen_pixels(m: AttributionMap, head: int, picture: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which pixels of a picture of a head hold a visible entry, or one of a row whose bias hides every key."""
    plane = Plane(m.visible_request, *m.weights.planes.pairs[0][head])
    return find_visible_pixels(plane, rows, columns, picture == 0, -math.inf) | (picture != 0)


def draw_thumbnails(m: AttributionMap) -> tuple[Tensor, Tensor]:
    """Draw small pictures of all heads, and compute the sum of all entries of each, (h,), in one traversal.

    The pictures, (h, r, c), have the entry that is largest in size of each pixel; NaN where all is hidden.
    """
    rows, columns = (bin_edges(0, tokens, min(tokens, THUMBNAIL_PIXELS)) for tokens in m.shape[2:])
    found = m.gather_entries(rows, columns)
    pictures = torch.stack([one.picture.pool("max") for one in found])
    totals = torch.stack([one.row_sums.double().sum() for one in found])
    seen = torch.stack([find_seen_pixels(m, head, picture, rows, columns) for head, picture in enumerate(pictures)])
    return pictures.masked_fill(~seen, torch.nan), totals


def find_tile_edges(name: str, place: int, level: int, tokens: int) -> Tensor:
    """Return the edges of the pixels of a tile along an axis, in tokens. Raises ConfigError where there is no such tile."""
    check_index("level", level, MOST_LEVELS)
    check_index(name, place, max(-(-tokens // (TILE << level)), 1))
    first = place * TILE
    return (torch.arange(first, min(first + TILE, -(-tokens // (1 << level))) + 1) << level).clamp(max=tokens)
