"""The verdict: all probes of a case, their findings in order, at most three for one cause."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from regard.examination import evidence
from regard.examination.case import Case
from regard.examination.probes import PROBES
from regard.examination.report import Checked, Finding, Report, Sight, Unknown

EACH = 3  # findings of one cause
NAMED = 2.0  # the strength of what identification names
MIXING = ("split", "merge", "share", "axis", "norm")  # what lets tokens through that the mask hides
FOLLOWING = ("future leak", "wrong mask", "inverted mask", "padding leak", "batch leak")


def report_on(case: Case) -> Report:
    """What every probe says of a case."""
    said = [one for _, look in PROBES for one in look(case)]
    findings = follow(ordered(one for one in said if isinstance(one, Finding)), case)
    checked = tuple(one for one in said if isinstance(one, Checked))
    unknown = tuple(dict.fromkeys(one for one in said if isinstance(one, Unknown)))
    return Report(case.subject.name, str(case.expects), findings, checked, unknown, notes(case), sight(case))


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The strongest first, one of a kind for each cause and at most three of a cause."""
    kept: list[Finding] = []
    counts: Counter[str] = Counter()
    for one in sorted(findings, key=lambda one: -one.strength):
        cause = one.cause or one.kind
        if counts[cause] < EACH and not any((one.kind, cause) == (other.kind, other.cause or other.kind) for other in kept):
            kept.append(one)
            counts[cause] += 1
    return tuple(kept)


def follow(findings: tuple[Finding, ...], case: Case) -> tuple[Finding, ...]:
    """The findings, where who sees whom is wrong only because of what stands first: such a mask needs no mending."""
    match = case.identified if findings else None
    if match is None or match.deviates("mask") or not any(match.deviates(field) for field in MIXING):
        return findings
    first, *rest = findings
    cure = f"It follows from the {first.kind}: mend that, and look again."
    return (first, *(replace(one, cure=cure) if one.kind in FOLLOWING and one.strength < NAMED else one for one in rest))


def notes(case: Case) -> tuple[str, ...]:
    """How the subject was called."""
    shapes, dtype = case.shapes, str(case.subject.dtype).removeprefix("torch.")
    if case.subject.form == "x":
        size = f"x ({shapes.batch}, {shapes.tokens}, {shapes.width}) {dtype}"
    else:
        size = f"q of {shapes.heads} heads, k and v of {shapes.groups}, {shapes.tokens} tokens, width {shapes.width}, {dtype}"
    return tuple(note for note in (case.subject.note, size) if note)


def sight(case: Case) -> Sight | None:
    """Who sees whom, expected and found: of the first sequence, or of the first in which they differ."""
    expected, found = case.expected(*case.usual()), case.reach.found
    wrong = ((expected != found) & case.reach.measured.unsqueeze(-1)).any(-1).any(-1)
    b = int(wrong.int().argmax())
    return Sight(expected[b], found[b], case.reach.within[b], evidence.words(case))
