"""The finding of a recording: the head that most clearly does one thing, one of its tokens, and sentences on what is seen."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.observe import detectors, patterns
from regard.observe.classification.head_classification import classify_heads
from regard.observe.classification.head_kinds import MIN_SUPPORT, PREFIX_MATCHING, TELLING_KINDS
from regard.observe.classification.head_scores import HeadOptions
from regard.observe.head_table import Head, quote_word
from regard.observe.map_view import MapView
from regard.observe.patterns import Duplicate, Induction
from regard.observe.recorded_runs.words import convert_to_ids
from regard.observe.score_interval import QueryScores, Score
from regard.show.number_format import format_count
from regard.show.page.head_pictures import Alive
from regard.show.page.head_table import stream_head_table
from regard.show.page.recording_entry import AttentionLayers, HeadPlace, RecordingEntry

MAX_WEIGHTS = 2**23  # maximum weights of all heads together of a recording whose heads are classified when it is opened
LEAK = "leak"  # a layer sees later words, and others do not
DOES = {  # what a head of each kind does on average
    PREFIX_MATCHING: "looks at what followed the same token before",
    "duplicate": "looks at earlier places of the same token",
    "previous token": "looks at the token just before",
    "first token": "looks at the first token, as heads often do that have nothing to add",
    "stripe": "looks at the same few tokens from everywhere",
    "itself": "looks at the token itself",
}
GETS = {  # what a score measures the attention on
    PREFIX_MATCHING: "what followed the same token before gets",
    "duplicate": "earlier places of the same token get",
    "previous token": "the token just before gets",
    "first token": "the first token gets",
    "stripe": "the same few tokens get",
    "itself": "the token itself gets",
}
SCORES: dict[str, Callable[[MapView], QueryScores]] = {  # of each query, by kind
    PREFIX_MATCHING: lambda look: patterns.score.queries(look, Induction()),
    "duplicate": lambda look: patterns.score.queries(look, Duplicate()),
    "previous token": lambda look: detectors.weight_on_previous.queries(look),
    "first token": lambda look: detectors.weight_on_first.queries(look),
    "stripe": lambda look: detectors.stripe_weight.queries(look),
    "itself": lambda look: detectors.weight_on_self.queries(look),
}
FINDINGS = (*DOES, LEAK)
UNITS = {"patch": "patches", "frame": "frames"}  # what is attended to in place of tokens
TOKENS = re.compile(r"(?<!the first )(?<![-‘])\btokens?\b")  # in a sentence: not the first one, a kind of head or a quoted word


@dataclass(frozen=True)
class OpeningFinding:
    """What is shown, EFFECT, one of FINDINGS or None where no head has a clear kind; its head, query and key, and sentences.

    `loss` is by how much the prediction after the query falls without the head, -1 where that was not measured.
    """

    what: str | None
    place: HeadPlace
    q: int
    k: int
    sentences: tuple[str, ...]
    loss: float = -1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON; its state is that of a link."""
        kind, part, layer, head = self.place.kind, self.place.part, self.place.layer, self.place.head
        state = {"kind": kind, "part": part, "layer": layer, "head": head, "q": self.q, "k": self.k}
        return {"what": self.what, "state": state, "sentences": list(self.sentences)}


def find_finding(entry: RecordingEntry, alive: Alive, wanted: str | None = None) -> OpeningFinding | None:
    """Return the finding of a recording, `wanted` where there is one; None for a recording that is too long to classify.

    The head is the one whose score is surely the largest, by the lower end of its interval, of the most telling kind for
    which there is one. A leak comes before all kinds. Without any, it is the head of the largest weight on another word.
    """
    if not entry.attention_layers:
        return None
    attention = choose_attention(entry)
    found = find_in_words(entry, attention, alive, wanted)
    return found and replace(found, sentences=name_units(found.sentences, entry.find_unit(attention)))


