"""Examine a module of any inputs and outputs by the attention calls that it makes: of pictures, pooling, several inputs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination import evidence, mask_requirements
from regard.examination.call_checks import all_checks
from regard.examination.call_reading import matrix_checks, table_reading
from regard.examination.call_reading.bias_reading import read_seen
from regard.examination.call_reading.inner_calls import InnerCall, RecordedCalls, record_inner_calls
from regard.examination.layer_rules import LayerRules
from regard.examination.probes.inference import check_inference
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Checked, Finding, Report, Unknown, prepend_results
from regard.examination.whole_models import replay
from regard.examination.whole_models.layer_masks import compare_layers, report_layers
from regard.examination.whole_models.recorded_layers import LayerSight, find_visible_keys
from regard.mechanism import EVERYTHING
from regard.mechanism.mask_algebra import Offset
from regard.observe.interception.attention_call import AttentionCall

END_TO_END = "which outputs depend on which tokens: it returns no output for each token"
TOKENS = "the layers, or a function x -> y (b, t, c) of the tokens"
NO_CALL = "any property of its attention: no attention call was recorded"
HIDING = 50.0  # below the largest bias of a row: windows are hidden by -100


def examine_calls(
    name: str,
    module: nn.Module,
    run: Callable[[], object],
    rules: LayerRules,
    scale: float | None = None,
    offset: Offset = 0,
    progress: ExaminationProgress | None = None,
) -> Report:
    """Examine every attention call of a module while it runs: who sees whom, scale, rows, heads and roles.

    Cross attention, with other keys than queries, is compared only with Everything(). Raises what the module raises.
    """
    progress = progress or ExaminationProgress()
    progress.begin_step("layers")
    with torch.no_grad():
        recorded = record_inner_calls(module, run)
    rules.check_names([*(one.name for one in recorded.calls), *(one.module for one in recorded.missed)])
    results: list[Finding | Checked | Unknown] = []
    for one in collect_results(module, run, recorded, rules, scale, offset):
        results.append(one)
        progress.add([one])
    names = {one.name for one in recorded.calls}
    every = names | {m.module for m in recorded.missed} | {one.name for one in recorded.matrices}
    count = f"{len(names)} of {len(every)} attention layers examined in the calls that they get"
    return prepend_results(Report(name, str(rules), notes=(count,)), results)


def collect_results(
    module: nn.Module,
    run: Callable[[], object],
    recorded: RecordedCalls,
    rules: LayerRules,
    scale: float | None,
    offset: Offset,
) -> Iterator[Finding | Checked | Unknown]:
    """Yield the results for recorded calls, and for what was missed."""
    calls, missed = recorded.calls, {one.module: one.reason for one in recorded.missed}
    yield from matrix_checks.check_matrices(module, run, recorded)
    missed |= {one.name: f"its weights are no softmax: {one.title}" for one in recorded.matrices}
    if not calls:
        why = "; ".join(f"{name or 'the module'}: {reason}" for name, reason in list(missed.items())[:2])
        yield Unknown(NO_CALL + (f" ({why})" if why else ""), TOKENS, is_required=True)
        return
    yield from check_visibility(calls, rules, offset)
    yield from check_inference(module, run)
    for what, result in all_checks.iterate_checks(calls, scale, in_model=True):
        yield result if result is not None else Unknown(f"whether {what}", evidence.ALONE, what in all_checks.REQUIRED)
    yield from table_reading.check_tables(calls, module)
    yield from replay.examine_layers(module, run, dict.fromkeys(one.name for one in calls), rules, scale).results
    for name, reason in missed.items():
        yield Unknown(f"any property of the attention in {name or 'the module'}: {reason}", TOKENS, is_required=True)
    yield Unknown(END_TO_END, TOKENS)


def check_visibility(calls: list[InnerCall], rules: LayerRules, offset: Offset) -> Iterator[Finding | Checked | Unknown]:
    """Yield the calls in which a query sees what it may not or misses what it may, or that there are none."""
    sights: list[LayerSight] = []
    shifted = 0
    for one in calls:
        rule, (_, _, q, _), k = rules.get_rule(one.name), one.call.q.shape, one.call.k.shape[2]
        if rule.key_count not in (None, k) or (q != k and rule != EVERYTHING):
            continue
        attention = one.call.build_map(one.call.k)
        regions = find_regions(one) if rule == EVERYTHING and q == k else None
        seen = find_visible_keys(attention)
        seen = seen & find_unhidden_keys(one.call) if rule == EVERYTHING else seen
        sights.append(LayerSight(one.name, seen if regions is None else seen | ~regions, attention))
        shifted += regions is not None
    findings = list(report_layers(compare_layers(sights, rules, offset), [], offset))
    yield from findings
    if not sights:
        what = "who sees whom: no recorded call has as many queries as keys"
        yield Unknown(what, "expects= of each layer, and the layer alone", is_required=True)
    elif not findings:
        what = f"every query sees the tokens that {rules} allows, and no other"
        what += f"; of its own region in {shifted} calls, as in shifted windows" * (shifted > 0)
        yield Checked(what, f"in {len(sights)} recorded calls")
        sizes = [(rules.get_rule(sight.name), sight.seen.shape[-1]) for sight in sights]
        for rule in rules.masks:
            t = max((size for own, size in sizes if own == rule), default=0)
            if not mask_requirements.is_shown(rule, t, offset):
                yield mask_requirements.describe_short_sample(rule, t)


def find_regions(one: InnerCall) -> Tensor | None:
    """Return who sees whom in windows of which some are shifted over an edge, bool (b, q, k); None for any other call.

    The tokens of such a window are of several regions, and see those of their own; another window of the call is one region.
    """
    seen = read_seen(one)
    if seen is None or len(seen) != len(one.call.q):
        return None
    seen = seen & find_unhidden_keys(one.call)
    reached = (seen.float() @ seen.float()) > 0
    is_one = seen.flatten(1).all(-1)
    is_region = bool((reached == seen).all()) and bool((seen == seen.mT).all()) and bool(seen.diagonal(dim1=1, dim2=2).all())
    return seen if is_region and is_one.any() and not is_one.all() else None


def find_unhidden_keys(call: AttentionCall) -> Tensor:
    """Return which keys the bias of a call does not hide by a number far below the largest of their row, bool (b, q, k)."""
    bias = call.bias
    if bias is None or bias.dim() != 4:
        return torch.ones(1, 1, 1, dtype=torch.bool)
    return (bias > bias.amax(-1, keepdim=True) - HIDING).any(1).cpu()


def make_run(module: Callable[..., Any], sample: Any) -> Callable[[], Any]:
    """Return a call of a module with a sample: a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(sample, Tensor):
        return lambda: module(sample.clone())
    if isinstance(sample, Mapping):
        return lambda: module(**sample)
    return lambda: module(*sample)
