"""Classification of heads: one row for each head of a recording, with its kind and the score of every detector."""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.html_repr import HtmlRepr
from regard.map.indexing import check_slice
from regard.mechanism.arguments import (
    check_count,
    check_floating,
    check_index,
    check_instance,
    check_integer,
    check_sequence,
    describe_value,
)
from regard.observe import detectors, patterns, text_table, words
from regard.observe.detectors import NEAR, Queries
from regard.observe.map_view import MapView
from regard.observe.patterns import Duplicate, Induction
from regard.observe.recording import Recording, join_names
from regard.observe.value_norms import weight_by_norm
from regard.observe.words import Class, Tokens

MARKED = 0.4  # the mean weight on a pattern, or on the first token, that names a head
PATTERNS = ("previous token", "itself", "duplicate", "induction")
SHORT = {  # names of columns
    "previous token": "prev",
    "itself": "self",
    "duplicate": "dup",
    "induction": "ind",
    "first token": "first",
    "distance": "dist",
}
PUNCTUATION: Mapping[str, Class] = {"punctuation": words.is_punctuation}


@dataclass(frozen=True, eq=False)
class HeadOptions:
    """The optional settings of `heads`, with their defaults."""

    tokens: Tokens | None = None
    offsets: Sequence[int] = ()
    window: int = NEAR
    classes: Mapping[str, Class] = field(default_factory=lambda: PUNCTUATION)
    needle: slice | None = None
    questions: Queries | None = None
    projections: Sequence[Tensor] | None = None

    def check(self) -> None:
        """Raise ConfigError if a setting is wrong."""
        for offset in check_sequence("offsets", self.offsets):
            check_count("an offset", offset, 0)
        check_count("window", self.window, 0)
        if not isinstance(self.classes, Mapping):
            raise ConfigError(
                f"classes must be bool tensors or functions of a word, by name; got {describe_value(self.classes)}."
            )
        for name, rule in self.classes.items():
            if not (isinstance(name, str) and (isinstance(rule, Tensor) or callable(rule))):
                raise ConfigError(f"classes must be bool tensors or functions of a word, by name; got {describe_value(rule)}.")
        if self.needle is not None:
            check_slice("needle", check_instance("needle", self.needle, slice))
        if self.questions is not None and self.needle is None:
            raise ConfigError("questions needs a needle: pass the keys of the needle as needle=slice(start, stop).")
        if self.projections is not None:
            each_one = (
                self.projections if isinstance(self.projections, Tensor) else check_sequence("projections", self.projections)
            )
            for projection in [each_one] if isinstance(each_one, Tensor) else each_one:
                check_floating("a projection", projection)

    @property
    def available_classes(self) -> dict[str, Class]:
        """The classes that can be evaluated: functions of words only if there are words."""
        words_known = self.tokens is not None and not isinstance(self.tokens, Tensor)
        return {name: rule for name, rule in self.classes.items() if words_known or isinstance(rule, Tensor)}

    def describe_missing_scores(self, kind: str = "self") -> tuple[str, ...]:
        """Return a sentence, in a tuple, on the scores that cannot be computed without words; empty if there are none."""
        lost = [name for name in ("duplicate", "induction") if self.tokens is None and kind == "self"]
        lost += [name for name in self.classes if name not in self.available_classes]
        return (f"without words for the keys there is no {', '.join(lost)}: set recording.tokens.",) if lost else ()


