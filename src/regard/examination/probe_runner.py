"""Run all probes on a case and order their findings, at most three for one cause."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from torch import nn

from regard.examination import evidence
from regard.examination.call_checks.head_checks import mixes_tokens
from regard.examination.case import Case
from regard.examination.identify import match
from regard.examination.probes import PROBES, Probe, blind, pattern
from regard.examination.progress import ExaminationProgress
from regard.examination.report import UNUSED_HEADS, Checked, Finding, Report, Unknown, Visibility
from regard.examination.subject import inputs
from regard.examination.subject.adapters import SubjectError, format_module_path, iterate_adapters
from regard.examination.subject.inputs import get_first_line
from regard.examination.subject.restore_state import preserve_state
from regard.examination.whole_models import inner_attention
from regard.mechanism import Mask
from regard.mechanism.mask_algebra import Offset

EACH = 3  # findings of one cause
NAMED = 2.0  # the strength of findings by the identified formula
REQUIRED = {"pattern": "which tokens each query sees", "weights": "whether rows of weights sum to one", "scale": "the scale"}
READ = ("weights", "scale", "heads", "roles")  # the probes of how scores become weights
MIXING = ("split", "merge", "share", "axis", "norm")  # fields whose deviations pass on tokens that the mask hides
OR_MIXED = "If the mask is correct: heads joined without a transpose, or a softmax over another axis, leak tokens too."
FOLLOWING = ("future leak", "wrong mask", "inverted mask", "padding leak", "batch leak")
TRIED_PARTS = 2  # parts
MOST_WEIGHTS = 2**22  # numbers of a part that is tried, at most
IN_A_FUNCTION = "a layer in a function that passes all that it needs: examine(lambda x: layer(x, ...), sample=x)"


def run_probes(case: Case, progress: ExaminationProgress | None = None) -> Report:
    """Run every probe on a case; those of how scores become weights run on the attention inside it if that was found."""
    progress = progress or ExaminationProgress()
    unusable = blind.report_unusable_weights(case)
    if unusable is not None:  # all else follows from it
        progress.add([unusable])
        return Report(case.subject.name, str(case.expects), (unusable,), notes=list_notes(case, None))
    inside, name = inner_attention.find_identified_part(case) if is_more_than_attention(case) else (None, "")
    results: list[Finding | Checked | Unknown] = []
    silent: list[Unknown] = []
    for probe, look in PROBES:
        progress.begin_step(probe)
        found = run_probe(case, inside, probe, look)
        progress.add(found)
        results += found
        if any(isinstance(one, Finding) and one.cause == blind.ALL for one in found):
            break  # nothing else can be said of outputs that are all NaN
        silent += [] if found or probe not in REQUIRED else [Unknown(REQUIRED[probe], evidence.ALONE, is_required=True)]
    if not any(isinstance(one, Finding) for one in results):  # a finding may be why another probe has nothing to say
        results += silent
    findings = select_causes(rank_findings(one for one in results if isinstance(one, Finding)), inside or case)
    checked = tuple(one for one in results if isinstance(one, Checked))
    missing = [one for one in results if isinstance(one, Unknown)]
    hint = ""
    if any(one.needs == evidence.ALONE for one in missing):
        hint = suggest_part(case.subject.module, [name], case.expects, case.offset, "layer")
    unknown = tuple(dict.fromkeys(add_part_hint(one, hint) for one in missing))
    return Report(
        case.subject.name, str(case.expects), findings, checked, unknown, list_notes(case, inside), make_visibility(case)
    )


def is_more_than_attention(case: Case) -> bool:
    """Return whether a module does more than attention, so that its formula has to be read in a part of it."""
    module = case.subject.module
    return case.subject.form == "x" and module is not None and case.subject.rank == 3 and case.match is None


def run_probe(case: Case, inside: Case | None, name: str, look: Probe) -> list[Finding | Checked | Unknown]:
    """Run a probe on a case, or on the attention inside it."""
    if inside is None:
        return list(collect_probe_results(case, name, look))
    if name in READ:
        return [prefix_result(one, inside.subject.name) for one in collect_probe_results(inside, name, look)]
    results = list(collect_probe_results(case, name, look))
    if any(isinstance(one, Unknown) and one.what == pattern.OWN for one in results):
        results = [one for one in results if not isinstance(one, Unknown)]
        results += [prefix_result(one, inside.subject.name) for one in collect_probe_results(inside, name, look)]
    return results


def prefix_result(one: Finding | Checked | Unknown, name: str) -> Finding | Checked | Unknown:
    """Prefix a result of a part with the name of the part."""
    if isinstance(one, Finding):
        return replace(one, evidence=f"{name}: {one.evidence}")
    return replace(one, what=f"in {name} {one.what}")


def add_part_hint(one: Unknown, hint: str) -> Unknown:
    """Add how to examine a part of the module alone to what cannot be determined."""
    return replace(one, needs=f"{hint}; or {one.needs}") if hint and one.needs == evidence.ALONE else one


def collect_probe_results(case: Case, name: str, look: Probe) -> Iterator[Finding | Checked | Unknown]:
    """Yield the results of a probe; if the subject raises, the last is that the rest cannot be determined."""
    try:
        yield from look(case)
    except (SubjectError, NotImplementedError) as error:  # torch raises the second for a device that lacks something
        did = (
            error.did if isinstance(error, SubjectError) else f"raised NotImplementedError: {get_first_line(error).rstrip('.')}"
        )
        needs = "a layer that accepts these inputs, or a sample= that it accepts"
        yield Unknown(f"the rest of its {name}: it {did}", needs, is_required=name in REQUIRED)


def run_named_probes(case: Case, names: Collection[str]) -> Iterator[Finding | Checked | Unknown]:
    """Yield the results of the probes of these names."""
    for name, look in PROBES:
        yield from collect_probe_results(case, name, look) if name in names else ()


def rank_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the strongest first, and keep one of a kind for each cause and at most three of a cause."""
    kept: list[Finding] = []
    counts: Counter[str] = Counter()
    for one in sorted(findings, key=lambda one: -one.strength):
        cause = one.cause or one.kind
        most = 1 if cause == UNUSED_HEADS else EACH
        if counts[cause] < most and not any((one.kind, cause) == (other.kind, other.cause or other.kind) for other in kept):
            kept.append(one)
            counts[cause] += 1
    return tuple(kept)


