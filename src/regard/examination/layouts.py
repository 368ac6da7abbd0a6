"""Check whether findings are only due to a subject's axes being in another order, or fewer."""

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
COUNTED = ("wrong axis", "wrong scale")  # the findings that an axis counted from the front leads to
TOKENS_FIRST = "If it is meant to take (t, b, c): examine(lambda x: layer(x.transpose(0, 1)).transpose(0, 1))."


def told(case: Case, report: Report, ways: Sequence[Subject] | None) -> Report:
    """Return the report, with a cure that says so if a finding is only due to the order of axes or their number.

    Raises ConfigError for a function that is right for (b, t, h, d), since only the caller can say which order is meant. `ways`
    are the ways that may be tried, or None if a sample fixes the number of axes.
    """
    subject = case.subject
    name = "f" if "<" in subject.name else subject.name
    if subject.form == "qkv" and subject.rank == 4 and report.findings:
        finding = report.findings[0]
        if right(turned(case, 1)):
            raise ConfigError(
                f"{subject.name} is right where it takes (b, t, h, d), and not where it takes (b, h, t, d): {finding.kind}: "
                f"{finding.evidence}. If the first is meant: {HEADS_SECOND.format(name)}; if not, fix it."
            )
        if finding.kind in COUNTED and any(right(one) for one in headless(case, ways or ())):
            return cured(report, finding.kind, HEADLESS.format(name))
    if any(one.kind == "batch leak" for one in report.findings) and subject.form == "x" and apart(turned(case, 0)):
        return cured(report, "batch leak", TOKENS_FIRST)
    return report


def right(case: Case) -> bool:
    """Return whether a subject has no findings, and who sees whom is as expected."""
    return apart(case) and report_on(case).ok


def cured(report: Report, kind: str, more: str) -> Report:
    """Return a report in which the cure of each finding of a kind ends with `more`."""
    found = (replace(one, cure=f"{one.cure} {more}") if one.kind == kind else one for one in report.findings)
    return replace(report, findings=tuple(found))


def headless(case: Case, ways: Sequence[Subject]) -> Iterator[Case]:
    """Yield the cases of a function of q, k and v with three axes, if it takes them."""
    shapes = replace(case.shapes, heads=1, groups=1)
    for way in ways:
        given = shapes.make(None, shapes.batch, 0, 1.0, way.dtype, way.device)
        if way.rank == 3 and inputs.refusal(way, given) is None:
            yield case.within(way, shapes)


def turned(case: Case, axis: int) -> Case:
    """Return the case of a subject with `axis` and the next axis exchanged in all its inputs and its context."""

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
    """Return whether the sequences of a batch are independent, and tokens see each other as expected."""
    try:
        reach = case.reach
        expected = case.expected(*case.usual())
    except (AskedError, RuntimeError, IndexError):
        return False
    return not bool((reach.across > reach.threshold).any()) and bool((reach.found == expected).all())