@dataclass(frozen=True)
class Head:
    """One head: its layer by number and by name, its own number, its kind, and its scores by detector name.

    A score is the mean over the batch rows in which a query counts; NaN where there is none.
    """

    layer: int
    name: str
    head: int
    kind: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Heads(HtmlRepr):
    """A table of heads: iterates over its rows, prints in 80 columns, sorts, and selects a kind."""

    rows: tuple[Head, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Head]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the row at an index, or the rows of a slice. Raises OutOfRangeError."""
        if isinstance(index, slice):
            check_slice("a slice of a table of heads", index)
            return self.rows[index]
        if not -len(self.rows) <= check_integer("an index of a table of heads", index) < len(self.rows):
            raise OutOfRangeError(f"there are {len(self.rows)} heads, got index {describe_value(index)}.")
        return self.rows[index]

    @property
    def detectors(self) -> tuple[str, ...]:
        """The names of the scores."""
        return tuple(self.rows[0].scores) if self.rows else ()

    def sort_by(self, by: str) -> "Heads":
        """Return the table sorted by a score, largest first, NaN last. Raises MissingNameError for an unknown score."""
        if check_instance("by", by, str) not in self.detectors:
            raise MissingNameError(
                f"there is no score {describe_value(by)}; the scores are {', '.join(self.detectors) or 'none'}."
            )
        ranked = sorted(self.rows, key=lambda row: -math.inf if math.isnan(row.scores[by]) else row.scores[by], reverse=True)
        return replace(self, rows=tuple(ranked))

    def select_kind(self, kind: str) -> "Heads":
        """Return the rows of one kind; there may be none."""
        check_instance("kind", kind, str)
        return replace(self, rows=tuple(row for row in self.rows if row.kind == kind))

    def to_pandas(self) -> Any:
        """Return a DataFrame with one line for each head. Raises ConfigError if pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("a DataFrame needs pandas, which is not installed: pip install pandas.") from None
        plain = ("layer", "name", "head", "kind")
        return pandas.DataFrame([{**{name: getattr(row, name) for name in plain}, **row.scores} for row in self.rows])

    def format_lines(self, width: int = text_table.WIDTH) -> tuple[list[str], tuple[str, ...]]:
        """Return a line of titles and one for each head with the scores that fit the width, and the names of the others."""
        titles = ["head", "kind", *(SHORT.get(name, name) for name in self.detectors)]
        lines = [[f"{row.layer}.{row.head}", row.kind, *map(text_table.format_score, row.scores.values())] for row in self.rows]
        room = text_table.count_fitting_columns(titles, lines, width)
        text = text_table.align_columns(titles[:room], [line[:room] for line in lines], left=("head", "kind"))
        return text, self.detectors[room - 2 :]

    def __str__(self) -> str:
        text, hidden = self.format_lines()
        kept = (f"not shown, but in every row's scores: {', '.join(hidden)}",) if hidden else ()
        return "\n".join([*text, *kept, *self.notes])


def heads(
    recording: Recording,
    *,
    kind: str = "self",
    part: str | None = None,
    layers: Sequence[int | str] | None = None,
    tokens: Tokens | None = None,
    offsets: Sequence[int] = (),
    window: int = NEAR,
    classes: Mapping[str, Class] = PUNCTUATION,
    needle: slice | None = None,
    questions: Queries | None = None,
    projections: Sequence[Tensor] | None = None,
) -> Heads:
    """Classify each head of a recording: return a table with its kind and the score of every detector.

    kind, part and layers select modules, as in recording.map. tokens, words or ids (k,) or (b, k), replace recording.tokens.
    offsets are further distances back, scored like the previous token; window is what counts as local; classes are sets of
    keys, bool (k,) or a function of a word; needle (keys) and questions (queries) are those of a needle prompt; projections are
    W_output (h, e, c) of each selected layer, for the norms of values if the recording kept them.

    The kind is the name of the largest of the scores previous token, itself, duplicate and induction if it is at least 0.4;
    else "first token" if that score is; else "broad" if e^entropy is at least half of the keys a query may see; else "local" if
    the local share is more than half way from that of equal weights to 1; else "mixed".
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    tokens = recording.tokens if tokens is None else words.check_tokens(tokens)
    wanted = HeadOptions(tokens, offsets, window, classes, needle, questions, projections)
    wanted.check()
    rows = tuple(classify_heads(recording, wanted, kind=kind, part=part, layers=layers))
    other = "cross" if kind == "self" else "self"
    if not rows and recording.layers(other, part):
        return Heads(rows, (f"the recording has no {kind} attention, but {other} attention: pass kind={other!r}.",))
    return Heads(rows, wanted.describe_missing_scores(kind))


def classify_heads(
    recording: Recording,
    wanted: HeadOptions,
    *,
    kind: str = "self",
    part: str | None = None,
    layers: Sequence[int | str] | None = None,
    some: Sequence[int] | None = None,
) -> Iterator[Head]:
    """Yield the rows of `heads` as each layer is done; `some` restricts them to these heads of each layer."""
    names = recording.layers(kind=kind, part=part)
    chosen = range(len(names)) if layers is None else resolve_layers(layers, names)
    if wanted.projections is not None and len(wanted.projections) != len(chosen):
        raise ConfigError(
            f"projections must be one W_output (h, e, c) for each layer, {len(chosen)}; got {len(wanted.projections)}."
        )
    for n, number in enumerate(chosen):
        m = recording.map(number, kind=kind, part=part)
        b, h, _, k = m.shape
        numbers = recording.heads(number, kind=kind, part=part)
        asked = range(len(numbers)) if some is None else some
        theirs = replace(wanted, tokens=words.select_key_words(wanted.tokens, kind, names[number]))
        tokens = None if theirs.tokens is None else words.convert_to_ids(theirs.tokens, b, k, m.device)
        look = MapView(m if some is None else m.select(heads=some), tokens, own=kind == "self")
        found = compute_scores(look, theirs)
        values = recording.values(number, kind=kind, part=part)
        if values is not None:
            values = values if some is None else values[:, [head * values.shape[1] // h for head in some]]
            projection = None if wanted.projections is None else wanted.projections[n][list(asked)]
            found["first by norm"] = weight_by_norm(look, values, projection).weight_on_first()
        kinds = infer_kinds(look, wanted, found)
        means = {name: score.nanmean(0).tolist() for name, score in found.items()}
        for place, head in enumerate(asked):
            own = {name: score[place] for name, score in means.items()}
            yield Head(number, names[number], numbers[head], kinds[place], own)


def resolve_layers(layers: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Convert layers by number or by name to numbers. Raises MissingNameError or OutOfRangeError."""
    found = []
    for layer in check_sequence("layers", layers):
        if isinstance(layer, str) and layer not in names:
            raise MissingNameError(
                f"no attention of {describe_value(layer)} was recorded. Recorded: {join_names(list(names))}."
            )
        found.append(names.index(layer) if isinstance(layer, str) else check_index("layer", layer, len(names), "the recording"))
    return found


