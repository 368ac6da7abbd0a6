"""Check that decoding token by token gives what the full forward gives, if the subject takes a cache."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard.examination import caches, evidence
from regard.examination.answers import answered
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.mechanism import Causal


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check decoding with a cache; yields nothing if a query sees what it may not, since a cache could not show that."""
    module, subject = case.subject.module, case.subject
    if module is None or subject.again is None or subject.rank != 3 or not case.free or case.expects != Causal():
        return
    if (case.reach.found & ~case.expected(*case.usual())).any():
        return
    (x,) = case.usual()
    yield from caches.compared(module, x, read, case.ask(x).context, lambda i: evidence.token(case, i))


def read(returned: Any, part: Tensor) -> Tensor:
    """Return the context of a module's output."""
    return answered(returned, part.shape[1], part.shape[:2]).context
