"""Check whether findings are only due to a subject's axes being in another order, or fewer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from regard.errors import ConfigError
from regard.examination.case import Case
from regard.examination.probe_runner import run_probes
from regard.examination.report import Report
from regard.examination.subject import inputs
from regard.examination.subject.adapters import SubjectAdapter, SubjectError
from regard.examination.subject.attention_output import AttentionOutput
from regard.examination.subject.call_conventions import AttentionFunction

HEADS_SECOND = "examine(lambda q, k, v: {}(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))"
HEADLESS = "It is correct on tensors (b, t, d). If they are intended: examine({}, sample=(q, k, v)) with three axes each."
COUNTED = ("wrong axis", "wrong scale")  # the findings that an axis counted from the front leads to
TOKENS_FIRST = "If it is intended to take (t, b, c): examine(lambda x: layer(x.transpose(0, 1)).transpose(0, 1))."


def explain_axis_order(case: Case, report: Report, ways: Sequence[SubjectAdapter] | None) -> Report:
    """Return the report, with a cure that says so if a finding is only due to the order of axes or their number.

    Raises ConfigError for a function that is right for (b, t, h, d), since only the caller can say which order is meant. `ways`
    are the ways that may be tried, or None if a sample fixes the number of axes.
    """
    subject = case.subject
    name = "f" if "<" in subject.name else subject.name
    if subject.form == "qkv" and subject.rank == 4 and subject.has_key_heads and report.findings:
        finding = report.findings[0]
        if is_right(exchange_axes(case, 1)):
            raise ConfigError(
                f"{subject.name} is correct on tensors (b, t, h, d), but not on (b, h, t, d): {finding.kind}: "
                f"{finding.evidence}. If (b, t, h, d) is intended: {HEADS_SECOND.format(name)}; if not, fix it."
            )
        if finding.kind in COUNTED and any(is_right(one) for one in make_headless_cases(case, ways or ())):
            return extend_cures(report, finding.kind, HEADLESS.format(name))
    if (
        any(one.kind == "batch leak" for one in report.findings)
        and subject.form == "x"
        and has_expected_dependency(exchange_axes(case, 0))
    ):
        return extend_cures(report, "batch leak", TOKENS_FIRST)
    return report


def is_right(case: Case) -> bool:
    """Return whether a subject has no findings, and who sees whom is as expected."""
    return has_expected_dependency(case) and not run_probes(case).findings


def extend_cures(report: Report, kind: str, more: str) -> Report:
    """Return a report in which the cure of each finding of a kind ends with `more`."""
    found = (replace(one, cure=f"{one.cure} {more}") if one.kind == kind else one for one in report.findings)
    return replace(report, findings=tuple(found))


def make_headless_cases(case: Case, ways: Sequence[SubjectAdapter]) -> Iterator[Case]:
    """Yield the cases of a function of q, k and v with three axes, if it takes them."""
    shapes = replace(case.shapes, heads=1, groups=1)
    for way in ways:
        given = shapes.make(None, shapes.batch, 0, 1.0, way.dtype, way.device)
        if way.rank == 3 and inputs.describe_refusal(way, given) is None:
            yield case.make_subcase(way, shapes)


def exchange_axes(case: Case, axis: int) -> Case:
    """Return the case of a subject with `axis` and the next axis exchanged in all its inputs and its context."""

    def wrap_call(call: AttentionFunction) -> AttentionFunction:
        def call_exchanged(*given: Tensor) -> AttentionOutput:
            return AttentionOutput(call(*(x.transpose(axis, axis + 1) for x in given)).context.transpose(axis, axis + 1))

        return call_exchanged

    again = case.subject.again
    subject = replace(
        case.subject,
        call=wrap_call(case.subject.call),
        again=None if again is None else lambda module: wrap_call(again(module)),
        compiled=None,
    )
    return case.make_subcase(subject, case.shapes)


def has_expected_dependency(case: Case) -> bool:
    """Return whether the sequences of a batch are independent, and tokens see each other as expected."""
    try:
        reach = case.measured_dependency
        expected = case.get_expected_visibility(*case.make_usual_inputs())
    except (SubjectError, RuntimeError, IndexError):
        return False
    return not bool((reach.across_sequences > reach.threshold).any()) and bool((reach.visible == expected).all())
