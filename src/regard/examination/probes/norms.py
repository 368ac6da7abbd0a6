"""Check over what queries and keys are normalized, and the softcap and the sinks of recorded calls."""

from collections.abc import Iterator

from regard.examination import norm_reading, terms
from regard.examination.case import Case
from regard.examination.report import Checked, Finding


def check_case(case: Case) -> Iterator[Finding | Checked]:
    """Check the norms, the softcap and the sinks of the calls that a layer makes."""
    for check in (norm_reading.check_norms, terms.check_terms):
        result = check(case.inner_calls)
        if result is not None:
            yield result
