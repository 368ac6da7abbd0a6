"""Check whether attention is right, by what a subject computes and never by its code."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.errors import ConfigError, RegardError
from regard.examination import axis_order, interruption, mask_requirements
from regard.examination.call_checks import source_checks
from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.layer_rules import Expectation, LayerRules, make_layer_rules
from regard.examination.probe_runner import run_probes
from regard.examination.probes.raises import report_refusal
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Checked, Finding, Report, Unknown, prepend_results
from regard.examination.subject import inputs, stateful_calls, zero_weights
from regard.examination.subject.adapters import (
    SubjectAdapter,
    find_held_module,
    find_module,
    get_subject_name,
    get_uncompiled,
    iterate_adapters,
)
from regard.examination.subject.call_conventions import bind_arguments, list_required_arguments, parse_roles
from regard.examination.subject.inplace_writes import watch_writes
from regard.examination.subject.restore_state import preserve_state
from regard.examination.time_limit import UNLIMITED, TimeLimit, TimeLimitError
from regard.examination.whole_models import recorded_model, whole_model
from regard.mechanism import Causal
from regard.mechanism.arguments import check_flag, check_floating, check_number, check_sequence
from regard.mechanism.request import check_integer_offset

CAUSAL = Causal()
Sample = Tensor | Sequence[Tensor] | Mapping[str, Any]


def examine(
    subject: nn.Module | Callable[..., Any],
    *,
    expects: Expectation = CAUSAL,
    sample: Sample | None = None,
    scale: float | None = None,
    offset: int = 0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    time_limit_seconds: float | None = None,
    strict: bool = True,
) -> Report:
    """Check whether attention is right: return a report that is true if nothing is wrong and states what is wrong otherwise.

    A report without findings is inconclusive, and not true, if who sees whom, the rows of weights or the scale could not be
    examined: it states the least to pass for a verdict. With `strict=False` it is true.

    `subject` is a module x -> y or x -> (y, weights), nn.MultiheadAttention itself, or a function (q, k, v) -> context;
    `expects` is who may see whom: a rule, or a mapping of patterns of layers' paths to rules, `{"layers.0.*": a, "*": b}`, of
    which the first that matches counts. `sample` is x (b, t, d_in) or (t, d_in) if the width cannot be found, or (q, k, v);
    fewer tokens may be tried, never more. Of a module that is called with anything else, such as pixels or a mapping of named
    arguments, the sample, each attention call is examined. A subject that carries its own padding or documents needs a sample
    of that batch, and an expectation that states the same rule. `args` and `kwargs` are further arguments of each call. `scale`
    is the factor on the scores if it is not 1 / √d; `offset` is the position of the first query among the keys. Mode, weights,
    gradients and random state are restored.

    After `time_limit_seconds` the report covers what was examined until then, with a finding that says so; a call into C that
    does not return is not interrupted. A subject that raises SystemExit, or anything else that is not an Exception, is a
    finding too; KeyboardInterrupt is raised. Raises ConfigError if a subject cannot be called.
    """
    strict = check_flag("strict", strict)
    subject = bind_arguments(subject, args, {} if kwargs is None else kwargs)
    examine_subject = functools.partial(
        examine_step_by_step, subject, expects=expects, sample=sample, scale=scale, offset=offset
    )
    return replace(examine_within_limit(examine_subject, TimeLimit(time_limit_seconds), ExaminationProgress()), strict=strict)


def examine_within_limit(examine_subject: Callable[..., Report], limit: TimeLimit, progress: ExaminationProgress) -> Report:
    """Return the report of an examination, or the report of its results so far if the time limit or the subject ends it."""
    try:
        return examine_subject(limit=limit, progress=progress)
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
    expects: Expectation = CAUSAL,
    sample: Sample | None = None,
    scale: float | None = None,
    offset: int = 0,
    limit: TimeLimit = UNLIMITED,
    progress: ExaminationProgress,
) -> Report:
    """Return the report of an examination, and add each result to `progress` as it is found."""
    rules = make_layer_rules(expects)
    progress.begin(get_subject_name(get_uncompiled(subject)), str(rules))
    progress.begin_step("inputs")
    offset = check_integer_offset(offset)
    examine_model = functools.partial(
        whole_model.examine_model, subject, rules=rules, scale=scale, offset=offset, progress=progress, limit=limit
    )
    whole, is_call = examine_model(sample=sample), is_call_sample(subject, sample)
    arguments = source_checks.bind_inputs(subject, sample) if is_call and not isinstance(sample, Tensor) else {}
    if whole is not None:
        return prepend_results(whole, check_named_sources(subject, arguments))
    if is_call:
        run = recorded_model.make_run(subject, sample)
        return examine_recorded(subject, run, rules, scale, offset, progress, arguments)
    if sample is None and (guessed := source_checks.guess_inputs(get_uncompiled(subject), find_module(subject))):
        run = recorded_model.make_run(subject, guessed)
        return examine_recorded(subject, run, rules, scale, offset, progress, guessed)
    if rules.single is None:
        report = examine_model(sample=sample, vectors=find_vectors(subject, rules, sample, offset))
        assert report is not None
        return report
    expects = rules.single
    given = normalize_sample(sample)
    ways = list(iterate_adapters(subject, expects, offset))
    with preserve_state(ways[0].module), watch_writes(subject) as writes, limit.enforce():
        ways = [stateful_calls.wrap_calls(way, writes.watch) for way in ways]
        try:
            chosen, shapes = inputs.find_working_inputs(ways, expects, given, offset)
        except inputs.RefusedError as error:
            if error.run is not None and ways[0].module is not None:
                report = examine_recorded(subject, error.run, rules, scale, offset, progress)
                if report.checked:
                    return report
            if not error.sure:
                raise ConfigError(describe_missing_input(subject, error.errors)) from None
            return Report(ways[0].name, str(expects), (report_refusal(error.errors),))
        filled = zero_weights.fill_hiding_zeros(chosen, shapes)
        writes.changed.clear()  # by trial calls
        settled, state_results = stateful_calls.detect_state(chosen, shapes)
        progress.add(state_results)
        case = Case(settled, expects, shapes, get_stated_scale(chosen, scale), offset, match.identify_formula)
        report = axis_order.explain_axis_order(case, run_probes(case, progress), None if sample is not None else ways)
        if filled:
            report = replace(report, notes=(*report.notes, f"random numbers in place of the zeros of {', '.join(filled)}"))
        sources = list(check_argument_roles(subject, chosen, case))
        return prepend_results(report, [*state_results, *writes.report_changes(), *sources])


def find_vectors(subject: Any, rules: LayerRules, sample: Sample | None, offset: int) -> Tensor:
    """Return vectors x (b, t, c) that a module of several layers takes. Raises ConfigError for anything else."""
    name, given = get_subject_name(get_uncompiled(subject)), normalize_sample(sample)
    module = find_module(subject)
    if module is None or (given is not None and len(given) != 1):
        raise ConfigError(f"expects by layers is for a module; pass one rule for {name}, such as expects=Causal().")
    longest = max(rules.masks, key=mask_requirements.count_required_tokens)
    ways = [way for way in iterate_adapters(subject, longest, offset) if way.form == "x" and way.rank == 3]
    with preserve_state(module):
        try:
            chosen, shapes = inputs.find_working_inputs(ways, longest, given, offset)
        except inputs.RefusedError as error:
            raise ConfigError(describe_missing_input(subject, error.errors)) from None
    if given is not None:
        return given[0] if given[0].dim() == 3 else given[0].unsqueeze(0)
    (x,) = shapes.make(None, shapes.batch, 0, 1.0, chosen.dtype, chosen.device)
    return x


def check_argument_roles(subject: Any, chosen: SubjectAdapter, case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Yield whether a module (query, key, value) -> context uses each argument in its role, with three different sequences."""
    names = [one.removesuffix("=") for one in list_required_arguments(get_uncompiled(subject)) or ()]
    if chosen.form != "x" or chosen.module is None or chosen.rank != 3 or len(names) != 3 or parse_roles(names) is None:
        return
    (x,) = case.make_usual_inputs(41)
    yield from source_checks.check_sources(chosen.module, subject, source_checks.list_sequences(names, x))


