"""Scores with intervals: the mean of a score over queries, and between which limits it is known."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CONFIDENCE = 0.95
SEGMENTS = 8  # of one document
Limits = tuple[float, float]
UNLIMITED: Limits = (-math.inf, math.inf)
NORMAL_QUANTILE = 1.959964  # 95 % of a normal distribution is within this many deviations
MOST_FREEDOM = 1000  # degrees of freedom; above, Student's t is the normal distribution to 0.2 %


class Score(float):
    """A mean, with the limits `low` and `high` of its 95 % interval and `count`, the number of queries it is a mean of.

    `chance` is what the mean would be if these queries attended equally to all keys that they may see. The limits and chance
    are NaN where they are not known: see `estimate_scores`.
    """

    __slots__ = ("chance", "count", "high", "low")  # a table has hundreds
    low: float
    high: float
    count: int
    chance: float

    def __new__(
        cls, mean: float, low: float = math.nan, high: float = math.nan, count: int = 0, chance: float = math.nan
    ) -> "Score":
        score = float.__new__(cls, mean)
        score.low, score.high, score.count, score.chance = low, high, count, chance
        return score

    def __reduce__(self) -> tuple[type["Score"], tuple[float, float, float, int, float]]:
        return Score, (float(self), self.low, self.high, self.count, self.chance)

    @property
    def low_above_chance(self) -> float:
        """The lower limit, corrected for chance: 0 at chance, 1 at 1; the limit itself where chance is not known.

        Source: (p - e) / (1 - e), Cohen 1960, with the share e that is expected by chance.
        """
        if math.isnan(self.chance):
            return self.low
        return (self.low - self.chance) / (1 - self.chance) if self.chance < 1 else -math.inf

    def to_dict(self) -> dict[str, float | int | None]:
        """Return mean, low, high, count and, where it is known, chance; None for what is not known."""
        numbers = {"mean": float(self), "low": self.low, "high": self.high}
        found = {**{name: x if math.isfinite(x) else None for name, x in numbers.items()}, "count": self.count}
        return found if math.isnan(self.chance) else {**found, "chance": self.chance}


@dataclass(frozen=True, eq=False)
class QueryScores:
    """A score of each query, `values`, and whether the query counts, `among`, both (b, h, q).

    `chance`, (b, h), is the mean of a head that attends equally to all keys that its queries may see, if it is known.
    """

    values: Tensor
    among: Tensor
    chance: Tensor | None = None

    @cached_property
    def counts(self) -> Tensor:
        """The number of queries that count, (b, h)."""
        return take_distinct(self.among).sum(-1).expand(self.among.shape[:2])

    def mean(self) -> Tensor:
        """Return the mean over the queries that count, (b, h); NaN where there are none."""
        values, among = take_distinct(self.values), take_distinct(self.among)
        counted = values if bool(among.all()) else values.where(among, 0)
        return counted.sum(-1, dtype=torch.float64) / self.counts

    @property
    def has_chance(self) -> bool:
        """Whether chance is known."""
        return self.chance is not None

    @property
    def averages(self) -> Tensor:
        """The mean, the number of queries, and chance or any number if it is not known, float64 (3, b, h)."""
        mean = self.mean()
        return torch.stack([mean, self.counts.double(), mean if self.chance is None else self.chance])


@dataclass(frozen=True, eq=False)
class DocumentMeans:
    """The `averages` of a score of each query, without these scores, which `score_queries` returns."""

    averages: Tensor  # float64 (3, b, h): the mean, NaN where no query counts, the number of queries, and chance if it is known
    has_chance: bool
    score_queries: Callable[[], QueryScores]

    def mean(self) -> Tensor:
        """Return the mean over the queries that count, (b, h); NaN where there are none."""
        return self.averages[0]

    @property
    def counts(self) -> Tensor:
        """The number of queries that count, (b, h)."""
        return self.averages[1]

    @property
    def chance(self) -> Tensor | None:
        """The mean of a head that attends equally to all keys that its queries may see, (b, h), if it is known."""
        return self.averages[2] if self.has_chance else None


HeadScores = QueryScores | DocumentMeans | Tensor  # the last (b, h), of each head, is no mean of queries


def take_distinct(table: Tensor) -> Tensor:
    """Return a table without the repeats of its first two axes: of length 1 where it was expanded."""
    for axis, step in enumerate(table.stride()[:2]):
        if step == 0:
            table = table.narrow(axis, 0, min(1, table.shape[axis]))
    return table


def apply_to_distinct(function: Callable[..., Tensor], *tables: Tensor) -> Tensor:
    """Return a function, entry by entry, of tables of the same shape, without computing the repeats of all of them."""
    return function(*map(take_distinct, tables)).expand(tables[0].shape)


def estimate_scores(found: HeadScores, limits: Limits = UNLIMITED) -> list[Score]:
    """Return a Score for each head: the mean over documents (batch rows) of the mean over the queries that count.

    Of several documents the interval is Student's, over the means of the documents: between which limits the mean over more
    documents of this kind lies. Of a single document it is Student's over the means of eight consecutive segments with equally
    many queries each (method of batch means): how sure the mean is for this text, not for others. Of fewer than two queries
    there is none, nor of a single number (b, h) that is no mean of queries. `limits` are those that a score cannot exceed.
    """
    return estimate_all_scores([found], [limits])[0]


def estimate_all_scores(scores: Sequence[HeadScores], limits: Sequence[Limits]) -> list[list[Score]]:
    """Return what `estimate_scores` returns, for each of several scores of the same heads."""
    averaged = [one.double().expand(3, -1, -1) if isinstance(one, Tensor) else one.averages for one in scores]
    table = torch.stack(averaged, 1)  # (3, scores, b, h)
    numbers, sums = (table == table).sum(2), table.nansum(2)  # of what is not NaN
    averages = sums / numbers
    squares = (table[0] - averages[0].unsqueeze(1)).square_().nansum(1)
    (documents, _, _), (means, _, chances) = numbers.tolist(), averages.tolist()
    counts = sums[1].tolist()
    for n, score in enumerate(scores):
        if isinstance(score, Tensor):  # no mean of queries
            counts[n] = [0] * len(counts[n])
        if isinstance(score, Tensor) or not score.has_chance:
            chances[n] = [math.nan] * len(counts[n])
    columns = documents, means, squares.tolist(), counts, chances
    found = []
    for n, (score, ends, *known) in enumerate(zip(scores, limits, *columns, strict=True)):
        if isinstance(score, DocumentMeans) and min(documents[n]) < 2:  # segments of a single document are compared
            score = score.score_queries()
        found.append(
            [
                make_score(mean, square / (number - 1), number, int(count), ends, chance)
                if number > 1
                else estimate_score(table[0, n, :, head].tolist(), average_segments(score, head), int(count), ends, chance)
                for head, (number, mean, square, count, chance) in enumerate(zip(*known, strict=True))
            ]
        )
    return found


def estimate_score(
    documents: Sequence[float],
    segments: Sequence[float],
    count: int,
    limits: Limits = UNLIMITED,
    chance: float = math.nan,
) -> Score:
    """Return the Score of a head from its means by document, NaN for a document that has none, and by segment if it is one."""
    known = [mean for mean in documents if not math.isnan(mean)]
    if not known:
        return Score(math.nan)
    mean = math.fsum(known) / len(known)
    sample = known if len(known) > 1 else segments
    if len(sample) < 2:
        return Score(mean, count=count, chance=chance)
    middle = math.fsum(sample) / len(sample)
    variance = math.fsum((x - middle) ** 2 for x in sample) / (len(sample) - 1)
    return make_score(mean, variance, len(sample), count, limits, chance)


def estimate_from_sums(
    documents: int, total: float, squares: float, count: int, limits: Limits, chance: float = math.nan
) -> Score:
    """Return the Score of a head from the number of its documents, and the sums of their means and of the squares of these."""
    if not documents:
        return Score(math.nan)
    if documents == 1:
        return Score(total, count=count, chance=chance)
    variance = max(squares - total**2 / documents, 0.0) / (documents - 1)
    return make_score(total / documents, variance, documents, count, limits, chance)


def make_score(mean: float, variance: float, number: int, count: int, limits: Limits, chance: float = math.nan) -> Score:
    """Return the Score with Student's interval, of a sample of this variance and number."""
    half = compute_student_quantile(number - 1) * math.sqrt(variance / number)
    return Score(mean, max(mean - half, limits[0]), min(mean + half, limits[1]), count, chance)


