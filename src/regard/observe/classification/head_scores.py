"""The scores of the heads of one layer on a text, by the detectors that the settings select, with their intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap
from regard.map.indexing import check_slice
from regard.mechanism.arguments import check_count, check_floating, check_instance, check_sequence, describe_value
from regard.observe import detectors
from regard.observe.detectors import NEAR, Queries, add_chance
from regard.observe.map_view import CHANCES, MapView
from regard.observe.patterns import Duplicate, Induction, Pattern
from regard.observe.recorded_runs import words
from regard.observe.recorded_runs.words import Class, Tokens
from regard.observe.score_interval import UNLIMITED, DocumentMeans, HeadScores, QueryScores, Score, estimate_all_scores
from regard.observe.value_norms import weight_by_norm

PUNCTUATION: Mapping[str, Class] = {"punctuation": words.is_punctuation}
UNBOUNDED_SCORES = ("distance", "keys", "entropy", "first value", "receiver")  # all others are shares, from 0 to 1
VALUE_SCORES = ("first by norm", "first value")  # of recordings with values
PATTERNS: Mapping[str, Pattern] = {"duplicate": Duplicate(), "induction": Induction()}
SCORES = (  # by default, in the order of the columns
    *("previous token", "itself", *PATTERNS, "first token", "sink", "local", "distance", "keys", "heavy", "stripe"),
    *(*PUNCTUATION, "positional", "receiver", "entropy", "breadth", *VALUE_SCORES),
)
UserScore = Callable[[AttentionMap], Tensor]


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
    scores: Sequence[UserScore] = ()
    queries: slice = field(default_factory=lambda: slice(None))  # over which the scores are means

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

        for score in check_sequence("scores", self.scores):
            if not callable(score) or not getattr(score, "__name__", "") or not (score.__doc__ or "").strip():
                raise ConfigError(
                    "scores must be functions of an AttentionMap, each with a docstring that says what it computes; got "
                    f"{describe_value(score)}."
                )

    @property
    def available_classes(self) -> dict[str, Class]:
        """The classes that can be evaluated: functions of words only if there are words."""
        words_known = self.tokens is not None and not isinstance(self.tokens, Tensor)
        return {name: rule for name, rule in self.classes.items() if words_known or isinstance(rule, Tensor)}

    def number_sentences(self, rows: int) -> Tensor | None:
        """Return the number of the sentence of each word, (b, k); None without words, or where there are too few sentences."""
        if self.tokens is None or isinstance(self.tokens, Tensor) or not len(self.tokens):
            return None
        texts: Any = [self.tokens] * rows if isinstance(self.tokens[0], str) else self.tokens
        found = torch.tensor([words.number_sentences(text) for text in texts])
        return found if int(found.max()) >= 2 * detectors.RECEIVER_DISTANCE - 1 else None

    def describe_missing_scores(self, kind: str = "self", wordless: str | None = None) -> tuple[str, ...]:
        """Return a sentence, in a tuple, on the scores that cannot be computed without words; empty if there are none.

        `wordless` is what the tokens are where they have no words that could be given, such as patches of an image.
        """
        lost = [name for name in ("duplicate", "induction") if self.tokens is None and kind == "self"]
        lost += [name for name in self.classes if name not in self.available_classes]
        if not lost:
            return ()
        if wordless:
            return (f"the tokens are {wordless}, so there is no {', '.join(lost)}: these are scores of text.",)
        advice = "set recording.tokens in Python, before it is saved or shown"
        return (f"without the text of the tokens there is no {', '.join(lost)}: {advice}.",)


def score_pattern(look: MapView, pattern: Pattern) -> QueryScores:
    """Return the weight of each query on the keys of a pattern, as patterns.score, with its chance."""
    found = pattern.match(look)
    return add_chance(look, look.score_queries(found.weight, found.count > 0), found.count)


def compute_scores(look: MapView, wanted: HeadOptions) -> dict[str, HeadScores]:
    """Return the score of every detector by its name, in the order of the columns: of each query, or (b, h) of each head."""
    found: dict[str, HeadScores] = {}
    look.gather_sums(wanted.window, detectors.HEAVY, detectors.MANY)
    averaged = look.document_means

    def add(name: str, compute: Callable[[], QueryScores]) -> None:
        found[name] = DocumentMeans(averaged[name], name in CHANCES, compute) if name in averaged else compute()

    if look.own:
        add("previous token", lambda: add_chance(look, detectors.weight_on_previous.queries(look), 1))
        add("itself", lambda: add_chance(look, detectors.weight_on_self.queries(look), 1))
        if look.tokens is not None:
            found |= {name: score_pattern(look, pattern) for name, pattern in PATTERNS.items()}
    add("first token", lambda: add_chance(look, detectors.weight_on_first.queries(look), look.is_first_token_visible.long()))
    add("sink", lambda: detectors.sink_rate.queries(look))
    if look.own:
        found |= {f"back {back}": detectors.weight_on_previous.queries(look, back) for back in wanted.offsets}
    if wanted.needle is not None:
        questions = slice(None) if wanted.questions is None else wanted.questions
        found["needle"] = detectors.weight_on_needle.queries(look, wanted.needle, questions)
    if look.own:
        add("local", lambda: detectors.local_weight.queries(look, wanted.window))
        add("distance", lambda: detectors.distance.queries(look))
    add("keys", lambda: detectors.effective_keys.queries(look))
    found["heavy"] = detectors.heavy_hitter_share(look)
    if look.own:
        add("stripe", lambda: detectors.stripe_weight.queries(look))
    if rules := wanted.available_classes:
        b, _, _, k = look.map.shape
        marked = words.mark_classes(wanted.tokens, rules, b, k, look.map.device)
        add_scores(found, zip(rules, detectors.score_classes(look, marked), strict=True))
    if look.own:
        found["positional"] = detectors.positional_variance(look)
    sentences = wanted.number_sentences(look.map.shape[0])
    if look.own and sentences is not None:
        found["receiver"] = detectors.receiver_kurtosis(look, sentences)
    add("entropy", lambda: detectors.entropy.queries(look))
    add("breadth", lambda: detectors.breadth.queries(look))
    add_scores(found, ((get_score_name(score), compute_user_score(look, score)) for score in wanted.scores))
    return found


def add_scores(found: dict[str, HeadScores], added: Iterable[tuple[str, QueryScores | Tensor]]) -> None:
    """Add the user's scores and classes, in place. Raises ConfigError for a name that another score has."""
    for name, score in added:
        if name in (*found, *VALUE_SCORES):
            raise ConfigError(f"there is already a score {name!r}: give the function or the class another name.")
        found[name] = score


