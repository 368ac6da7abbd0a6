"""Layouts: whether what is found is only that a subject has its axes in another order, or fewer of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from regard.errors import ConfigError
from regard.examination import inputs
from regard.examination.answers import Answer
from regard.examination.calls import Call
from regard.examination.case import Case
from regard.examination.report import Report
from regard.examination.subjects import AskedError, Subject
from regard.examination.verdict import report_on

HEADS_SECOND = "examine(lambda q, k, v: {}(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))"
HEADLESS = "It is right where it takes (b, t, d): if that is meant, examine({}, sample=(q, k, v)) of three axes each."
COUNTED = ("wrong axis", "wrong scale")  # what an axis counted from the front is found as
TOKENS_FIRST = "If it is meant to take (t, b, c): examine(lambda x: layer(x.transpose(0, 1)).transpose(0, 1))."


def told(case: Case, report: Report, ways: Sequence[Subject] | None) -> Report:
    """The report; where a finding is only the order of axes, or their number, with a cure that says so.

    Raises ConfigError of a function that is right where it takes (b, t, h, d): which is meant is for the caller to say. `ways`
    are those that may be tried, None where a sample says how many axes are meant.
    """
    subject = case.subject
    name = "f" if "<" in subject.name else subject.name
    if subject.form == "qkv" and subject.rank == 4 and report.findings:
        finding = report.findings[0]
        if right(turned(case, 1)):
            raise ConfigError(
                f"{subject.name} is right where it takes (b, t, h, d), and not where it takes (b, h, t, d): {finding.kind}: "
                f"{finding.evidence}. If the first is meant: {HEADS_SECOND.format(name)}; if not, it is to be mended."
            )
        if finding.kind in COUNTED and any(right(one) for one in headless(case, ways or ())):
            return cured(report, finding.kind, HEADLESS.format(name))
    if any(one.kind == "batch leak" for one in report.findings) and subject.form == "x" and apart(turned(case, 0)):
        return cured(report, "batch leak", TOKENS_FIRST)
    return report


def right(case: Case) -> bool:
    """Whether nothing is found of a subject, and who sees whom is as expected."""
    return apart(case) and report_on(case).ok


def cured(report: Report, kind: str, more: str) -> Report:
    """A report whose findings of a kind say one thing more of what to do."""
    found = (replace(one, cure=f"{one.cure} {more}") if one.kind == kind else one for one in report.findings)
    return replace(report, findings=tuple(found))


def headless(case: Case, ways: Sequence[Subject]) -> Iterator[Case]:
    """A function of q, k and v with three axes, where it takes them."""
    shapes = replace(case.shapes, heads=1, groups=1)
    for way in ways:
        given = shapes.make(None, shapes.batch, 0, 1.0, way.dtype, way.device)
        if way.rank == 3 and inputs.refusal(way, given) is None:
            yield case.within(way, shapes)


def turned(case: Case, axis: int) -> Case:
    """A subject with two axes exchanged, this one and the next, in all that it is given and in its context."""

    def other(call: Call) -> Call:
        def made(*given: Tensor) -> Answer:
            return Answer(call(*(x.transpose(axis, axis + 1) for x in given)).context.transpose(axis, axis + 1))

        return made

    again = case.subject.again
    subject = replace(
        case.subject,
        call=other(case.subject.call),
        again=None if again is None else lambda module: other(again(module)),
        compiled=None,
    )
    return case.within(subject, case.shapes)


def apart(case: Case) -> bool:
    """Whether sequences of a batch do not meet, and tokens as expected do."""
    try:
        reach = case.reach
        expected = case.expected(*case.usual())
    except (AskedError, RuntimeError, IndexError):
        return False
    return not bool((reach.across > reach.threshold).any()) and bool((reach.found == expected).all())
