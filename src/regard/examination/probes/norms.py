"""Check over what and when queries and keys are normalized, which tokens they are of, and the softcap and sinks of calls."""

from collections.abc import Iterator

from regard.examination.call_checks import all_checks
from regard.examination.call_reading import norm_reading, terms
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check the norms, the places of tokens, the softcap and the sinks of the calls that a layer makes."""
    checks = (norm_reading.check_norms, all_checks.check_norm_order, all_checks.check_token_places, terms.check_terms)
    for check in checks:
        result = check(case.inner_calls)
        if result is not None:
            yield result
