"""Cache: decoding token by token gives what the full forward gives, where the subject takes a cache."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard.examination import caches, evidence
from regard.examination.answers import answered
from regard.examination.case import Case
from regard.examination.report import Checked, Finding, Unknown
from regard.mechanism import Causal


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """What decoding differs by; nothing where a query sees what it may not, which a cache could not show."""
    module, subject = case.subject.module, case.subject
    if module is None or subject.again is None or subject.rank != 3 or not case.free or case.expects != Causal():
        return
    if (case.reach.found & ~case.expected(*case.usual())).any():
        return
    (x,) = case.usual()
    yield from caches.compared(module, x, read, case.ask(x).context, lambda i: evidence.token(case, i))


def read(returned: Any, part: Tensor) -> Tensor:
    """The context."""
    return answered(returned, part.shape[1], part.shape[:2]).context