def find_in_words(
    entry: RecordingEntry, attention: AttentionLayers, alive: Alive, wanted: str | None = None
) -> OpeningFinding | None:
    """Return the finding of the chosen attention, in sentences about tokens."""
    if not is_short(entry):
        return None
    leak = find_leak(entry, attention, alive) if wanted in (None, LEAK) else None
    if leak is not None:
        return leak
    row = None
    if attention.kind == "self":
        first = HeadPlace(attention.kind, attention.part)
        for _ in stream_head_table(entry, first, alive):  # stores its rows
            pass
        row = choose_head(entry.head_rows[attention.kind, attention.part][0], wanted)
    return find_strongest_weight(entry, attention, alive, wanted) if row is None else describe_head(entry, attention, row)


def find_head_finding(entry: RecordingEntry, place: HeadPlace) -> OpeningFinding:
    """Return the finding of one head, whose text may be long: what it does, or its largest scores if it has no clear kind."""
    attention = entry.get_layers(place)
    options = HeadOptions(entry.recording.tokens or None)
    named = {"kind": place.kind, "part": attention.part, "layers": [place.layer], "some": [place.head]}
    (row,) = classify_heads(entry.recording, options, **named)  # type: ignore[arg-type]
    unit = entry.find_unit(attention)
    if row.kind in DOES:
        found = describe_head(entry, attention, row)
        return replace(found, sentences=name_units(found.sentences, unit))
    q = attention.shapes[place.layer][2] - 1
    sentences = (f"{name_head(row.layer, row.head)} has {row.sentence}.", describe_controls(attention))
    return OpeningFinding(None, place, q, int(entry.get_map(place)[0, 0, q].argmax()), name_units(sentences, unit))


def name_units(sentences: tuple[str, ...], unit: str) -> tuple[str, ...]:
    """Return sentences about tokens as ones about patches of an image or frames of sound, whose first token may be none."""
    if unit not in UNITS:
        return sentences
    return tuple(TOKENS.sub(lambda found: UNITS[unit] if found[0] == "tokens" else unit, one) for one in sentences)


def choose_attention(entry: RecordingEntry) -> AttentionLayers:
    """Return the attention between two texts if a recording has any, else its last part, the decoder where there are two."""
    layers = entry.attention_layers
    return next((one for one in layers if one.kind == "cross"), layers[-1])


def is_short(entry: RecordingEntry) -> bool:
    """Return whether a recording has attention, and few enough weights to look at all of them when it is opened."""
    if not entry.attention_layers:
        return False
    attention = choose_attention(entry)
    return count_weights(attention) <= MAX_WEIGHTS and all(q and k for _, _, q, k in attention.shapes)


def count_weights(attention: AttentionLayers) -> int:
    """Count the weights of all heads of a kind and a part."""
    return sum(b * h * q * k for b, h, q, k in attention.shapes)


def choose_head(rows: Sequence[Head], wanted: str | None = None) -> Head | None:
    """Return the head whose score has the highest lower limit, of the first kind with a head; None if no kind has one."""
    for kind in TELLING_KINDS if wanted is None else (wanted,):
        found = [row for row in rows if row.kind == kind and row.deciding_score.count >= MIN_SUPPORT]
        if found:
            return max(found, key=lambda row: row.deciding_score.low)
    return None


def describe_head(entry: RecordingEntry, attention: AttentionLayers, row: Head) -> OpeningFinding:
    """Describe a head of a clear kind, at the word that shows it best."""
    head = attention.head_numbers[row.layer].index(row.head)
    place = HeadPlace(attention.kind, attention.part, 0, row.layer, head)
    words, _ = entry.get_axis_words(place)
    start = find_first_token(view_layer(entry, place))
    scores = compute_query_scores(entry, place, row.kind, start)
    q = choose_query(scores, words)
    weights = entry.get_map(place)[0, 0, q]
    k = int(weights.argmax())
    score = row.deciding_score
    reason = explain_key(words, q, k, start).get(row.kind, "")
    sentences = (
        f"Here {name_head(row.layer, row.head).lower()} {DOES[row.kind]}.",
        f"The marked token, {name_word(words, q)}, puts {format_share(weights[k])} of its attention on "
        f"{name_word(words, k)}{reason}; {describe_average(row.kind, scores[0][q], weights[k], score, reason)}.",
        describe_controls(attention),
    )
    return OpeningFinding(row.kind, place, q, k, sentences)


