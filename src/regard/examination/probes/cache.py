"""Check that decoding token by token gives what the full forward gives, if the subject takes a cache."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard.examination import evidence
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.examination.subject.attention_output import extract_output
from regard.examination.whole_models import cached_decoding
from regard.mechanism import Causal


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check decoding with a cache; yields nothing if a query sees what it may not, since a cache could not show that."""
    module, subject = case.subject.module, case.subject
    if module is None or subject.again is None or subject.rank != 3 or not case.can_resize or case.expects != Causal():
        return
    if (case.measured_dependency.visible & ~case.get_expected_visibility(*case.make_usual_inputs())).any():
        return
    (x,) = case.make_usual_inputs()
    yield from cached_decoding.check_cache(
        module, x, extract_context, case.usual_context, lambda i: evidence.format_token(case, i)
    )


def extract_context(returned: Any, part: Tensor) -> Tensor:
    """Return the context of a module's output."""
    return extract_output(returned, part.shape[1], part.shape[:2]).context
