"""A table of heads: one row for each, with its kind, the score of every detector, and a sentence."""

import importlib
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regard.errors import ConfigError, MissingNameError, OutOfRangeError
from regard.html_repr import HtmlRepr
from regard.map.indexing import check_slice
from regard.mechanism.arguments import check_instance, check_integer, describe_value
from regard.observe import text_table
from regard.observe.classification.head_kinds import (
    ACTIONS,
    EFFECT,
    MIN_SUPPORT,
    RETRIEVAL,
    RETRIEVED,
    RULES,
    SUCCEEDS,
    SUCCESSION,
    TEXT_EFFECT,
    THRESHOLDS,
    UNCLEAR,
)
from regard.observe.score_interval import Score

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
    def deciding_score(self) -> Score:
        """The score that the kind follows from. Raises KeyError where the kind is unclear."""
        return self.scores[RULES.get(self.kind, self.kind)]

    @property
    def sentence(self) -> str:
        """What the head does and how sure that is, with the score that decides its kind; its largest scores if none does."""
        if self.kind != UNCLEAR:
            score = self.deciding_score
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


def quote_word(word: str) -> str:
    """Quote a token without the spaces around it, a line end by its sign."""
    return f"‘{word.replace(chr(10), '↵').strip() or word}’"


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
        prose = [line for one in (others, *self.notes) for line in textwrap.wrap(one, text_table.WIDTH)]
        return "\n".join([*text, *prose])


def make_line(row: Head) -> dict[str, Any]:
    """Return the line of a head in a data frame."""
    line: dict[str, Any] = {name: getattr(row, name) for name in ("layer", "name", "head", "kind", "sentence")}
    for name, score in row.scores.items():
        line |= {name: float(score), f"{name} low": score.low, f"{name} high": score.high, f"{name} count": score.count}
    return line
