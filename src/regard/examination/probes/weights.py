"""Check that each query's row of weights adds to one, over the keys."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.examination import evidence
from regard.examination.call_checks import all_checks
from regard.examination.call_reading import matrix_checks, weight_formulas
from regard.examination.case import Case
from regard.examination.identify import mistakes, weight_reading
from regard.examination.identify.match import Match
from regard.examination.identify.mistakes import AXES, MASK, NORMS, SOFTMAX, find_mistake
from regard.examination.probes import future, padding
from regard.examination.report import Checked, Finding, Unknown

NAMED = ("zero", "zeroed weights", "one added", "one added to hidden", "minus one")
CURE = f"Apply the softmax once, over the keys, after the mask: {SOFTMAX}."
ROWS = "rows of weights sum to one"
SAME = "rows of weights have the same sum"


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check mask, softmax and axis by the identified formula, or else by the weights, or by constant sequences."""
    if case.match is not None:
        yield from check_match(case, case.match)
        return
    inputs = case.make_usual_inputs(1)
    module = case.subject.module
    where = None if module is None else matrix_checks.find_log_weights(module, lambda: case.subject.call(*inputs))
    if where is not None:
        does = f"in {where or 'the layer'} {NORMS['logarithm']}"
        yield Finding("not normalised", does, CURE, 2.2, "softmax", where)
        return
    found = None if module is None else find_by_values(case, module)
    if found is not None:
        yield found
        return
    if module is not None and any(case.recorded):
        wrong = list(matrix_checks.check_matrices(module, lambda: case.subject.call(*inputs), case.recorded))
        if wrong:
            yield from wrong
            return
    if module is None:
        yield from matrix_checks.check_function(lambda: case.subject.call(*inputs))
    try:
        by_values = weight_reading.is_unrecorded(case)
        results = list(read_or_infer_rows(weight_reading.get_double_case(case), by_values))
    except Exception:  # whatever a user's layer raises: another probe reports it
        results = [Unknown(f"whether {ROWS}", evidence.ALONE, is_required=True)]
    recorded = all_checks.check_rows(case.inner_calls) if any(isinstance(one, Unknown) for one in results) else None
    replaced = [one for one in results if is_missing(one) or (isinstance(recorded, Checked) and isinstance(one, Unknown))]
    if recorded is not None and replaced:
        results = [*(one for one in results if one not in replaced), recorded]
    yield from results


def find_by_values(case: Case, module: nn.Module) -> Finding | None:
    """Return what is wrong with weights that are read by values, and compared with the softmaxes and products of a layer.

    They are read of a layer that holds sinks, that shows what it should not, or that has no recorded attention.
    """
    is_unrecorded = weight_reading.is_unrecorded(case)
    has_sinks = any("sink" in name for name, _ in module.named_parameters())
    if not (is_unrecorded or has_sinks or describe_leak(case)) or case.weights_by_values is None:
        return None
    weights, best = case.weights_by_values, weight_reading.get_double_case(case)
    softmaxes, products = matrix_checks.record_softmaxes(lambda: best.subject.call(*best.make_usual_inputs()))
    does = weight_formulas.explain_sinks(module, weights, softmaxes)
    if does:
        return Finding("wrong sinks", f"in the layer {does}", weight_formulas.SINKS, 2.2, "wrong sinks")
    does = weight_formulas.describe_late_mask(weights, softmaxes)
    if does:
        return Finding("not normalised", f"in the layer {does}", MASK, 2.2, "softmax")
    width = weight_reading.find_head_width(case, by_values=True) if is_unrecorded else None
    does = "" if width is None else weight_formulas.explain_weights(weights, products.get("", []), width)
    return Finding("not normalised", f"in the layer {does}", CURE, 1.7, "softmax") if does else None


def read_or_infer_rows(case: Case, by_values: bool) -> Iterator[Finding | Checked | Unknown]:
    """Check the weights if they can be read, or else constant sequences."""
    weights = weight_reading.read_weights(case, case.make_usual_inputs())
    if weights is None and by_values and has_normalized_values(case):
        yield Checked(f"{ROWS}, over the keys", "by the values of each token, replaced one at a time")
        return
    yield from check_weights(case, weights) if weights is not None else check_constant_sequences(case)


def has_normalized_values(case: Case) -> bool:
    """Return whether weights are read by values, and their rows sum to one; other sums may be those of a gate."""
    weights = case.weights_by_values
    near = weight_reading.get_tolerance(case)
    return weights is not None and bool((weights > -near).all()) and bool(((weights.sum(-1) - 1).abs() < near).all())


def is_missing(one: Finding | Checked | Unknown) -> bool:
    """Return whether a result is that something the verdict requires is unknown."""
    return isinstance(one, Unknown) and one.is_required


