"""Check that scores are multiplied by 1 / √d of one head, or by the stated scale."""

from collections.abc import Iterator

from regard.examination import evidence
from regard.examination.call_checks import scale_checks
from regard.examination.case import Case
from regard.examination.identify import mistakes, weight_reading
from regard.examination.identify.match import Match
from regard.examination.report import Checked, Finding, Unknown

WHAT = scale_checks.SCALE


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check the scale by the identified formula, or else by how weights that can be read follow q kᵀ, or by recorded calls.

    Of recorded calls the scale of values is checked too.
    """
    match = case.match
    yield from report_training_scale(case)
    if match is not None:
        yield from check_match(match)
        return
    values = scale_checks.check_values(case.inner_calls)
    if values is not None:
        yield values
    by_values = weight_reading.is_unrecorded(case)
    slope = weight_reading.measure_slope(case, by_values)
    heads_width = find_head_width(case, by_values)
    found = 0.0 if slope is None else max(slope.along, slope.across)  # across if queries and keys are exchanged
    if (
        slope is None
        or heads_width is None
        or min(abs(slope.along), abs(slope.across)) > scale_checks.OFF * found
        or found <= 0
    ):
        result = scale_checks.check_scale(case.inner_calls, case.scale)
        factor = scale_checks.read_log_factor(case.inner_calls, case.long_calls) if case.scale is None else None
        if factor is not None:
            result = scale_checks.report_log_scale(factor, case.inner_calls, case.long_calls)
        yield result if result is not None else report_unknown_scale(case)
        return
    expected = heads_width**-0.5 if case.scale is None else case.scale
    if abs(found / expected - 1) < scale_checks.OFF:
        yield Checked(WHAT, f"log weights follow the scores times {found:.4g}, and {expected:.4g} is expected")
    elif by_values and not any(scale_checks.is_near(found, wrong) for wrong in scale_checks.list_wrong_scales(heads_width)):
        # other kernels of scores than exponentials have slopes that are near the scale, and not equal to it
        sentence = f"{WHAT}: log weights follow the scores times {found:.4g}, and {expected:.4g} is expected"
        yield Unknown(sentence, f"scale={found:.4g}, if it is intended", is_required=True)
    else:
        yield report_wrong_scale(found, expected, heads_width, case.scale is not None)


def report_unknown_scale(case: Case) -> Unknown:
    """Return that the scale is not known, with the reason and what to pass."""
    why, needs = evidence.explain_unread_calls(case) if case.subject.form == "x" else ("", evidence.ALONE)
    if weight_reading.is_unrecorded(case) and case.weights_by_values is not None:
        why, needs = "the logarithms of its weights do not follow q kᵀ, as in linear attention", evidence.NO_SOFTMAX
    return Unknown(f"{WHAT}: {why}" if why else WHAT, needs, is_required=True)


def report_training_scale(case: Case) -> Iterator[Finding]:
    """Yield the finding of a scale that differs between training and evaluation."""
    for one, other in zip(case.inner_calls, case.training_calls, strict=False):
        if one.scale is not None and other.scale is not None and not scale_checks.is_near(one.scale, other.scale):
            sentence = f"scores are multiplied by {one.scale:.4g} in evaluation, but by {other.scale:.4g} in training"
            cure = "Use one scale in both: no temperature that depends on self.training."
            yield Finding("wrong scale", sentence, cure, 2.05, "training scale")
            return


def check_match(match: Match) -> Iterator[Finding | Checked | Unknown]:
    """Yield results about the scale from the identified formula."""
    yield from mistakes.list_mistakes(match, ("scale",), 2.1)
    if match.is_verified("scale"):
        what = f"{WHAT}, 1 = 1 / √1 for heads of width 1" if match.width == match.expected_scale == 1 else WHAT
        yield Checked(what, mistakes.describe_equality(match))
    elif not match.has_deviation("norm") and not match.has_deviation("scale"):
        needs = "a layer whose weights are not zero, or more tokens"
        yield Unknown(f"{WHAT}: every scale gives the same outputs", needs, is_required=True)


def find_head_width(case: Case, by_values: bool) -> int | None:
    """Return the width of one head of a function, or of a module whose weights show how many heads it has."""
    if case.subject.form == "qkv":
        return case.shapes.width
    return weight_reading.find_head_width(case, by_values)


def report_wrong_scale(found: float, expected: float, d: int, stated: bool) -> Finding:
    """Return the finding of a wrong scale that was measured from weights."""
    meant = "the stated" if stated else f"1 / √{d} ="
    evidence = f"log weights follow the scores times {found:.4g}, but {meant} {expected:.4g} is expected"
    line = "scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1]), with k split into heads"
    cure = f"Multiply the scores by {expected:.4g}: {line}. If {found:.4g} is intended, pass scale={found:.4g}."
    return Finding("wrong scale", evidence, cure, 1.5, "scale")
