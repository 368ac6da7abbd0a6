"""Compare the numbers that the lectures print with those that regard computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.lectures import printed_numbers
from regard.lectures.comparison import Claim, Example, FieldComparison, Verdict
from regard.lectures.recompute import RECOMPUTED, isolate_random_state


@dataclass(frozen=True, eq=False)
class VerifiedClaim:
    """A claim of an example: the fields compared, and the difference of the printed and the computed numbers."""

    example: str
    source: str
    mechanism: str
    comparisons: tuple[FieldComparison, ...]
    tolerance: float
    verdict: Verdict
    note: str

    @property
    def difference(self) -> float:
        """The largest difference of two numbers; NaN if a number is NaN."""
        return find_largest_difference(self.comparisons)

    @property
    def numbers(self) -> int:
        """The count of numbers compared."""
        return sum(comparison.printed.numel() for comparison in self.comparisons)


def verify(example: str | None = None) -> list[VerifiedClaim]:
    """Recompute every number of the lectures, or of one example.

    The global random state is restored. Raises ConfigError if there is no such example.
    """
    chosen = (
        [printed_numbers.get_printed_example(example)]
        if example is not None
        else printed_numbers.load_printed_numbers()["examples"]
    )
    with isolate_random_state():
        return [verify_claim(one, claim) for one in chosen for claim in RECOMPUTED[one["id"]](one)]


def verify_claim(example: Example, claim: Claim) -> VerifiedClaim:
    """Judge a claim of an example."""
    tolerance = (
        claim.tolerance
        if claim.tolerance is not None
        else example.get("tolerance", printed_numbers.load_printed_numbers()["tolerance"])
    )
    verdict = judge_claim(claim, tolerance)
    note = (
        describe_differences(claim.comparisons, tolerance)
        if verdict == Verdict.DIFFERS
        else claim.note
        if verdict == claim.known
        else ""
    )
    about = (example["id"], example["source"], example["mechanism"])
    return VerifiedClaim(*about, tuple(claim.comparisons), tolerance, verdict, note)


def judge_claim(claim: Claim, tolerance: float) -> Verdict:
    """Return the verdict on a claim."""
    difference = find_largest_difference(claim.comparisons)
    if difference <= tolerance:
        return Verdict.WRONG if claim.known == Verdict.WRONG else Verdict.AGREES
    return Verdict.MISPRINT if claim.known == Verdict.MISPRINT and math.isfinite(difference) else Verdict.DIFFERS


def describe_differences(comparisons: Sequence[FieldComparison], tolerance: float) -> str:
    """List the fields that differ, and by how much."""
    fields = [f"{one.field} by {one.difference:.2g}" for one in comparisons if not one.difference <= tolerance]
    return f"differing: {', '.join(fields)}"


def find_largest_difference(comparisons: Sequence[FieldComparison]) -> float:
    """Return the largest difference, or NaN if a difference is NaN."""
    differences = [comparison.difference for comparison in comparisons]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