def estimate_heads(
    look: MapView, wanted: HeadOptions, values: Tensor | None = None, projection: Tensor | None = None
) -> list[dict[str, Score]]:
    """Return the scores of each head of a map; with its values (b, g, k, e) that of the first token by norm, too."""
    found = compute_scores(look, wanted)
    if values is not None:
        weighted = weight_by_norm(look, values, projection)
        found |= dict(zip(VALUE_SCORES, (weighted.score_first(), weighted.first_value_ratio()), strict=True))
    own = {get_score_name(score) for score in wanted.scores}
    limits = [UNLIMITED if name in own or name in UNBOUNDED_SCORES else (0.0, 1.0) for name in found]
    heads = zip(*estimate_all_scores(list(found.values()), limits), strict=True)
    return [dict(zip(found, scores, strict=True)) for scores in heads]


def get_score_name(score: UserScore) -> str:
    """Return the name of a user's score: that of the function, with spaces."""
    return str(getattr(score, "__name__", "score")).replace("_", " ")


def define_user_scores(scores: Sequence[UserScore]) -> dict[str, str]:
    """Return the docstring of each of the user's scores by its name."""
    return {get_score_name(score): (score.__doc__ or "").strip() for score in scores}


def compute_user_score(look: MapView, score: UserScore) -> QueryScores | Tensor:
    """Return the result of a user's function. Raises ShapeError if it is neither (b, h) nor (b, h, q)."""
    found = score(look.map)
    shape = look.map.shape
    if isinstance(found, Tensor) and found.shape == shape[:3]:
        return look.score_queries(found)
    if not isinstance(found, Tensor) or found.shape != shape[:2]:
        raise ShapeError(
            f"the score {get_score_name(score)!r} must be a tensor (b, h) = {shape[:2]} or (b, h, q) = {shape[:3]}, got "
            f"{describe_value(found)}."
        )
    return found
