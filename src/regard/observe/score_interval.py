"""Scores with intervals: the mean of a score over queries, and between which limits it is known."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE = 0.95
SEGMENTS = 8  # of one document
MOST_FREEDOM = 1000  # degrees of freedom; above, Student's t is the normal distribution to 0.2 %


class Score(float):
    """A mean, with the limits `low` and `high` of its 95 % interval and `count`, the number of queries it is a mean of.

    `chance` is what the mean would be if these queries attended equally to all keys that they may see. The limits and chance
    are NaN where they are not known: see `estimate_scores`.
    """

    low: float
    high: float
    count: int
    chance: float

    def __new__(
        cls, mean: float, low: float = math.nan, high: float = math.nan, count: int = 0, chance: float = math.nan
    ) -> "Score":
        score = super().__new__(cls, mean)
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

    def mean(self) -> Tensor:
        """Return the mean over the queries that count, (b, h); NaN where there are none."""
        return self.values.where(self.among, 0).sum(-1, dtype=torch.float64) / self.among.sum(-1)


def estimate_scores(found: QueryScores | Tensor, limits: tuple[float, float] = (-math.inf, math.inf)) -> list[Score]:
    """Return a Score for each head: the mean over documents (batch rows) of the mean over the queries that count.

    Of several documents the interval is Student's, over the means of the documents: between which limits the mean over more
    documents of this kind lies. Of a single document it is Student's over the means of eight consecutive segments with equally
    many queries each (method of batch means): how sure the mean is for this text, not for others. Of fewer than two queries
    there is none, nor of a single number (b, h) that is no mean of queries. `limits` are those that a score cannot exceed.
    """
    if isinstance(found, Tensor):
        means, counts = found.double(), torch.zeros(found.shape, dtype=torch.int64)
    else:
        means, counts = found.mean(), found.among.sum(-1)
    chance = None if isinstance(found, Tensor) or found.chance is None else found.chance.nanmean(0).tolist()
    numbers = (~means.isnan()).sum(0)
    middles = means.nansum(0) / numbers
    variances = (means - middles).square().nansum(0) / (numbers - 1)
    scores = []
    for head, (number, middle, variance) in enumerate(zip(numbers.tolist(), middles.tolist(), variances.tolist(), strict=True)):
        count, by_chance = int(counts[:, head].sum()), math.nan if chance is None else chance[head]
        if number > 1:
            scores.append(make_score(middle, variance, number, count, limits, by_chance))
        else:
            segments = [] if isinstance(found, Tensor) else average_segments(found, head)
            scores.append(estimate_score(means[:, head].tolist(), segments, count, limits, by_chance))
    return scores


def estimate_score(
    documents: Sequence[float],
    segments: Sequence[float],
    count: int,
    limits: tuple[float, float] = (-math.inf, math.inf),
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


def estimate_from_sums(documents: int, total: float, squares: float, count: int, limits: tuple[float, float]) -> Score:
    """Return the Score of a head from the number of its documents, and the sums of their means and of the squares of these."""
    if not documents:
        return Score(math.nan)
    if documents == 1:
        return Score(total, count=count)
    variance = max(squares - total**2 / documents, 0.0) / (documents - 1)
    return make_score(total / documents, variance, documents, count, limits)


def make_score(
    mean: float, variance: float, number: int, count: int, limits: tuple[float, float], chance: float = math.nan
) -> Score:
    """Return the Score with Student's interval, of a sample of this variance and number."""
    half = compute_student_quantile(number - 1) * math.sqrt(variance / number)
    return Score(mean, max(mean - half, limits[0]), min(mean + half, limits[1]), count, chance)


def average_segments(found: QueryScores, head: int) -> list[float]:
    """Return the means of the segments of the first document in which a head has queries that count; at most eight."""
    rows = found.among[:, head].any(-1).nonzero().flatten()
    if len(rows) != 1:
        return []
    counted = found.values[rows[0], head][found.among[rows[0], head]].double()
    number = min(SEGMENTS, len(counted))
    return [float(part.mean()) for part in counted.tensor_split(number)] if number > 1 else []


@functools.cache
def compute_student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(-t < T < t) = confidence for Student's T with so many degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, solved by bisection.
    """
    freedom = min(freedom, MOST_FREEDOM)
    low, high = 0.0, math.pi / 2  # of the angle atan(t / √freedom)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_student_probability(middle, freedom) < confidence else (low, middle)
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
