"""Detect the state that a module keeps from call to call, and reset it so that all calls are alike."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.examination import dependency
from regard.examination.adapters import SubjectAdapter
from regard.examination.attention_output import AttentionOutput
from regard.examination.call_conventions import Call
from regard.examination.inputs import InputShapes
from regard.examination.report import Checked, Finding, Report
from regard.examination.restore_state import seed_generators
from regard.examination.snapshot import take_snapshot

Said = list[Finding | Checked]
CLOSE = 1e3  # times rounding: calls of parts sum in another order
FORGET = "Keep no state in the module that changes the output of its next call, or reset it for each sequence."
PARTS = "two calls on parts of a sequence give the outputs of one call on all of it; it was reset before all other calls"
CACHE = "the state that it keeps from call to call is a cache"


def detect_state(subject: SubjectAdapter, shapes: InputShapes) -> tuple[SubjectAdapter, Said]:
    """Return a subject that is reset before each call if it keeps state, and the results about that state."""
    inputs = shapes.make(None, shapes.batch, 0, 1.0, subject.dtype, subject.device)
    snapshot = None if subject.module is None else take_snapshot(subject.module)
    try:
        first = compute_fixed_context(subject, inputs)
        again = compute_fixed_context(subject, inputs)
        names = [] if snapshot is None else snapshot.list_changes()
        if snapshot is None or measure_distance(first, again) == 0 or not names:
            return subject, []
        snapshot.restore()
        if measure_distance(first, compute_fixed_context(subject, inputs)) > 0:
            return subject, []
        snapshot.restore()
        evidence = f"it keeps state from call to call ({', '.join(names[:3])})"
        results: Said = [check_state_as_cache(subject, inputs, first, again, evidence)]
    except Exception:  # the probes report what it raises
        return subject, []
    finally:
        if snapshot is not None:
            snapshot.restore()
    return reset_before_calls(subject, subject.module), results


def compute_fixed_context(subject: SubjectAdapter, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the context of a call with fixed random numbers."""
    seed_generators(1, subject.device)
    with torch.no_grad():
        return subject.call(*inputs).context


def measure_distance(one: Tensor, other: Tensor, times: float = 1.0) -> float:
    """Return how far two contexts differ beyond rounding; infinite if their shapes differ."""
    if one.shape != other.shape:
        return torch.inf
    change = float((one - other).abs().nan_to_num().max())
    return change if change > times * dependency.estimate_rounding(one.dtype) * float(one.abs().nan_to_num().max()) else 0.0


def check_state_as_cache(
    subject: SubjectAdapter, inputs: tuple[Tensor, ...], output: Tensor, second: Tensor, sentence: str
) -> Finding | Checked:
    """Check whether state is a cache: the parts of a sequence, one after the other, then give what the whole sequence gives."""
    n = inputs[0].shape[-2] // 2
    if subject.form == "x" and n:
        try:
            parts = [compute_fixed_context(subject, (x,)) for x in (inputs[0][:, :n], inputs[0][:, n:])]
        except Exception:  # a cache would take the rest of a sequence
            parts = [output]
        if measure_distance(output, torch.cat(parts, 1), CLOSE) == 0:
            return Checked(CACHE, f"{sentence}: {PARTS}")
    sentence += (
        f": two calls with the same input differ by {measure_distance(output, second):.2g}, and a sequence in parts does not "
        "give the outputs of the whole"
    )
    return Finding("wrong cache", sentence, FORGET, 3.0, "state")


def reset_before_calls(subject: SubjectAdapter, module: nn.Module | None) -> SubjectAdapter:
    """Return a subject that is reset to its present state before each call; so is each copy of its module."""
    assert module is not None

    def make_wrapper(part: nn.Module) -> Callable[[Call], Call]:
        snapshot = take_snapshot(part)

        def wrap_call(call: Call) -> Call:
            def call_reset(*inputs: Tensor) -> AttentionOutput:
                snapshot.restore()
                try:
                    return call(*inputs)
                finally:
                    snapshot.restore(numbers=not torch.is_grad_enabled())  # a backward pass may need them

            return call_reset

        return wrap_call

    again = subject.again
    wrapped = wrap_calls(subject, make_wrapper(module))
    return wrapped if again is None else replace(wrapped, again=lambda copy: make_wrapper(copy)(again(copy)))


def wrap_calls(subject: SubjectAdapter, wrap: Callable[[Call], Call]) -> SubjectAdapter:
    """Return a subject with each of its calls wrapped."""
    again, compiled = subject.again, subject.compiled
    return replace(
        subject,
        call=wrap(subject.call),
        again=None if again is None else lambda module: wrap(again(module)),
        compiled=None if compiled is None else wrap(compiled),
    )


def prepend_results(report: Report, results: Said) -> Report:
    """Return a report with the results about state first."""
    findings = tuple(one for one in results if isinstance(one, Finding))
    checked = tuple(one for one in results if isinstance(one, Checked))
    return replace(report, findings=findings + report.findings, checked=report.checked + checked)