def check_match(case: Case, match: Match) -> Iterator[Finding | Checked | Unknown]:
    """Yield results about mask, softmax and axis from the identified formula."""
    yield from mistakes.list_mistakes(match, ("norm", "axis"), 2.2)
    wrong = find_mistake(match, "mask")
    if wrong is not None and match.variant.mask in NAMED:
        kind = wrong.kind if wrong.kind != "future leak" else get_leak_kind(case)
        yield Finding(kind, f"{mistakes.describe_evidence(match, 'mask')}{describe_leak(case)}", wrong.cure, 2.3, "mask")
    if match.variant.norm == "plus one":
        yield Checked(f"{ROWS} with a sink of 0: exp(scores) / (1 + Σ exp(scores))", mistakes.describe_equality(match))
    elif all(match.is_verified(field) for field in ("norm", "axis")) and match.variant.mask != "zeroed weights":
        yield Checked(f"{ROWS}, over the keys", mistakes.describe_equality(match))
    elif not match.has_deviation("norm") and not match.has_deviation("axis") and match.variant.mask != "zeroed weights":
        yield Unknown(
            "how weights are computed from scores: other formulas give the same outputs",
            "a layer whose weights are not zero",
            is_required=True,
        )


def get_leak_kind(case: Case) -> str:
    """Return the kind of finding for a token that is seen and should not be."""
    if future.find_hidden_future(case).any():
        return "future leak"
    b, q, k = case.get_expected_visibility(*case.make_usual_inputs()).shape
    return "padding leak" if padding.find_padded_keys(case, b, q, k).any() else "wrong mask"


def describe_leak(case: Case) -> str:
    """Describe the first token that is seen and may not be, in numbers; "" if there is none."""
    extra = case.measured_dependency.visible & ~case.get_expected_visibility(*case.make_usual_inputs()).cpu()
    places = extra.nonzero().tolist()
    if not places:
        return ""
    b, i, j = places[0]
    return f". As a result, {evidence.describe_dependency(case, i, j, b)}, which it may not see"


def check_weights(case: Case, weights: Tensor) -> Iterator[Finding | Checked | Unknown]:
    """Check weights (b, h, q, k) that were read."""
    seen = (
        case.get_expected_visibility(*case.make_usual_inputs()).cpu().any(-1).unsqueeze(1).expand(weights.shape[:-1])
    )  # blind rows may be anything
    rows, near = weights.sum(-1), weight_reading.get_tolerance(case)
    off = ((rows - 1).abs() > near) & seen
    if not weights[seen].isfinite().all():
        return
    if not off.any() and weights[seen].min() > -near:
        yield Checked(f"{ROWS}, over the keys", f"to within {float((rows - 1).abs()[seen].max()):.0e}")
        return
    for axis, name in ((-2, "queries"), (1, "heads"), (0, "batch")):
        if weights.shape[axis] > 1 and ((weights.sum(axis) - 1).abs() < near).all():
            yield Finding(
                "wrong axis",
                f"{AXES[name]}: {describe_row(rows, off)}",
                f"Let each query's row sum to one: {SOFTMAX}.",
                1.5,
                "axis",
            )
            return
    yield explain_rows(case, weights, rows, off, seen)


def explain_rows(case: Case, weights: Tensor, rows: Tensor, off: Tensor, seen: Tensor) -> Finding | Unknown:
    """Return what explains rows that do not add to one: a mistake, a sink, or mixed heads."""
    near, sentence, of_function = weight_reading.get_tolerance(case), describe_row(rows, off), case.subject.form == "qkv"
    if has_mixed_heads(rows, seen, near, weights):
        return Unknown(f"whether {ROWS}: {sentence}, the same in every row, as with mixed or subtracted heads", evidence.ALONE)
    if weights[seen].min() < -near:
        sentence = f"weights are negative, down to {float(weights[seen].min()):.2g}"
        sure = Finding("not normalised", sentence, CURE, 1.5, "softmax")
        return sure if of_function else Unknown(f"whether {ROWS}: {sentence}", evidence.ALONE)
    if (rows[seen] > 1 + near).any() or is_unlike_sink(case, rows):
        return Finding("not normalised", sentence, CURE, 1.5, "softmax")
    if has_filled_keys(case):
        sentence += ", and to another number with one token less: keys that are not tokens have weight"
        return Finding("not normalised", sentence, all_checks.FILLED, 1.5, "softmax")
    return Unknown(
        f"whether {ROWS}: {sentence}, as with a sink", "the function without its sink" if of_function else evidence.ALONE
    )


