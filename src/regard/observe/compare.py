"""Comparison of two maps or two recordings: every row of one against the same row of the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.map.indexing import select_places
from regard.map.plane import BLOCK_NUMBERS
from regard.mechanism.arguments import check_choice, check_count, describe_value
from regard.observe import text_table
from regard.observe.head_divergence import jensen_shannon
from regard.observe.map_view import MapView
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.recorded_runs.words import split_rows as words_of
from regard.observe.recording import Recording

Texts = Sequence[Sequence[str]] | None
MAX_ROWS = 256  # rows in a block, at most
MAX_PRINTED = 10  # heads and rows printed
NO_DIVERGENCE = (
    "compare needs weights of a softmax: the Jensen-Shannon divergence is of rows that are at least 0 and sum to 1; entries of "
    "layers without a softmax may be negative, and their rows need not. Compare entries, e.g. one[...] - other[...]."
)


@dataclass(frozen=True)
class Row:
    """A query of a head, the divergence of its two rows, nats, and the key it attends to most in each."""

    layer: int
    name: str
    head: int
    batch: int
    query: int
    divergence: float
    keys: tuple[int, int]


@dataclass(frozen=True)
class HeadDifference:
    """A head, the mean and largest divergence of its rows, nats, and the batch row and query of the largest.

    Both are NaN where no row can be compared: all are padding in one of the two, or have weights that are NaN.
    """

    layer: int
    name: str
    head: int
    mean: float
    largest: float
    batch: int
    query: int


@dataclass(frozen=True, eq=False)
class Comparison:
    """The differences of two maps or two recordings: heads and rows, the largest first; prints as two tables.

    divergence holds the Jensen-Shannon divergence of every compared row, nats, one (b, h, n) per layer, NaN on padding; queries
    holds the indices of these rows.
    """

    heads: tuple[HeadDifference, ...]
    rows: tuple[Row, ...]
    divergence: tuple[Tensor, ...]
    queries: Tensor
    words: tuple[Texts, Texts] = (None, None)  # of the keys of each
    query_words: Texts = None  # of the first one's queries
    masks: tuple[str, ...] = ()  # in which the two differ, with the layers

    def __repr__(self) -> str:
        return f"Comparison({len(self.heads)} heads, {len(self.rows)} rows)"

    def __str__(self) -> str:
        titles = ["head", "mean", "largest", "at"]
        lines = [
            [
                f"{x.layer}.{x.head}",
                format_number(x.mean),
                format_number(x.largest),
                format_position(self.query_words, x.batch, x.query),
            ]
            for x in self.heads
        ]
        heads = text_table.align_columns(titles, lines[:MAX_PRINTED], left=("head", "at"))
        titles = ["head", "batch", "query", "divergence", "attends most in one", "in the other"]
        lines = [
            [
                f"{x.layer}.{x.head}",
                f"{x.batch}",
                format_position(self.query_words, x.batch, x.query),
                format_number(x.divergence),
            ]
            + [format_position(words, x.batch, key) for words, key in zip(self.words, x.keys, strict=True)]
            for x in self.rows[:MAX_PRINTED]
        ]
        several = any(x.batch for x in self.rows)
        columns = [n for n, title in enumerate(titles) if title != "batch" or several]
        cells = [[line[n] for n in columns] for line in lines]
        rows = text_table.align_columns([titles[n] for n in columns], cells, left=["head", "query", *titles[4:]])
        note = "Jensen-Shannon divergence in nats: 0 is equal, 0.69 is nothing in common."
        return "\n".join(
            [
                note,
                *self.masks,
                "",
                *heads,
                *format_total(len(self.heads), "heads"),
                "",
                *rows,
                *format_total(len(self.rows), "rows"),
            ]
        )


def format_position(words: Texts, batch: int, place: int) -> str:
    """Return a position and its word, if known."""
    return f"{place}" if words is None else f"{place} {text_table.format_token(words[batch % len(words)][place])}"


def find_words(x: AttentionMap | Recording, kind: str, part: str | None) -> tuple[Texts, Texts]:
    """Return the words of the queries and of the keys."""
    if isinstance(x, AttentionMap) or x.tokens is None:
        return None, None
    asking, answering = (None if words is None else words_of(words) for words in x.words(0, kind, part))
    return asking, answering


def compare(
    a: AttentionMap | Recording,
    b: AttentionMap | Recording,
    *,
    top: int = 100,
    queries: Sequence[int] | slice | Tensor = slice(None),
    kind: str = "self",
    part: str | None = None,
) -> Comparison:
    """Compare every row of a with the same row of b: of two heads (m.select(heads=...)), two prompts or two checkpoints.

    Rows are ranked by Jensen-Shannon divergence; the `top` first are returned with the keys they attend to most. Rows that are
    padding in either are left out; of kind "cross" a row is a query of another text, whatever its key is. Prompts must have
    equal lengths: token i of one is compared with token i of the other. The cost is two traversals of both matrices, in
    blocks; `queries`, by index, compares and costs some rows only. kind is also that of two maps.
    Raises ShapeError if the two have different layers, heads or lengths.
    """
    check_count("top", top)
    if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT or any(isinstance(x, ImplicitMap) for x in (a, b)):
        raise ConfigError(NO_DIVERGENCE)
    pairs = pair_maps(a, b, kind, part)
    rows = select_places("queries", queries, pairs[0].one.shape[2]).to(pairs[0].one.device)
    if not len(rows) or not pairs[0].one.shape[3]:
        raise ShapeError(f"there are no rows to compare: {len(rows)} queries of a map (b, h, q, k) = {pairs[0].one.shape}.")
    divergence = tuple(compare_rows(pair.one, pair.other, rows, kind == "self") for pair in pairs)
    (asking, ours), (_, theirs) = (find_words(x, kind, part) for x in (a, b))
    ranked = rank_heads(pairs, divergence, rows), rank_rows(pairs, divergence, rows, top)
    return Comparison(*ranked, divergence, rows, (ours, theirs), asking, describe_masks(pairs))


@dataclass(frozen=True)
class MapPair:
    """The two maps of a layer, its name, and the numbers of its heads."""

    name: str
    heads: tuple[int, ...]
    one: AttentionMap
    other: AttentionMap


def pair_maps(a: AttentionMap | Recording, b: AttentionMap | Recording, kind: str, part: str | None) -> list[MapPair]:
    """Return the maps of both, layer by layer. Raises ShapeError if they do not match, ConfigError for other types."""
    are_maps, are_recordings = (all(isinstance(x, kind_of) for x in (a, b)) for kind_of in (AttentionMap, Recording))
    if not (are_maps or are_recordings):
        raise ConfigError(f"compare needs two maps or two recordings, got {describe_value(a)} and {describe_value(b)}.")
    if isinstance(a, AttentionMap) and isinstance(b, AttentionMap):
        pairs = [MapPair("", tuple(range(a.shape[1])), a, b)]
    else:
        names, others = (x.layers(kind=kind, part=part) for x in (a, b))  # type: ignore[union-attr]
        if not names and not others and kind == "self" and all(x.layers(IMPLICIT, part) for x in (a, b)):  # type: ignore[union-attr]
            raise ConfigError(f"no layer has a softmax. {NO_DIVERGENCE}")
        if len(names) != len(others) or not names:
            raise ShapeError(
                f"the recordings have {len(names)} and {len(others)} layers of kind {kind!r}; "
                "compare needs the same number, at least 1."
            )
        maps = ([x.map(n, kind=kind, part=part) for n in range(len(names))] for x in (a, b))  # type: ignore[union-attr]
        heads, other_heads = ([x.heads(n, kind=kind, part=part) for n in range(len(names))] for x in (a, b))  # type: ignore[union-attr]
        for name, ours, theirs in zip(names, heads, other_heads, strict=True):
            if len(ours) == len(theirs) and ours != theirs:
                raise ShapeError(
                    f"of {name} the recordings have the heads {list(ours)} and {list(theirs)}: record the same, or compare "
                    "two maps, whose heads are paired in their order."
                )
        pairs = [MapPair(*each) for each in zip(names, heads, *maps, strict=True)]
    for pair in pairs:
        if pair.one.shape != pair.other.shape:
            where = f" of {pair.name}" if pair.name else ""
            raise ShapeError(
                f"the maps{where} are (b, h, q, k) = {pair.one.shape} and {pair.other.shape}: rows are compared one by one, so "
                "both need one shape. Use texts of one length, and select heads with m.select(heads=...)."
            )
    return pairs


def describe_masks(pairs: Sequence[MapPair]) -> tuple[str, ...]:
    """Describe the masks of layers that differ: `masks: Causal() in one, Everything() in the other, in layers 0 and 1`."""
    layers: dict[tuple[str, str], list[int]] = {}
    for layer, pair in enumerate(pairs):
        one, other = (x.planes.request.mask for x in (pair.one, pair.other))
        if one != other:
            layers.setdefault((str(one), str(other)), []).append(layer)
    where = {both: f", in layer{'s' * (len(n) > 1)} {text_table.format_ranges(n)}" for both, n in layers.items()}
    is_single = len(pairs) == 1
    return tuple(f"masks: {a} in one, {b} in the other{'' if is_single else text}." for (a, b), text in where.items())


def compare_rows(one: AttentionMap, other: AttentionMap, queries: Tensor, own: bool) -> Tensor:
    """Return the divergence of the same rows of two maps, (b, h, n); NaN where a query is padding in either.

    own is whether the keys are the queries' own tokens, so that a query whose key is hidden from it is padding.
    """
    b, h, _, k = one.shape
    device = one.device
    on = (MapView(one, own=own).is_token & MapView(other, own=own).is_token.to(device))[:, :, queries]
    found = torch.full(on.shape, torch.nan, dtype=torch.float32, device=device)
    step = max(1, min(MAX_ROWS, BLOCK_NUMBERS // max(k, 1)))
    for row in range(b):
        for head in range(h):
            parts = [jensen_shannon(one[row, head, some], other[row, head, some].to(device)) for some in queries.split(step)]
            found[row, head] = torch.cat([found[row, head, :0], *parts])
    return found.where(on, torch.nan)


def rank_heads(pairs: Sequence[MapPair], divergence: Sequence[Tensor], queries: Tensor) -> tuple[HeadDifference, ...]:
    """Return every head, sorted by mean divergence, the largest first; those without a number, which have NaN, last."""
    found = []
    for layer, (pair, apart_by) in enumerate(zip(pairs, divergence, strict=True)):
        means = apart_by.transpose(0, 1).flatten(1).double().nanmean(-1).tolist()
        largest, at = apart_by.transpose(0, 1).flatten(1).nan_to_num(-1).max(-1)
        for head, mean in enumerate(means):
            batch, n = divmod(int(at[head]), len(queries))
            most, query = math.nan if math.isnan(mean) else max(float(largest[head]), 0.0), int(queries[n])
            found.append(HeadDifference(layer, pair.name, pair.heads[head], mean, most, batch, query))
    return tuple(sorted(found, key=lambda each: (math.isnan(each.mean), -each.mean)))


def rank_rows(pairs: Sequence[MapPair], divergence: Sequence[Tensor], queries: Tensor, top: int) -> tuple[Row, ...]:
    """Return the `top` rows of the largest divergence, of all heads."""
    candidates = []
    for layer, apart_by in enumerate(divergence):
        values, at = apart_by.flatten().nan_to_num(-1).topk(min(top, apart_by.numel()))
        candidates += [(value, layer, place) for value, place in zip(values.tolist(), at.tolist(), strict=True) if value >= 0]
    found = []
    for value, layer, place in sorted(candidates, key=lambda each: -each[0])[:top]:
        (rest, n), pair = divmod(place, len(queries)), pairs[layer]
        (batch, head), query = divmod(rest, pair.one.shape[1]), int(queries[n])
        keys = tuple(int(m[batch, head, query].argmax()) for m in (pair.one, pair.other))
        found.append(Row(layer, pair.name, pair.heads[head], batch, query, value, (keys[0], keys[1])))
    return tuple(found)


def format_total(count: int, what: str) -> list[str]:
    """Return a line that states the total count if not all are shown; none otherwise."""
    return [f"the first {MAX_PRINTED} of {count:,} {what}"] if count > MAX_PRINTED else []


def format_number(number: float) -> str:
    """Format a number with three significant digits."""
    return f"{number:.3g}"