def select_causes(findings: tuple[Finding, ...], case: Case) -> tuple[Finding, ...]:
    """Return the findings without those of who sees whom that follow from others: masks are right, but tokens are mixed.

    The cure of a leak says so where that may be.
    """
    match = case.match
    if match is not None:
        is_mixed = not match.has_deviation("mask") and any(match.has_deviation(field) for field in MIXING)
    else:
        is_named = any(one.kind == "mixed heads" for one in findings) and case.mixing_function is None
        is_mixed = is_named and mixes_tokens(case.inner_calls) and has_expected_masks(case)
    if is_mixed:
        return tuple(one for one in findings if one.kind not in FOLLOWING or one.strength >= NAMED) or findings
    if match is None and case.subject.form == "x" and case.mixing_function is None:
        return tuple(replace(one, cure=f"{one.cure} {OR_MIXED}") if one.kind == "future leak" else one for one in findings)
    return findings


def has_expected_masks(case: Case) -> bool:
    """Return whether every attention call that a module makes lets queries see what is expected, and nothing else."""
    calls = case.inner_calls
    expected = case.get_expected_visibility(*case.make_usual_inputs())
    seen = [(one.call.build_map(one.call.k).dense() > 0).any(1) for one in calls if one.call.k.shape[2] <= expected.shape[2]]
    return 0 < len(seen) == len(calls) and all(x.shape == expected.shape and bool((x == expected).all()) for x in seen)


def list_notes(case: Case, inside: Case | None) -> tuple[str, ...]:
    """Describe how the subject was called."""
    shapes, dtype = case.shapes, str(case.subject.dtype).removeprefix("torch.")
    if case.subject.form == "x":
        size = f"x ({shapes.batch}, {shapes.tokens}, {shapes.width}) {dtype}"
    else:
        size = (
            f"q with {shapes.heads} heads, k and v with {shapes.groups}, {shapes.tokens} tokens, width {shapes.width}, {dtype}"
        )
    read = (
        ""
        if inside is None
        else f"weights, scale, heads and roles: checked in {inside.subject.name}, with the inputs that it gets there"
    )
    return tuple(note for note in (case.subject.note, size, read) if note)


def make_visibility(case: Case) -> Visibility | None:
    """Return the picture of who sees whom in the first sequence that differs, else the first; None if nothing was measured."""
    try:
        expected, found = case.get_expected_visibility(*case.make_usual_inputs()), case.measured_dependency.visible
    except SubjectError:  # nothing could be measured; the probes report why
        return None
    wrong = ((expected != found) & case.measured_dependency.measured_rows.unsqueeze(-1)).any(-1).any(-1)
    b = int(wrong.int().argmax())
    return Visibility(expected[b], found[b], case.measured_dependency.within_sequence[b], evidence.get_token_words(case))


def suggest_part(module: nn.Module | None, names: Iterable[str], expects: Mask, offset: Offset, owner: str) -> str:
    """Return a call of examine on the first of these parts that shows its scale alone, "" if none of the first few does.

    `owner` is the name of the module in the suggestion: `examine(model.blocks[0].attention)`.
    """
    for name in list(dict.fromkeys(name for name in names if name))[:TRIED_PARTS]:
        if module is not None and shows_scale(module.get_submodule(name), expects, offset):
            return f"examine({format_module_path(f'{owner}.{name}')})"
    return ""


def shows_scale(part: nn.Module, expects: Mask, offset: Offset) -> bool:
    """Return whether a part can be called alone, and a formula or its calls give the scale."""
    if not isinstance(offset, int) or sum(one.numel() for one in part.parameters()) > MOST_WEIGHTS:
        return False
    try:
        ways = list(iterate_adapters(part, expects, offset))
        with preserve_state(part):
            chosen, shapes = inputs.find_working_inputs(ways, expects, None, offset)
            case = Case(chosen, expects, shapes, None, offset, match.identify_formula)
            return case.match is not None or (bool(case.inner_calls) and all(one.scale for one in case.inner_calls))
    except Exception:  # whatever a user's layer raises
        return False
