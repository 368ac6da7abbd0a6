"""Read weights from outside: of a function with the identity as its values, of a module if it returns them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.examination.call_reading.rounding import solve_least_squares
from regard.examination.case import Case
from regard.examination.identify.trial import Trial, iterate_trials, make_target
from regard.mechanism.heads import join, share, split

LINEAR = 2e-2  # relative residual of log weights above which they are no multiple of q kᵀ plus a constant
SMALL = 0.05  # the spread of scaled scores at which a softcap changes nothing
FURTHER = 0.25  # times that size, at which a series of the exponential has its slope


@dataclass(frozen=True)
class Slope:
    """How much log weights change with q kᵀ, and with k qᵀ."""

    along: float
    across: float


def get_double_case(case: Case) -> Case:
    """Return the case in float64 if that runs, else the case itself."""
    return case.double or case


def get_tolerance(case: Case) -> float:
    """Return the difference below which two numbers of a subject may be the same."""
    return {torch.float64: 2e-6, torch.float32: 1e-4}.get(case.subject.dtype, 0.03)


def read_function_weights(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    """Read the weights (b, h, q, k) of a function: its context for v = identity, as many columns at a time as v has."""
    q, k, v = inputs
    columns = []
    for first in range(0, k.shape[-2], v.shape[-1]):
        one = torch.zeros_like(v)
        for n in range(min(v.shape[-1], k.shape[-2] - first)):
            one[..., first + n, n] = 1
        columns.append(case.run_subject(q, k, one).context[..., : k.shape[-2] - first])
    return torch.cat(columns, -1).to("cpu", torch.float64)


def is_weighted_sum(case: Case, weights: Tensor, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the context is these weights times v, and nothing else."""
    context = case.run_subject(*inputs).context.to("cpu", torch.float64)
    expected = weights @ share(inputs[2].to("cpu", torch.float64), weights.shape[1])
    return context.shape == expected.shape and torch.allclose(
        context, expected, rtol=0, atol=get_tolerance(case) * (1 + float(expected.abs().max()))
    )