def average_segments(found: HeadScores, head: int) -> list[float]:
    """Return the means of the segments of the only document in which a head has queries that count; at most eight."""
    if not isinstance(found, QueryScores):
        return []
    rows = found.among[:, head].any(-1).nonzero().flatten()
    if len(rows) != 1:
        return []
    counted = found.values[rows[0], head][found.among[rows[0], head]].double()
    number = min(SEGMENTS, len(counted))
    return [float(part.mean()) for part in counted.tensor_split(number)] if number > 1 else []


@functools.cache
def compute_student_quantile(freedom: int) -> float:
    """Return t with P(-t < T < t) = CONFIDENCE for Student's T with so many degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, solved by bisection.
    """
    freedom = min(freedom, MOST_FREEDOM)
    low, high = 0.0, math.pi / 2  # of the angle atan(t / √freedom)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_student_probability(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def compute_student_probability(angle: float, freedom: int) -> float:
    """Return P(-t < T < t) for t = √freedom tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for n in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (n - 1) / n
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def estimate_share(hits: int, count: int) -> Score:
    """Return the Score of a share, where `hits` of `count` independent trials were right, with Wilson's interval.

    Student's interval would have no width where all were right, or none, however few they are.
    """
    return Score(hits / count, *wilson_interval(hits, count), count)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Compute the 95 % confidence interval of a share, where `hits` of `count` were right. Source: Wilson 1927."""
    square, share = NORMAL_QUANTILE**2 / count, hits / count
    middle, half = share + square / 2, NORMAL_QUANTILE * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max((middle - half) / (1 + square), 0.0), min((middle + half) / (1 + square), 1.0)
