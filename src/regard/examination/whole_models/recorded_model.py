"""Examine a module of any inputs and outputs by the attention calls that it makes: of pictures, pooling, several inputs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.examination import evidence, mask_requirements
from regard.examination.call_checks import all_checks
from regard.examination.call_reading import bucket_reading, matrix_checks
from regard.examination.call_reading.bias_reading import read_seen
from regard.examination.call_reading.inner_calls import InnerCall, RecordedCalls, record_inner_calls
from regard.examination.probes.inference import check_inference
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Checked, Finding, Report, Unknown
from regard.examination.whole_models import replay
from regard.mechanism import EVERYTHING, Mask
from regard.mechanism.mask_algebra import Offset

END_TO_END = "which outputs depend on which tokens: it returns no output for each token"
TOKENS = "the layers, or a function x -> y (b, t, c) of the tokens"
NO_CALL = "any property of its attention: no attention call was recorded"
HIDING = 50.0  # below the largest bias of a row: windows are hidden by -100
HIDE = "Hide in that call what the expected mask hides: pass it as attn_mask, or is_causal=True."
SHOW = "Hide no more than the expected mask does, or pass expects= as it is meant."


def examine_calls(
    name: str,
    module: nn.Module,
    run: Callable[[], object],
    expects: Mask,
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
    results: list[Finding | Checked | Unknown] = []
    for one in collect_results(module, run, recorded, expects, scale, offset):
        results.append(one)
        progress.add([one])
    names = {one.name for one in recorded.calls}
    every = names | {m.module for m in recorded.missed} | {one.name for one in recorded.matrices}
    count = f"{len(names)} of {len(every)} attention layers examined in the calls that they get"
    return Report(
        name,
        str(expects),
        tuple(one for one in results if isinstance(one, Finding)),
        tuple(one for one in results if isinstance(one, Checked)),
        tuple(one for one in results if isinstance(one, Unknown)),
        (count,),
    )


def collect_results(
    module: nn.Module,
    run: Callable[[], object],
    recorded: RecordedCalls,
    expects: Mask,
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
    yield check_visibility(calls, expects, offset)
    yield from check_inference(module, run)
    for what, result in all_checks.iterate_checks(calls, scale, in_model=True):
        yield result if result is not None else Unknown(f"whether {what}", evidence.ALONE, what in all_checks.REQUIRED)
    yield from bucket_reading.check_buckets(calls, module)
    yield from replay.examine_layers(module, run, dict.fromkeys(one.name for one in calls), expects, scale).results
    for name, reason in missed.items():
        yield Unknown(f"any property of the attention in {name or 'the module'}: {reason}", TOKENS, is_required=True)
    yield Unknown(END_TO_END, TOKENS)


def check_visibility(calls: list[InnerCall], expects: Mask, offset: Offset) -> Finding | Checked | Unknown:
    """Return the first call in which a query sees what it may not or misses what it may, or that there is none."""
    compared = shifted = 0
    for one in calls:
        seen = read_visibility(one)
        if seen is None or expects.key_count not in (None, seen.shape[2]):
            continue
        if seen.shape[1] != seen.shape[2] and expects != EVERYTHING:
            continue
        b, q, k = seen.shape
        allowed = mask_requirements.expand_mask(expects, b, q, k, offset).to(seen.device)
        regions = find_regions(one) if expects == EVERYTHING and q == k else None
        shifted += regions is not None
        wrong = seen != allowed if regions is None else regions.to(seen.device) & ~seen
        if q <= k:
            wrong &= mask_requirements.find_real_queries(expects, b, q, k).to(seen.device)
        if wrong.any():
            return report_visibility(one, seen, wrong)
        compared += 1
    if not compared:
        what = "who sees whom: no recorded call has as many queries as keys"
        return Unknown(what, "expects= of each layer, and the layer alone", is_required=True)
    what = f"every query sees the tokens that {expects} allows, and no other"
    what += f"; of its own region in {shifted} calls, as in shifted windows" * (shifted > 0)
    return Checked(what, f"in {compared} recorded calls")


def read_visibility(one: InnerCall) -> Tensor | None:
    """Return which keys have a weight in any head, bool (b, q, k); None if there are too many."""
    try:
        return (one.call.build_map(one.call.k).dense() > 0).any(1)
    except RegardError:  # too large to be dense
        return None


def find_regions(one: InnerCall) -> Tensor | None:
    """Return who sees whom in windows of which some are shifted over an edge, bool (b, q, k); None for any other call.

    The tokens of such a window are of several regions, and see those of their own; another window of the call is one region.
    """
    seen, bias = read_seen(one), one.call.bias
    if seen is None or len(seen) != len(one.call.q):
        return None
    if bias is not None and bias.dim() == 4:
        seen = seen & (bias > bias.amax(-1, keepdim=True) - HIDING).any(1).cpu()
    reached = (seen.float() @ seen.float()) > 0
    is_one = seen.flatten(1).all(-1)
    is_region = bool((reached == seen).all()) and bool((seen == seen.mT).all()) and bool(seen.diagonal(dim1=1, dim2=2).all())
    return seen if is_region and is_one.any() and not is_one.all() else None


def report_visibility(one: InnerCall, seen: Tensor, wrong: Tensor) -> Finding:
    """Return the finding of a call that sees too much or too little."""
    b, i, j = (int(n) for n in (wrong & seen if (wrong & seen).any() else wrong).nonzero()[0])
    where = one.name or "its call"
    if seen[b, i, j]:
        kind = "future leak" if j > i else "wrong mask"
        return Finding(kind, f"{where}: row {i} puts weight on token {j}, which it may not see", HIDE, 2.0, "mask", one.name)
    return Finding("wrong mask", f"{where}: row {i} may see token {j}, but puts no weight on it", SHOW, 1.8, "mask", one.name)


def make_run(module: Callable[..., Any], sample: Any) -> Callable[[], Any]:
    """Return a call of a module with a sample: a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(sample, Tensor):
        return lambda: module(sample.clone())
    if isinstance(sample, Mapping):
        return lambda: module(**sample)
    return lambda: module(*sample)
