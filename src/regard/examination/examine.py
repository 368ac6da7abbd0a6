"""Check whether attention is right, by what a subject computes and never by its code."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from regard.errors import ConfigError
from regard.examination import axis_order, inputs, interruption, stateful_calls, whole_model
from regard.examination.adapters import SubjectAdapter, get_subject_name, get_uncompiled, iterate_adapters
from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.inplace_writes import watch_writes
from regard.examination.probe_runner import run_probes
from regard.examination.probes.raises import report_refusal
from regard.examination.progress import Progress
from regard.examination.report import Report
from regard.examination.restore_state import preserve_state
from regard.examination.time_limit import UNLIMITED, TimeLimit, TimeLimitError
from regard.mechanism import Causal, Mask
from regard.mechanism.arguments import check_floating, check_number, check_sequence
from regard.mechanism.mask_algebra import check_mask
from regard.mechanism.request import check_integer_offset

CAUSAL = Causal()
Sample = Tensor | Sequence[Tensor]


def examine(
    subject: nn.Module | Callable[..., Any],
    *,
    expects: Mask = CAUSAL,
    sample: Sample | None = None,
    scale: float | None = None,
    offset: int = 0,
    time_limit_seconds: float | None = None,
) -> Report:
    """Check whether attention is right: return a report that is true if nothing is wrong and states what is wrong otherwise.

    `subject` is a module x -> y or x -> (y, weights), nn.MultiheadAttention itself, or a function (q, k, v) -> context;
    `expects` is who may see whom. `sample` is x (b, t, d_in) or (t, d_in) if the width cannot be found, or (q, k, v); fewer
    tokens may be tried, never more. A subject that carries its own padding or documents needs a sample of that batch, and an
    expectation that states the same rule. `scale` is the factor on the scores if it is not 1 / √d; `offset` is the position of
    the first query among the keys. Mode, weights, gradients and random state are restored.

    After `time_limit_seconds` the report covers what was examined until then, with a finding that says so; a call into C that
    does not return is not interrupted. A subject that raises SystemExit, or anything else that is not an Exception, is a
    finding too; KeyboardInterrupt is raised. Raises ConfigError if a subject cannot be called.
    """
    asked = functools.partial(examine_step_by_step, subject, expects=expects, sample=sample, scale=scale, offset=offset)
    return examine_within_limit(asked, TimeLimit(time_limit_seconds), Progress())


def examine_within_limit(asked: Callable[..., Report], limit: TimeLimit, progress: Progress) -> Report:
    """Return the report of an examination, or the report of its results so far if the time limit or the subject ends it."""
    try:
        return asked(limit=limit, progress=progress)
    except TimeLimitError as error:
        limit.stop()
        return progress.make_partial_report(
            interruption.report_timeout(limit.seconds or 0, progress.step, interruption.locate_error(error))
        )
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as SystemExit
        if interruption.is_from_signal_handler(error):
            raise
        return progress.make_partial_report(interruption.report_exception(error, progress.step))


def examine_step_by_step(
    subject: nn.Module | Callable[..., Any],
    *,
    expects: Mask = CAUSAL,
    sample: Sample | None = None,
    scale: float | None = None,
    offset: int = 0,
    limit: TimeLimit = UNLIMITED,
    progress: Progress,
) -> Report:
    """Return the report of an examination, and add each result to `progress` as it is found."""
    progress.begin(get_subject_name(get_uncompiled(subject)), str(expects))
    progress.begin_step("inputs")
    offset = check_integer_offset(offset)
    whole = whole_model.examine_model(
        subject, expects=check_mask(expects), sample=sample, offset=offset, progress=progress, limit=limit
    )
    if whole is not None:
        return whole
    given = normalize_sample(sample)
    ways = list(iterate_adapters(subject, check_mask(expects), offset))
    with preserve_state(ways[0].module), watch_writes(subject) as writes, limit.enforce():
        ways = [stateful_calls.wrap_calls(way, writes.watch) for way in ways]
        try:
            chosen, shapes = inputs.find_working_inputs(ways, expects, given, offset)
        except inputs.RefusedError as error:
            if not error.sure:
                raise ConfigError(describe_missing_input(subject, error.errors)) from None
            return Report(ways[0].name, str(expects), (report_refusal(error.errors),))
        writes.changed.clear()  # by trial calls
        settled, said = stateful_calls.detect_state(chosen, shapes)
        progress.add(said)
        case = Case(settled, expects, shapes, get_stated_scale(chosen, scale), offset, match.identify_formula)
        report = axis_order.explain_axis_order(case, run_probes(case, progress), None if sample is not None else ways)
        return stateful_calls.prepend_results(report, [*said, *writes.report_changes()])


def normalize_sample(sample: Sample | None) -> tuple[Tensor, ...] | None:
    """Return a sample as a tuple of detached tensors; None without a sample. Raises ConfigError for a sample without tokens."""
    if sample is None:
        return None
    given = (sample,) if isinstance(sample, Tensor) else tuple(check_sequence("sample", sample))
    if not given:
        raise ConfigError("sample is x, or (q, k, v), floating tensors; got an empty sequence.")
    for one in given:
        check_floating("sample is x, or (q, k, v), each of which", one)
    if not all(one.numel() and one.dim() > 1 for one in given):
        shapes = ", ".join(str(tuple(one.shape)) for one in given)
        raise ConfigError(f"sample is x (b, t, d_in) or (t, d_in), or (q, k, v), with at least 1 token; got {shapes}.")
    return tuple(one.detach() for one in given)


def get_stated_scale(subject: SubjectAdapter, scale: float | None) -> float | None:
    """Return the scale that the caller states, or else the one of the subject's class, as in SimpleSelfAttention.

    Raises ConfigError for a scale that is 0 or not finite.
    """
    if scale is not None and (not math.isfinite(check_number("scale", scale)) or scale == 0):
        raise ConfigError(f"scale, which multiplies the scores, must be finite and not 0; got {scale!r}.")
    own = getattr(type(subject.module), "scale", None)  # of the class: an instance attribute may be the mistake
    return float(own) if scale is None and isinstance(own, (int, float)) else scale


def describe_missing_input(subject: object, errors: Sequence[str]) -> str:
    """Describe what to pass when no input was accepted."""
    name = get_subject_name(get_uncompiled(subject))
    sample = "sample=, an x (b, t, d_in) or (q, k, v) that it accepts."
    if inputs.NO_CONTEXT in errors[0]:
        return f"{name} runs, but {errors[0]}. Pass a function that calls it and returns a context, or {sample}"
    return f"found no input that {name} accepts: {errors[0]}. Pass {sample}"
