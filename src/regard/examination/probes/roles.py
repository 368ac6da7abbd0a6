"""Check that query, key and value are used in their roles, and that each is used."""

from collections.abc import Iterator

import torch

from regard.examination import evidence
from regard.examination.call_checks import role_checks
from regard.examination.call_reading import projection_source
from regard.examination.case import Case
from regard.examination.identify import mistakes, weight_reading
from regard.examination.identify.match import Match
from regard.examination.identify.mistakes import ROLE
from regard.examination.report import Checked, Finding, Unknown

WHAT = "query, key and value are used in their roles"
NEEDS = "projections with known names: W_query, W_key, W_value"
NAMES = ("query", "key", "value")
ONE = "whether the keys are intended as the values: one projection makes both"


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check the roles by the identified formula, or else what a function's output and its weights depend on."""
    match = case.match
    if case.subject.module is not None:
        yield from role_checks.iterate_shared_weights(case.subject.module)
    if match is not None:
        yield from check_match(match)
    elif case.subject.form == "x":
        result = role_checks.check_roles(case.inner_calls)
        yield result if result is not None else Unknown(f"whether {WHAT}", evidence.ALONE)
    else:
        try:
            yield from check_function(weight_reading.get_double_case(case))
        except Exception:  # whatever a user's function raises: another probe reports it
            return


def check_match(match: Match) -> Iterator[Finding | Checked | Unknown]:
    """Yield results about roles from the identified formula."""
    fields = ("roles", "output")
    yield from mistakes.list_mistakes(match, fields, 2.0)
    if any(match.has_deviation(field) for field in fields) or has_shared_projection(match):
        return
    if not match.layout.has_known_roles:
        yield Unknown("which projection is the query's and which the key's", NEEDS)
    elif match.layout.k is not None and match.layout.v is match.layout.k:
        yield Unknown(ONE, NEEDS)
    elif match.is_verified("roles"):
        yield Checked(WHAT, mistakes.describe_equality(match))
    else:
        yield Unknown(f"whether {WHAT}: exchanged they give the same outputs", "a layer whose projections differ")


def has_shared_projection(match: Match) -> bool:
    """Return whether q and k are the same by design, so that nothing can be exchanged."""
    layout = match.layout
    return layout.whole is None and layout.q is layout.k and match.layout.says != "q, k and v as given"


def check_function(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check which of q, k and v the output of a function depends on, and whether its weights follow q kᵀ or k qᵀ."""
    idle = [name for place, name in enumerate(NAMES) if not has_effect(case, place)]
    if idle:
        yield Finding("wrong roles", f"the output does not change with the {' and the '.join(idle)}", ROLE, 1.5, "roles")
        return
    slope = weight_reading.measure_slope(case)
    if slope is None and (n := weight_reading.find_value_shift(case)):
        yield projection_source.report_shift("the function", "values", n)
    elif slope is None:
        yield Unknown("whether query and key are exchanged", "the function without its changes to q and k before the scores")
    elif abs(slope.across) > abs(slope.along):
        evidence = f"log weights follow k qᵀ (times {slope.across:.3g}), not q kᵀ (times {slope.along:.1g})"
        yield Finding("wrong roles", f"{evidence}: queries and keys are exchanged", ROLE, 1.5, "roles")
    else:
        yield Checked(WHAT, f"log weights follow q kᵀ times {slope.along:.3g}, and k qᵀ times {slope.across:.0e}")


def has_effect(case: Case, place: int) -> bool:
    """Return whether the output moves if one of q, k and v is replaced."""
    inputs, other = list(case.make_usual_inputs(0)), case.make_usual_inputs(9)
    before = case.run_subject(*inputs).context
    inputs[place] = other[place]
    change = (case.run_subject(*inputs).context - before).nan_to_num()
    return bool(change.abs().max() > torch.finfo(before.dtype).eps * before.nan_to_num().abs().max())
