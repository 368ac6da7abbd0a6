"""Classification of heads: one row for each head of a recording, with its kind, the score of every detector, and a sentence."""

import importlib
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.html_repr import HtmlRepr
from regard.map.indexing import check_slice
from regard.mechanism.arguments import check_choice, check_index, check_instance, check_integer, check_sequence, describe_value
from regard.observe import detectors, text_table, words
from regard.observe.detectors import NEAR, Queries
from regard.observe.head_scores import PUNCTUATION, HeadOptions, UserScore, define_user_scores, estimate_heads
from regard.observe.implicit_heads import check_implicit_options, estimate_absolute_shares
from regard.observe.map_view import MapView
from regard.observe.recording import Recording
from regard.observe.run import IMPLICIT, KINDS, join_names
from regard.observe.score_interval import Score
from regard.observe.words import Class, Tokens

THRESHOLDS = {  # of the weight that names a head
    "previous token": 0.4,
    "itself": 0.4,
    "duplicate": 0.4,
    "induction": 0.4,
    "first token": 0.3,  # Gu et al. 2024
}
STRIPE, STRIPED = "stripe", 0.4  # a kind, and the weight that names it
STRIPE_WORDS = 3  # that its sentence names
BROAD = 0.5  # of the keys
FAIR = 0.2  # of a score corrected for chance, above which agreement is more than slight (Landis and Koch 1977)
MIN_SUPPORT = 8  # queries that count, with fewer of which no kind is claimed
UNCLEAR = "unclear"  # the kind of a head whose scores leave it open
ACTIONS = {
    "previous token": "attends to the previous token",
    "itself": "attends to its own token",
    "duplicate": "attends to earlier occurrences of its token",
    "induction": "attends to what followed its token before",
    "first token": "attends to the first token",
    STRIPE: "attends to the same few tokens from everywhere",
    "broad": "attends to half of its keys or more",
    "local": "attends to tokens nearby",
}
TELLING_KINDS = ("induction", "duplicate", "previous token", "first token", STRIPE, "itself")  # the most telling first
RETRIEVAL, RETRIEVED = "retrieval", 0.1  # a score, and above what it makes a retrieval head: Wu et al. 2024
SUCCESSION, SUCCEEDS = "succession", 0.5  # a score, and above what the next word is raised more often than not
EFFECT, TEXT_EFFECT = "effect", "effect on text"  # scores that are the rise of the loss without the head
RULES = {"broad": "breadth", "local": "local"}  # scores of kinds with another name
SHORT = {  # names of columns
    "previous token": "prev",
    "itself": "self",
    "duplicate": "dup",
    "induction": "ind",
    "first token": "first",
    "distance": "dist",
}
CHANCE = 0.2  # of a score, above which its sentence says what it would be by chance
LISTED_SCORES = 3  # scores in the sentence of a head that is unclear