def compute_scores(look: MapView, wanted: HeadOptions) -> dict[str, Tensor]:
    """Return the score (b, h) of every detector by its name, in the order of the columns."""
    found: dict[str, Tensor] = {}
    if look.own:
        found |= {"previous token": detectors.weight_on_previous(look), "itself": detectors.weight_on_self(look)}
        if look.tokens is not None:
            found |= {"duplicate": patterns.score(look, Duplicate()), "induction": patterns.score(look, Induction())}
    found |= {"first token": detectors.weight_on_first(look), "sink": detectors.sink_rate(look)}
    if look.own:
        found |= {f"back {back}": detectors.weight_on_previous(look, back) for back in wanted.offsets}
    if wanted.needle is not None:
        questions = slice(None) if wanted.questions is None else wanted.questions
        found["retrieval"] = detectors.retrieval(look, wanted.needle, questions)
    if look.own:
        found |= {"local": detectors.local_weight(look, wanted.window), "distance": detectors.distance(look)}
    found |= {"keys": detectors.effective_keys(look), "heavy": detectors.heavy_hitter_share(look)}
    if rules := wanted.available_classes:
        b, _, _, k = look.map.shape
        mass = detectors.weight_on_classes(look, words.mark_classes(wanted.tokens, rules, b, k, look.map.device))
        found |= dict(zip(rules, mass.unbind(-1), strict=True))
    return {**found, "entropy": detectors.entropy(look), "breadth": detectors.breadth(look)}


def infer_kinds(look: MapView, wanted: HeadOptions, found: Mapping[str, Tensor]) -> list[str]:
    """Return the kind of each head, by the rule of `heads`."""
    means = {name: score.nanmean(0).tolist() for name, score in found.items()}
    if look.own:
        means["halfway"] = ((1 + detectors.uniform_local_weight(look, wanted.window).nanmean(0)) / 2).tolist()
    return [infer_kind({name: score[head] for name, score in means.items()}) for head in range(look.map.shape[1])]


def infer_kind(means: Mapping[str, float]) -> str:
    """Return the kind of a head with these scores."""
    marked = {name: means[name] for name in PATTERNS if means.get(name, 0) >= MARKED}
    if marked:
        return max(marked, key=lambda name: marked[name])
    if means["first token"] >= MARKED:
        return "first token"
    if means["breadth"] >= 0.5:
        return "broad"
    return "local" if means.get("local", 0) > means.get("halfway", 1) else "mixed"