def is_call_sample(subject: object, sample: object) -> bool:
    """Return whether a sample is what a module is called with, and neither vectors of tokens nor q, k and v."""
    if find_module(subject) is None:
        return False
    if isinstance(sample, Tensor):
        return sample.is_floating_point() and sample.dim() > 3
    parts = list(sample) if isinstance(sample, (tuple, list)) else []
    return isinstance(sample, Mapping) or (
        len(parts) > 1
        and all(isinstance(one, Tensor) for one in parts)
        and (len(parts) != 3 or not all(one.is_floating_point() for one in parts))
    )


def examine_recorded(
    subject: Any,
    run: Callable[[], object],
    rules: LayerRules,
    scale: float | None,
    offset: int,
    progress: ExaminationProgress,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Return the report on the attention calls that a module makes in a run, in evaluation. Raises ConfigError if it raises.

    `arguments` are those of the run by their names, if they are known.
    """
    plain = get_uncompiled(subject)
    module = find_held_module(plain)
    assert module is not None
    name = get_subject_name(plain)
    with preserve_state(module):
        try:
            report = recorded_model.examine_calls(name, module, run, rules, scale, offset, progress)
            return prepend_results(report, check_named_sources(subject, arguments or {}))
        except RegardError:
            raise
        except Exception as error:  # a user's module may raise anything
            line = inputs.get_first_line(error).rstrip(".")
            raise ConfigError(
                f"{name} raised {type(error).__name__} on this sample: {line}. Pass one that it takes."
            ) from error


def check_named_sources(subject: Any, arguments: Mapping[str, Any]) -> list[Finding | Checked | Unknown]:
    """Return whether keys and values come from the arguments that are meant for them; empty without arguments."""
    module = find_module(subject)
    if module is None or not arguments:
        return []
    with preserve_state(module):
        return list(source_checks.check_sources(module, subject, arguments))


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
    return f"found no input that {name} accepts: {errors[0].rstrip('.')}. Pass {sample}"
