"""Check that scores are multiplied by 1 / √d of one head, or by the stated scale."""

from collections.abc import Iterator

from regard.examination import evidence
from regard.examination.case import Case
from regard.examination.identify import formula, reading
from regard.examination.identify.match import Match
from regard.examination.identify.mistakes import mistake
from regard.examination.report import Checked, Finding, Unknown

OFF = 0.02  # of the expected scale
WHAT = "the scale of the scores"


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check the scale by the identified formula, or else by how weights that can be read follow q kᵀ."""
    match = case.identified
    if match is not None:
        yield from of_match(match)
        return
    slope = reading.slope(case)
    heads_width = width(case)
    found = 0.0 if slope is None else max(slope.along, slope.across)  # across if queries and keys are exchanged
    if slope is None or heads_width is None or min(abs(slope.along), abs(slope.across)) > OFF * found or found <= 0:
        yield Unknown(WHAT, evidence.ALONE)
        return
    expected = heads_width**-0.5 if case.scale is None else case.scale
    if abs(found / expected - 1) < OFF:
        yield Checked(WHAT, f"log weights follow the scores times {found:.4g}, where {expected:.4g} is expected")
    else:
        yield off(found, expected, heads_width, case.scale is not None)


def of_match(match: Match) -> Iterator[Finding | Checked | Unknown]:
    """Yield results about the scale from the identified formula."""
    wrong = mistake(match, "scale")
    if wrong is not None:
        yield Finding(wrong.kind, formula.evidence(match, "scale"), wrong.cure, 2.1, "scale")
    elif match.clears("scale"):
        yield Checked(WHAT, formula.equals(match))
    elif not match.deviates("norm"):
        yield Unknown(f"{WHAT}: every scale gives these outputs", "a layer whose weights are not zero, or more tokens")


def width(case: Case) -> int | None:
    """Return the width of one head of a function, or of a module whose weights show how many heads it has."""
    if case.subject.form == "qkv":
        return case.shapes.width
    return reading.width(case)


def off(found: float, expected: float, d: int, stated: bool) -> Finding:
    """Return the finding of a wrong scale that was measured from weights."""
    meant = "the stated" if stated else f"1 / √{d} ="
    told = f"log weights follow the scores times {found:.4g}, where {meant} {expected:.4g} is expected"
    line = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k of one head"
    cure = f"Multiply the scores by {expected:.4g}: {line}. Where {found:.4g} is meant, pass scale={found:.4g}."
    return Finding("wrong scale", told, cure, 1.5, "scale")