def read_weights(case: Case, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Return the weights (b, h, q, k) for these inputs, read from a function or returned by a module; None if neither works."""
    if case.subject.form == "qkv":
        weights = read_function_weights(case, inputs)
        return weights if is_weighted_sum(case, weights, inputs) else None
    return get_returned_weights(case, inputs)


def read_weights_or_values(case: Case, inputs: tuple[Tensor, ...], by_values: bool) -> Tensor | None:
    """Return the weights (b, h, q, k) as `read_weights` does, or else, with `by_values`, by the values of a layer."""
    weights = read_weights(case, inputs)
    return case.read_weights_by_values(inputs[0]) if weights is None and by_values else weights


def is_unrecorded(case: Case) -> bool:
    """Return whether no attention call of a layer was recorded, so that its weights have to be read by its values."""
    return case.subject.form == "x" and not case.recorded.calls


def get_returned_weights(case: Case, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Return the weights (b, h, q, k) that a subject returns if they have that shape and add to one or give the context.

    None otherwise.
    """
    returned = case.run_subject(*inputs).weights
    b, q, k = len(inputs[0]), inputs[0].shape[-2], inputs[-1].shape[-2]
    if returned is None or returned.dim() not in (3, 4) or returned.shape[0] != b or returned.shape[-2:] != (q, k):
        return None
    weights = returned.to("cpu", torch.float64).reshape(b, -1, q, k)
    return weights if has_normalized_rows(case, inputs, weights) or is_context_explained(case, inputs, weights) else None


def has_normalized_rows(case: Case, inputs: tuple[Tensor, ...], weights: Tensor) -> bool:
    """Return whether no weight is negative and every row that may see something adds to one."""
    seen = case.get_expected_visibility(*inputs).cpu().any(-1).unsqueeze(1).expand(weights.shape[:-1])
    rows = weights[seen]
    return bool((rows > -get_tolerance(case)).all() and ((rows.sum(-1) - 1).abs() < get_tolerance(case)).all())


def is_context_explained(case: Case, inputs: tuple[Tensor, ...], weights: Tensor) -> bool:
    """Return whether a module's context is these weights times its values, through its output projection.

    A residual may be added.
    """
    if case.subject.form != "x":
        return False
    target = make_target(case, inputs, None)
    near = get_tolerance(case) * (1 + float(target.y.abs().nan_to_num().max()))
    for trial in iterate_trials(case, target, plain=True):
        given, output = trial.given, trial.layout.output
        if given.heads == weights.shape[1]:
            context = join(weights @ share(split(given.v, given.groups), given.heads))
            context = context if output is None else output(context)
            if context.shape != target.y.shape:
                continue
            rest = (target.y - context)[target.finite_rows]
            rests = [rest, rest - target.inputs[0][target.finite_rows]] if target.inputs[0].shape == context.shape else [rest]
            if any(bool((one.abs() < near).all()) for one in rests):
                return True
    return False


def measure_slope(case: Case, by_values: bool = False) -> Slope | None:
    """Return how log weights follow q kᵀ; None if they cannot be read, or are no multiple of it."""
    try:
        return fit_slope(get_double_case(case), by_values)
    except Exception:  # a user's layer may raise anything
        return None


def find_value_shift(case: Case) -> int:
    """Return 1 if the weight of each key is that of the value before it, -1 for the value after it; 0 if neither is seen."""
    slopes = ((n, fit_slope(get_double_case(case), shift=n)) for n in (1, -1))
    return next((n for n, slope in slopes if slope is not None and slope.along > abs(slope.across)), 0)


def fit_slope(case: Case, by_values: bool = False, shift: int = 0) -> Slope | None:
    """Fit log weights to q kᵀ and k qᵀ, by differences between two inputs, which cancel whatever depends on positions alone.

    With a `shift` each weight is that of a key so many tokens later, where both are seen. None if weights cannot be read, or do
    not fit.
    """
    size = choose_small_size(case) * (FURTHER if by_values else 1)
    pairs = [case.make_usual_inputs(seed, size) for seed in (0, 1)]
    found = [read_weights_or_values(case, inputs, by_values) for inputs in pairs]
    seen = case.get_expected_visibility(*pairs[0]).cpu().unsqueeze(1)
    if any(one is None for one in found):
        return None
    weights = [one.roll(shift, -1) for one in found if one is not None]
    if shift:
        seen = seen & (weights[0] > 0) & (weights[1] > 0)
    logs = [one.clamp_min(1e-300).log() for one in weights]
    scores = [compute_scores(case, inputs, logs[0].shape[1]) for inputs in pairs]
    if scores[0] is None or scores[1] is None:
        return None
    change = center_rows(logs[0] - logs[1], seen)
    along = center_rows(scores[0] - scores[1], seen)
    if along.shape[1] != change.shape[1] or not change.isfinite().all():
        return None
    features = [along.flatten()]
    if seen.shape[-1] == seen.shape[-2]:
        features.append(center_rows((scores[0] - scores[1]).mT, seen).flatten())
    a = torch.stack(features, -1)
    fitted = solve_least_squares(a, change.flatten())
    if fitted is None:
        return None
    rest = float((a @ fitted).sub(change.flatten()).norm() / change.norm().clamp_min(1e-300))
    return Slope(float(fitted[0]), float(fitted[1]) if len(fitted) > 1 else 0.0) if rest < LINEAR else None


def compute_scores(case: Case, inputs: tuple[Tensor, ...], heads: int) -> Tensor | None:
    """Compute q kᵀ (b, h, q, k), of a function's own inputs, or by a module's projections with this many heads, else None."""
    if case.subject.form == "qkv":
        q, k = (x.to("cpu", torch.float64) for x in inputs[:2])
        return q @ share(k, q.shape[1]).mT
    trial = find_named_trial(case, inputs, heads)
    if trial is None:
        return None
    return split(trial.given.q, heads) @ share(split(trial.given.k, trial.given.groups), heads).mT


def find_named_trial(case: Case, inputs: tuple[Tensor, ...], heads: int) -> Trial | None:
    """Return a module's projections for these inputs with this many heads, if their names tell which is which; else None."""
    trials = iterate_trials(case, make_target(case, inputs, None), plain=True)
    return next((trial for trial in trials if trial.given.heads == heads and trial.layout.has_known_roles), None)


def find_head_width(case: Case, by_values: bool = False) -> int | None:
    """Return the width of one head of a module whose weights show how many heads there are; else None."""
    weights = read_weights(case, case.make_usual_inputs())
    if weights is None and by_values:
        weights = case.weights_by_values
    trial = None if weights is None else find_named_trial(case, case.make_usual_inputs(), weights.shape[1])
    return None if trial is None else trial.given.width


def choose_small_size(case: Case) -> float:
    """Return the size of inputs at which scores are so small that a softcap changes nothing."""
    inputs = case.make_usual_inputs(0, 1.0)
    scores = compute_scores(case, inputs, 1) if case.subject.form == "x" else compute_scores(case, inputs, inputs[0].shape[1])
    spread = 1.0 if scores is None else float(scores.std()) * inputs[0].shape[-1] ** -0.5
    return (SMALL / spread) ** 0.5 if spread > 0 else 1.0


def center_rows(x: Tensor, seen: Tensor) -> Tensor:
    """Subtract from each row its mean over the keys that are seen; 0 elsewhere."""
    numbers = x.masked_fill(~seen, 0)
    return (numbers - numbers.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).masked_fill(~seen, 0)
