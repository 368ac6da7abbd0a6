"""Detect the state that a module keeps from call to call, and reset it so that all calls are alike."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.examination import reach
from regard.examination.answers import Answer
from regard.examination.calls import Call
from regard.examination.inputs import Shapes
from regard.examination.kept import keep
from regard.examination.report import Checked, Finding, Report
from regard.examination.subjects import Subject
from regard.examination.untouched import seeded

Said = list[Finding | Checked]
CLOSE = 1e3  # times rounding: calls of parts sum in another order
FORGET = "Keep nothing in the module that changes what its next call gives; or reset it for each sequence."
PARTS = "two calls of parts of a sequence give what one of all does; it began anew for all else"
CACHE = "what it keeps from call to call is a cache"


def settled(subject: Subject, shapes: Shapes) -> tuple[Subject, Said]:
    """Return a subject that is reset before each call if it keeps state, and the results about that state."""
    inputs = shapes.make(None, shapes.batch, 0, 1.0, subject.dtype, subject.device)
    kept = None if subject.module is None else keep(subject.module)
    try:
        first = asked(subject, inputs)
        again = asked(subject, inputs)
        names = [] if kept is None else kept.changed()
        if kept is None or apart(first, again) == 0 or not names:
            return subject, []
        kept.put_back()
        if apart(first, asked(subject, inputs)) > 0:
            return subject, []
        kept.put_back()
        told = f"it keeps state from call to call ({', '.join(names[:3])})"
        said: Said = [remembered(subject, inputs, first, again, told)]
    except Exception:  # the probes report what it raises
        return subject, []
    finally:
        if kept is not None:
            kept.put_back()
    return forgetful(subject, subject.module), said


def asked(subject: Subject, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the context of a call with fixed random numbers."""
    seeded(1, subject.device)
    with torch.no_grad():
        return subject.call(*inputs).context


def apart(one: Tensor, other: Tensor, times: float = 1.0) -> float:
    """Return how far two contexts differ beyond rounding; infinite if their shapes differ."""
    if one.shape != other.shape:
        return torch.inf
    change = float((one - other).abs().nan_to_num().max())
    return change if change > times * reach.rounding(one.dtype) * float(one.abs().nan_to_num().max()) else 0.0


def remembered(subject: Subject, inputs: tuple[Tensor, ...], whole: Tensor, second: Tensor, told: str) -> Finding | Checked:
    """Check whether state is a cache: the parts of a sequence, one after the other, then give what the whole sequence gives."""
    n = inputs[0].shape[-2] // 2
    if subject.form == "x" and n:
        try:
            parts = [asked(subject, (x,)) for x in (inputs[0][:, :n], inputs[0][:, n:])]
        except Exception:  # a cache would take the rest of a sequence
            parts = [whole]
        if apart(whole, torch.cat(parts, 1), CLOSE) == 0:
            return Checked(CACHE, f"{told}: {PARTS}")
    told += f": the same input gives outputs {apart(whole, second):.2g} apart, and a sequence in parts not what it gives whole"
    return Finding("wrong cache", told, FORGET, 3.0, "state")


def forgetful(subject: Subject, module: nn.Module | None) -> Subject:
    """Return a subject that is reset to its present state before each call; so is each copy of its module."""
    assert module is not None

    def of(part: nn.Module) -> Callable[[Call], Call]:
        kept = keep(part)

        def wrap(call: Call) -> Call:
            def fresh(*inputs: Tensor) -> Answer:
                kept.put_back()
                try:
                    return call(*inputs)
                finally:
                    kept.put_back(numbers=not torch.is_grad_enabled())  # a backward pass may need them

            return fresh

        return wrap

    again = subject.again
    made = wrapped(subject, of(module))
    return made if again is None else replace(made, again=lambda copy: of(copy)(again(copy)))


def wrapped(subject: Subject, wrap: Callable[[Call], Call]) -> Subject:
    """Return a subject with each of its calls wrapped."""
    again, compiled = subject.again, subject.compiled
    return replace(
        subject,
        call=wrap(subject.call),
        again=None if again is None else lambda module: wrap(again(module)),
        compiled=None if compiled is None else wrap(compiled),
    )


def added(report: Report, said: Said) -> Report:
    """Return a report with the results about state first."""
    findings = tuple(one for one in said if isinstance(one, Finding))
    checked = tuple(one for one in said if isinstance(one, Checked))
    return replace(report, findings=findings + report.findings, checked=report.checked + checked)