def compute_query_scores(entry: RecordingEntry, place: HeadPlace, kind: str, start: int) -> tuple[Tensor, Tensor]:
    """Return the score of each query of a head by its kind, and whether it counts, both (q,); start is the first token."""
    m = entry.get_map(place)
    words = None if entry.find_word_list(entry.get_layers(place), 1) is None else entry.get_axis_words(place)[1]
    ids = None if words is None else convert_to_ids(words, 1, m.shape[3], m.device)
    found = SCORES[kind](MapView(m, ids))
    among = found.among[0, 0]
    if kind == "first token" and words is not None and m.shape[2] == m.shape[3]:  # another word than the first shows it best
        first = words[start].strip()
        others = among & torch.tensor([word.strip() != first for word in words], device=among.device)
        among = others if bool(others.any()) else among
    return found.values[0, 0], among


def choose_query(scores: tuple[Tensor, Tensor], words: Sequence[str]) -> int:
    """Return the query with the largest score among those that count: words with letters in the second half, if there are any.

    Early words see few keys, so that a large weight says little there.
    """
    values, among = scores
    lettered = torch.tensor([any(letter.isalpha() for letter in word) for word in words], device=among.device) & among
    late = torch.arange(len(among), device=among.device) >= len(among) // 2
    chosen = next(one for one in (lettered & late, lettered, among) if bool(one.any()))
    return int(values.where(chosen, -torch.inf).argmax())


def explain_key(words: Sequence[str], q: int, k: int, first: int = 0) -> dict[str, str]:
    """Return what a key has to do with a query, by the kind of head that looks at such keys; `first` is the first token."""
    relations = {
        "itself": (k == q, ", itself"),
        PREFIX_MATCHING: (
            k > 0 and k - 1 != q and words[k - 1] == words[q],
            f", which followed an earlier {quote_word(words[q])}",
        ),
        "duplicate": (words[k] == words[q], ", the same token"),
        "previous token": (k == q - 1, ", the token just before"),
        "first token": (k == first, ", the first token"),
    }
    return {kind: said for kind, (holds, said) in relations.items() if holds}


def describe_average(kind: str, value: Tensor, largest: Tensor, score: Score, reason: str) -> str:
    """Return the score of a head and of what it is the average, with its value at the query where that is of several keys."""
    over = f"on average over {format_count(score.count, 'token')}"
    if format_share(value) == format_share(largest) or value < largest:
        return f"{over} {'it is' if reason else GETS[kind]} {format_share(score)}"
    return f"{'all such tokens get' if reason else GETS[kind]} {format_share(value)}, and {over} {format_share(score)}"


def find_leak(entry: RecordingEntry, attention: AttentionLayers, alive: Alive) -> OpeningFinding | None:
    """Return the largest weight on a later word, of layers that see later words while others do not; None without a leak."""
    if attention.kind != "self" or any(q != k for _, _, q, k in attention.shapes):
        return None
    found = [(layer, weights.triu(1)) for layer, weights in iterate_layers(entry, attention, alive)]
    leaking = [(layer, later) for layer, later in found if bool((later > 0).any())]
    if not leaking or len(leaking) == len(found):
        return None
    layer, later = max(leaking, key=lambda one: float(one[1].max()))
    place, q, k = find_maximum(attention, layer, later)
    words, _ = entry.get_axis_words(place)
    layers = " and ".join(str(layer) for layer, _ in leaking)
    sentences = (
        f"The mask leaks: of {len(found)} layers, layer{'s' * (len(leaking) > 1)} {layers} see{'s' * (len(leaking) < 2)} "
        "tokens that are still to come, to the right of the diagonal.",
        f"In {name_head(layer, attention.head_numbers[layer][place.head]).lower()}, the marked token, "
        f"{name_word(words, q)}, puts {format_share(later[place.head, q, k])} of its attention on "
        f"{name_word(words, k)}, which comes later.",
        describe_controls(attention),
    )
    return OpeningFinding(LEAK, place, q, k, sentences)