def describe_row(rows: Tensor, off: Tensor) -> str:
    """Describe the first wrong row: `the weights of row 0 sum to 0.31, not to 1`."""
    b, h, i = off.nonzero()[0].tolist()
    head = f" of head {h}" if rows.shape[1] > 1 else ""
    return f"the weights of row {i}{head} sum to {float(rows[b, h, i]):.3g}, not to 1"


def has_mixed_heads(rows: Tensor, seen: Tensor, near: float, weights: Tensor) -> bool:
    """Return whether softmaxes were mixed or subtracted, as by talking heads and differential attention.

    All rows of a head then add to one number, and heads to different ones, or some weights are negative.
    """
    each = [rows[:, h][seen[:, h]] for h in range(rows.shape[1])]
    if not all(len(one) and float(one.max() - one.min()) < near for one in each):
        return False
    sums = torch.stack([one[0] for one in each])
    return float(sums.min()) > near and (float(sums.max() - sums.min()) > near or float(weights[seen].min()) < -near)


def is_unlike_sink(case: Case, rows: Tensor) -> bool:
    """Return whether no sink explains rows that add to less than one: for n equal scores a sink takes c / (n + c)."""
    seen = case.get_expected_visibility(*case.make_usual_inputs()).cpu()
    if float((rows.amax(-1) - rows.amin(-1)).max()) < weight_reading.get_tolerance(case) and seen.sum(-1).float().std() > 0:
        return True  # every row lacks the same, whatever the scores
    if case.subject.form == "x":
        return bool((future.find_hidden_future(case) & case.measured_dependency.visible).any())
    sink = measure_sink(case)
    return sink is not None and is_other_sink(sink, sink[:1, :, :1])


def measure_sink(case: Case) -> Tensor | None:
    """Return the c (b, h, q) of a sink that takes c / (n + c) if all scores are equal; None if a bias makes rows differ."""
    q, k, v = case.make_usual_inputs()
    weights = weight_reading.read_function_weights(case, (q * 0, k, v))
    n = case.get_expected_visibility(q, k, v).cpu().sum(-1).unsqueeze(1).clamp_min(1)
    total = weights.sum(-1)
    if ((weights.amax(-1) - total / n).abs() > weight_reading.get_tolerance(case)).any():
        return None
    return n * (1 - total) / total.clamp_min(1e-300)


def is_other_sink(sink: Tensor, one: Tensor) -> bool:
    """Return whether the c of a sink differs from this one anywhere."""
    return bool(((sink - one).abs() > 1e-3 * (1 + sink.abs())).any())


def has_filled_keys(case: Case) -> bool:
    """Return whether an apparent sink differs at another length, as with keys that fill up a block."""
    if case.subject.form == "x" or not case.can_resize or case.shapes.tokens - case.shapes.gap < 3:
        return False
    shorter = case.make_subcase(case.subject, replace(case.shapes, tokens=case.shapes.tokens - 1))
    try:
        sinks = measure_sink(case), measure_sink(shorter)
    except Exception:  # refusing another length is allowed
        return False
    return sinks[0] is not None and sinks[1] is not None and is_other_sink(sinks[0], sinks[1][:1, :, :1])


def check_constant_sequences(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check sequences of equal tokens: each row of a right layer gives the same output, for any length and any scores."""
    outputs = [compute_constant_outputs(case, t) for t in choose_test_lengths(case)]
    rows = outputs[0]
    top = float(rows.abs().max())
    if top == 0:
        yield Unknown(f"whether {ROWS}: every output is 0", "a layer whose weights are not zero", is_required=True)
        return
    difference = max(float((one - rows[:, :1]).abs().max()) for one in outputs) / top
    if difference < weight_reading.get_tolerance(case) and len(outputs) > 1:
        yield Checked(f"{SAME}: for equal tokens every output is the same, at two lengths", f"to within {difference:.0e}")
    else:
        what = f"whether {ROWS}: outputs for equal tokens differ, due to positions, a residual or a sink"
        yield Unknown(what, evidence.ALONE, is_required=True)
    if difference < weight_reading.get_tolerance(case):
        yield Unknown(f"whether {ROWS}, over the keys and not another axis", evidence.ALONE, is_required=True)


def choose_test_lengths(case: Case) -> list[int]:
    """Return the usual length, and one less if other lengths may be tried."""
    t = case.shapes.tokens
    return [t, t - 1] if case.can_resize and t > 2 else [t]


def compute_constant_outputs(case: Case, t: int) -> Tensor:
    """Return the outputs (b, t, c) of sequences of one repeated token."""
    (x,) = case.make_inputs(t, case.shapes.batch, 5)
    (token,) = case.make_inputs(case.shapes.tokens, case.shapes.batch, 5)
    return case.run_subject(token[:, :1].expand_as(x).contiguous()).context.to("cpu", torch.float64)