@dataclass(frozen=True)
class Head:
    """One head: its layer by number and by name, its own number, its kind, and its scores by detector name.

    A score is a number, the mean over the documents of the mean over the queries that count, with low, high and count.
    """

    layer: int
    name: str
    head: int
    kind: str
    scores: Mapping[str, Score]
    words: tuple[str, ...] = ()  # the tokens of a stripe, with the most attention first

    @property
    def sentence(self) -> str:
        """What the head does and how sure that is, with the score that decides its kind; its largest scores if none does."""
        if self.kind != UNCLEAR:
            score = self.scores[RULES.get(self.kind, self.kind)]
            found = (
                f"{ACTIONS[self.kind]}: {describe_interval(score)} on {score.count:,} quer{'y' if score.count == 1 else 'ies'}"
            )
            found += f", {score.chance:.2f} by chance" if score.chance > CHANCE * score else ""
            found += f": {', '.join(map(quote_word, self.words))}" if self.words else ""
            if self.kind == "first token" and "first value" in self.scores:
                found += f"; that token's value vector has {self.scores['first value']:.2f} times the median length"
            if self.kind == "induction" and "copying" in self.scores:
                found += f"; raises its logit by {describe_interval(self.scores['copying'])}"
            found += describe_effect(self.scores[EFFECT]) if EFFECT in self.scores else ""
            found += describe_effect(self.scores[TEXT_EFFECT], " on text") if TEXT_EFFECT in self.scores else ""
            return found + self.describe_words()
        known = sorted(
            (name for name in THRESHOLDS if self.scores.get(name, math.nan) >= 0), key=lambda name: -self.scores[name]
        )
        listed = "; ".join(f"{name} {describe_interval(self.scores[name])}" for name in known[:LISTED_SCORES])
        count = max((self.scores[name].count for name in known), default=0)
        few = f" on {count} quer{'y' if count == 1 else 'ies'}; a kind needs {MIN_SUPPORT}" if count < MIN_SUPPORT else ""
        return f"no clear kind: {f'{listed}{few}' if listed else 'no query counts'}{self.describe_words()}"

    def describe_words(self) -> str:
        """Return what a retrieval head finds and a successor head raises; empty for any other head."""
        known = {name: self.scores[name] for name in (RETRIEVAL, SUCCESSION) if name in self.scores}
        found = ""
        if RETRIEVAL in known and known[RETRIEVAL].low > RETRIEVED:
            found += f"; a retrieval head: {describe_interval(known[RETRIEVAL])} of hidden sentences"
        if SUCCESSION in known and known[SUCCESSION].low > SUCCEEDS:
            found += f"; a successor head: raises the next of a sequence in {describe_interval(known[SUCCESSION])} of the steps"
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return layer, head, kind, sentence and scores as plain values, for JSON."""
        scores = {name: score.to_dict() for name, score in self.scores.items()}
        plain = {name: getattr(self, name) for name in ("layer", "head", "kind", "sentence")}
        return {**plain, "scores": scores}


def describe_interval(score: Score) -> str:
    """Return a score with its interval, such as "0.91 (0.90 to 0.92)"."""
    return f"{score:.2f} ({score.low:.2f} to {score.high:.2f})" if score.low == score.low else f"{score:.2f} (no interval)"


def describe_effect(score: Score, where: str = "") -> str:
    """Return what the loss does without the head; where says on what, with a space before it."""
    if math.isnan(score):
        return ""
    if score.low > 0 or score.high < 0:
        low, high = sorted((abs(score.low), abs(score.high)))
        verb = "rises" if score > 0 else "falls"
        return f"; without it the loss{where} {verb} by {abs(score):.3f} nats ({low:.3f} to {high:.3f})"
    return f"; without it the loss{where} does not clearly change ({score.low:.3f} to {score.high:.3f} nats)"


def find_score(by: str, names: Sequence[str]) -> str:
    """Return the one of the names of scores that is `by`, or has it as its column. Raises MissingNameError if none does."""
    check_instance("by", by, str)
    name = by if by in names else {SHORT.get(name, name): name for name in names}.get(by)
    if name is None:
        raise MissingNameError(f"there is no score {describe_value(by)}; the scores are {', '.join(names) or 'none'}.")
    return name


@dataclass(frozen=True)
class Heads(HtmlRepr):
    """A table of heads: iterates over its rows, prints in 80 columns, sorts, and selects a kind."""

    rows: tuple[Head, ...]
    notes: tuple[str, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)  # of the scores that the user added, from their docstrings

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
        """Return the table sorted by a score, named as in a row or as its column, largest first, NaN last.

        Raises MissingNameError for an unknown score.
        """
        name = find_score(by, self.detectors)
        ranked = sorted(
            self.rows, key=lambda row: -math.inf if math.isnan(row.scores[name]) else row.scores[name], reverse=True
        )
        return replace(self, rows=tuple(ranked))

    def select_kind(self, kind: str) -> "Heads":
        """Return the rows of one kind; there may be none."""
        check_instance("kind", kind, str)
        return replace(self, rows=tuple(row for row in self.rows if row.kind == kind))

    def to_pandas(self) -> Any:
        """Return a DataFrame with one line for each head. Raises ConfigError if pandas is not installed.

        Its columns are layer, name, head, kind, sentence, and for each score its name, and its name with " low", " high" and
        " count".
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("a DataFrame needs pandas, which is not installed: pip install pandas.") from None
        return pandas.DataFrame([make_line(row) for row in self.rows])

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return each head as {layer, head, kind, sentence, scores: {name: {mean, low, high, count}}}, for JSON."""
        return [row.to_dict() for row in self.rows]

    def format_lines(self, width: int = text_table.WIDTH, by: str | None = None) -> tuple[list[str], tuple[str, ...]]:
        """Return a line of titles and one for each head with the scores that fit the width, and the names of the others.

        The score `by`, named as for sort_by, is the first column if it would not fit.
        """
        text, hidden = self.align_scores(self.detectors, width)
        name = None if by is None else find_score(by, self.detectors)
        if name not in hidden:
            return text, hidden
        return self.align_scores((name, *(one for one in self.detectors if one != name)), width)

    def align_scores(self, names: Sequence[str], width: int) -> tuple[list[str], tuple[str, ...]]:
        """Return the lines of a table with the first of these scores that fit the width, and the names of the others."""
        titles = ["head", "kind", *(SHORT.get(name, name) for name in names)]
        lines = [
            [f"{row.layer}.{row.head}", row.kind, *(text_table.format_score(row.scores[name]) for name in names)]
            for row in self.rows
        ]
        room = text_table.count_fitting_columns(titles, lines, width)
        text = text_table.align_columns(titles[:room], [line[:room] for line in lines], left=("head", "kind"))
        return text, tuple(names[room - 2 :])

    def __repr__(self) -> str:
        counts = [f"{count} {kind}" for kind, count in Counter(row.kind for row in self.rows).most_common()]
        return f"Heads({len(self)} head{'s' * (len(self) != 1)}{': ' if counts else ''}{', '.join(counts)})"

    def __str__(self) -> str:
        text, hidden = self.format_lines()
        others = f"not shown, but in every row's scores: {', '.join(hidden)}" if hidden else ""
        return "\n".join([*text, *textwrap.wrap(others, text_table.WIDTH), *self.notes])


def make_line(row: Head) -> dict[str, Any]:
    """Return the line of a head in a data frame."""
    line: dict[str, Any] = {name: getattr(row, name) for name in ("layer", "name", "head", "kind", "sentence")}
    for name, score in row.scores.items():
        line |= {name: float(score), f"{name} low": score.low, f"{name} high": score.high, f"{name} count": score.count}
    return line


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
    scores: Sequence[UserScore] = (),
) -> Heads:
    """Classify each head of a recording: return a table with its kind and the score of every detector, with its 95 % interval.

    kind, part and layers select modules, as in recording.map. tokens, words or ids (k,) or (b, k), replace recording.tokens.
    offsets are further distances back, scored like the previous token; window is what counts as local; classes are sets of
    keys, bool (k,) or a function of a word; needle (keys) and questions (queries) are those of a needle prompt; projections are
    W_output (h, e, c) of each selected layer, for the norms of values if the recording kept them. scores are functions of an
    AttentionMap (b, h, q, k) that return a number for each head (b, h) or query (b, h, q); each has a docstring.

    The interval is over documents, the rows of the batch; of a single one over eight segments of its queries. A head has the
    kind previous token, itself, duplicate or induction if the interval of that score is above 0.4, or first token if it is
    above 0.3 (Gu et al. 2024), and above the interval of each of the other four. Early queries see few keys: corrected for
    chance, by Cohen's kappa, the interval must be above 0.2 too. A kind is claimed only of a score to which at least 8 queries
    count. Otherwise it is "stripe" if the interval of the weight on the same few tokens is above 0.4, under the same
    conditions, "broad" if the interval of
    e^entropy / keys is above 0.5, "local" if that of the local weight is more than half way from that of equal weights to 1,
    and else "unclear": its sentence lists the largest scores.

    kind="implicit" is of recurrences and convolutions, whose entries are signed: the scores are shares of the absolute values
    of a row, ``|M_ij| / Σ |M_in|``, and the kinds follow the same rule with these, without "broad" and "stripe". There are no
    scores that need weights, as entropy, and no classes; needle, projections and scores are refused.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    tokens = recording.tokens if tokens is None else words.check_tokens(tokens)
    wanted = HeadOptions(tokens, offsets, window, classes, needle, questions, projections, scores)
    wanted.check()
    if check_choice("kind", kind, (*KINDS, IMPLICIT)) == IMPLICIT:
        check_implicit_options(wanted)
        notes = replace(wanted, classes={}).describe_missing_scores()
        return Heads(tuple(classify_implicit_heads(recording, wanted, part, layers)), notes)
    rows = tuple(classify_heads(recording, wanted, kind=kind, part=part, layers=layers))
    other = "cross" if kind == "self" else "self"
    if not rows and recording.layers(other, part):
        return Heads(rows, (f"the recording has no {kind} attention, but {other} attention: pass kind={other!r}.",))
    implicit = len(recording.layers(IMPLICIT, part)) if layers is None else 0
    if not rows and implicit:
        return Heads(rows, ("no layer has a softmax; kind='implicit' scores those without by the sizes of their entries.",))
    notes = wanted.describe_missing_scores(kind)
    if implicit:
        count = "one layer has" if implicit == 1 else f"{implicit} layers have"
        notes = (*notes, f"{count} no softmax, and so no row here: kind='implicit' has them.")
    return Heads(rows, notes, define_user_scores(scores))


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
        look = MapView(m if some is None else m.select(heads=some), tokens, kind == "self", wanted.queries)
        values = recording.values(number, kind=kind, part=part)
        if values is not None and some is not None:
            values = values[:, [head * values.shape[1] // h for head in some]]
        projection = None if wanted.projections is None else wanted.projections[n][list(asked)]
        found = estimate_heads(look, theirs, values, projection)
        halfway = compute_halfway_weights(look, wanted.window)
        for place, head in enumerate(asked):
            head_kind = infer_kind(found[place], halfway[place])
            stripes = list_stripe_words(look, place, theirs.tokens) if head_kind == STRIPE else ()
            yield Head(number, names[number], numbers[head], head_kind, found[place], stripes)


def classify_implicit_heads(
    recording: Recording, wanted: HeadOptions, part: str | None, layers: Sequence[int | str] | None
) -> Iterator[Head]:
    """Yield the rows of `heads` for layers without a softmax, by the absolute values of their entries."""
    names = recording.layers(kind=IMPLICIT, part=part)
    for number in range(len(names)) if layers is None else resolve_layers(layers, names):
        m = recording.map(number, kind="implicit", part=part)
        theirs = words.select_key_words(wanted.tokens, "self", names[number])
        tokens = None if theirs is None else words.convert_to_ids(theirs, m.shape[0], m.shape[3], m.device)
        for head, scores in enumerate(estimate_absolute_shares(m, names[number], wanted, tokens)):
            local = scores["local"].chance
            yield Head(number, names[number], head, infer_kind(scores, (1 + local) / 2), scores)


def list_stripe_words(look: MapView, head: int, tokens: Tokens | None) -> tuple[str, ...]:
    """Return the tokens of a head's stripe in the first document, or their positions, with the most attention first."""
    marked = detectors.mark_stripes(look)[0, head].nonzero().flatten()
    keys = marked[look.statistics.received[0, head, marked].argsort(descending=True)].tolist()
    if tokens is None or isinstance(tokens, Tensor):
        return tuple(f"token {key}" for key in keys[:STRIPE_WORDS])
    row: Any = tokens if isinstance(tokens[0], str) else tokens[0]
    return tuple(dict.fromkeys(str(row[key]) for key in keys))[:STRIPE_WORDS]


def quote_word(word: str) -> str:
    """Quote a token without the spaces around it, a line end by its sign."""
    return f"‘{word.replace(chr(10), '↵').strip() or word}’"


def resolve_layers(layers: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Convert layers by number or by name to numbers.

    Raises MissingNameError or OutOfRangeError, and ConfigError for the name of a module that several layers share.
    """
    found = []
    for layer in check_sequence("layers", layers):
        if isinstance(layer, str) and layer not in names:
            raise MissingNameError(
                f"no attention of {describe_value(layer)} was recorded. Recorded: {join_names(list(names))}."
            )
        if isinstance(layer, str) and names.count(layer) > 1:
            raise ConfigError(f"{layer} ran {names.count(layer)} times in one forward: pass the numbers of its layers.")
        found.append(names.index(layer) if isinstance(layer, str) else check_index("layer", layer, len(names), "the recording"))
    return found


def compute_halfway_weights(look: MapView, window: int) -> list[float]:
    """Return the local weight of each head half way between equal weights and 1; NaN where keys are of another text."""
    if not look.own:
        return [math.nan] * look.map.shape[1]
    return [float(x) for x in (1 + detectors.uniform_local_weight(look, window).nanmean(0)) / 2]


def infer_kind(scores: Mapping[str, Score], halfway: float = math.nan) -> str:
    """Return the kind of a head with these scores, by the rule of `heads`."""
    known = {name: scores[name] for name in THRESHOLDS if name in scores and not math.isnan(scores[name].low)}
    for name, score in known.items():
        others = [other.high for key, other in known.items() if key != name]
        copies = name != "induction" or "copying" not in scores or scores["copying"].low > 0
        if exceeds(score, THRESHOLDS[name]) and all(score.low > high for high in others) and copies:
            return name
    if STRIPE in scores and exceeds(scores[STRIPE], STRIPED):
        return STRIPE
    if "breadth" in scores and has_support(scores["breadth"]) and scores["breadth"].low > BROAD:
        return "broad"
    return "local" if "local" in scores and has_support(scores["local"]) and scores["local"].low > halfway else UNCLEAR


def exceeds(score: Score, threshold: float) -> bool:
    """Return whether a kind can be claimed of a score: enough queries count, and its interval is above threshold and chance."""
    return has_support(score) and score.low > threshold and not score.low_above_chance <= FAIR


def has_support(score: Score) -> bool:
    """Return whether enough queries count to a score that a kind can be claimed."""
    return score.count >= MIN_SUPPORT
