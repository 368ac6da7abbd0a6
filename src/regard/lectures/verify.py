"""Whether the numbers that the lectures print are those that regard computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.lectures import figures
from regard.lectures.comparison import Claim, Comparison, Example, Verdict
from regard.lectures.recompute import RECOMPUTED, apart


@dataclass(frozen=True, eq=False)
class Row:
    """An example in one respect: the fields compared, and how far the printed numbers are from the computed ones."""

    example: str
    source: str
    mechanism: str
    comparisons: tuple[Comparison, ...]
    tolerance: float
    verdict: Verdict
    note: str

    @property
    def difference(self) -> float:
        """The largest difference of a number; NaN where one is NaN."""
        return largest(self.comparisons)

    @property
    def numbers(self) -> int:
        """How many numbers were compared."""
        return sum(comparison.printed.numel() for comparison in self.comparisons)


def verify(example: str | None = None) -> list[Row]:
    """Every number of the lectures computed again; of one example where it is named.

    The global random state is left as it was. Raises ConfigError where there is no such example.
    """
    chosen = [figures.figure(example)] if example is not None else figures.figures()["examples"]
    with apart():
        return [row(one, claim) for one in chosen for claim in RECOMPUTED[one["id"]](one)]


def row(example: Example, claim: Claim) -> Row:
    """A claim with its verdict."""
    tolerance = claim.tolerance if claim.tolerance is not None else example.get("tolerance", figures.figures()["tolerance"])
    verdict = judge(claim, tolerance)
    note = off(claim.comparisons, tolerance) if verdict == Verdict.DIFFERS else claim.note if verdict == claim.known else ""
    about = (example["id"], example["source"], example["mechanism"])
    return Row(*about, tuple(claim.comparisons), tolerance, verdict, note)


def judge(claim: Claim, tolerance: float) -> Verdict:
    """The verdict on a claim."""
    difference = largest(claim.comparisons)
    if difference <= tolerance:
        return Verdict.WRONG if claim.known == Verdict.WRONG else Verdict.AGREES
    return Verdict.MISPRINT if claim.known == Verdict.MISPRINT and math.isfinite(difference) else Verdict.DIFFERS


def off(comparisons: Sequence[Comparison], tolerance: float) -> str:
    """The fields that differ, and by how much."""
    fields = [f"{one.field} by {one.difference:.2g}" for one in comparisons if not one.difference <= tolerance]
    return f"differing: {', '.join(fields)}"


def largest(comparisons: Sequence[Comparison]) -> float:
    """The largest difference, where NaN is larger than any number."""
    differences = [comparison.difference for comparison in comparisons]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
