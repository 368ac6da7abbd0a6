"""The probes, one property in each file: check_case(case) yields what it found, checked or cannot determine."""

from collections.abc import Callable, Iterator

from regard.examination.case import Case
from regard.examination.probes import (
    batch,
    blind,
    cache,
    dropout,
    future,
    gradient,
    heads,
    inference,
    lengths,
    long_calls,
    order,
    overflow,
    padding,
    pattern,
    precision,
    raises,
    roles,
    routed,
    scale,
    weights,
)
from regard.examination.report import Checked, Finding, Unknown

Probe = Callable[[Case], Iterator[Finding | Checked | Unknown]]

ORDER = (
    *(raises, blind, future, routed, padding, pattern, inference, batch, lengths, order, cache),
    *(weights, scale, heads, roles, long_calls),
    *(dropout, overflow, precision, gradient),
)
PROBES: tuple[tuple[str, Probe], ...] = tuple((module.__name__.rpartition(".")[2], module.check_case) for module in ORDER)