def find_strongest_weight(
    entry: RecordingEntry, attention: AttentionLayers, alive: Alive, wanted: str | None = None
) -> OpeningFinding:
    """Return the largest weight of all heads, in self attention on another word than itself and the first: it is exact."""
    best: tuple[float, int, Tensor] | None = None
    for layer, weights in iterate_layers(entry, attention, alive):
        if attention.kind == "self" and weights.shape[2] > 2:
            look = view_layer(entry, HeadPlace(attention.kind, attention.part, 0, layer))
            weights = weights.where(look.is_token[0].unsqueeze(-1), 0)
            weights[:, :, find_first_token(look)] = 0
            weights.diagonal(weights.shape[2] - weights.shape[1], 1, 2).zero_()
        top = float(weights.max())
        best = (top, layer, weights) if best is None or top > best[0] else best
    assert best is not None  # a recording has layers
    _, layer, weights = best
    place, q, k = find_maximum(attention, layer, weights)
    rows, columns = entry.get_axis_words(place)
    head = name_head(layer, attention.head_numbers[layer][place.head]).lower()
    other = " on another token than itself and the first" if attention.kind == "self" else ""
    sentences = (
        explain_missing_kind(entry, attention, wanted),
        f"The largest single weight{other} is in {head}: the marked token, {name_word(rows, q)}, puts "
        f"{format_share(weights[place.head, q, k])} of its attention on {name_word(columns, k)}.",
        describe_controls(attention),
    )
    return OpeningFinding(None, place, q, k, sentences)


def explain_missing_kind(entry: RecordingEntry, attention: AttentionLayers, wanted: str | None) -> str:
    """Return why no head is named by its kind; of attention to another input, whose heads have no such kinds, what it is."""
    if attention.kind != "self":
        return "Each token here looks at another input: that of a translation looks at the sentence that was translated."
    q = int(view_layer(entry, HeadPlace(attention.kind, attention.part, 0, 0)).is_token[0, 0].sum())  # without padding
    if wanted in DOES:
        return f"No head surely {DOES[wanted].partition(',')[0]} in {name_tokens(q)}."
    few = f": at least {MIN_SUPPORT} tokens must count" if q <= MIN_SUPPORT else ""
    return f"On {name_tokens(q)} no head looks clearly at one place{few}."


def name_tokens(count: int) -> str:
    """Return the tokens of a text in a sentence."""
    return "this one token" if count == 1 else f"these {count:,} tokens"


def view_layer(entry: RecordingEntry, place: HeadPlace) -> MapView:
    """Return a view of the map of a place's layer, of its batch row."""
    return MapView(entry.get_layer_map(place), own=place.kind == "self")


def find_first_token(look: MapView) -> int:
    """Return the first token of a view of one text, by its index among the keys: it is after the padding on the left."""
    return look.find_first_tokens(look.is_token)[0]


def iterate_layers(entry: RecordingEntry, attention: AttentionLayers, alive: Alive) -> Iterator[tuple[int, Tensor]]:
    """Generate each layer with the weights of its heads on the first text of the batch, (h, q, k); NaN as 0."""
    for layer in range(len(attention.names)):
        alive()
        yield layer, entry.get_layer_map(HeadPlace(attention.kind, attention.part, 0, layer)).dense()[0].nan_to_num(0.0)


def find_maximum(attention: AttentionLayers, layer: int, weights: Tensor) -> tuple[HeadPlace, int, int]:
    """Return the head, the query and the key of the largest of a layer's weights (h, q, k)."""
    head, q, k = (int(one) for one in np.unravel_index(int(weights.argmax()), weights.shape))
    return HeadPlace(attention.kind, attention.part, 0, layer, head), q, k


def describe_controls(attention: AttentionLayers) -> str:
    """Return what the colors mean, and what a reader can touch next."""
    count = sum(shape[1] for shape in attention.shapes)
    others = f", or see all {count:,} heads in Heads" if count > 1 else ""
    return f"The stronger a color, the more it looks there; select another token{others}."


def name_head(layer: int, head: int) -> str:
    """Name a head in words."""
    return f"Head {head} of layer {layer}"


def name_word(words: Sequence[str], place: int) -> str:
    """Name a word in quotes, and its place where words that look alike are several: "‘Lily’ at 13"."""
    quoted = [quote_word(word) for word in words]
    name = quoted[place]
    return f"{name} at {place:,}" if quoted.count(name) > 1 else name


def format_share(share: float | Tensor, unit: str = " %") -> str:
    """Format a share of all attention in percent."""
    return f"{100 * float(share):.0f}{unit}"
