"""Explain weights that are no softmax, and scores that are changed before it: a relu, squares, a clamp, or //."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.function_calls import FunctionCall, record_functions
from regard.examination.call_reading.inner_calls import RecordedCalls, WeightMatrix
from regard.examination.call_reading.rounding import solve_least_squares
from regard.examination.identify.mistakes import AXES, MASK, NORMS, ROLES, SOFTMAX
from regard.examination.report import Finding
from regard.observe.interception.function_roles import MULTIPLIES

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of sums that are one, and of weights that are equal
BIAS = "Add the bias to the scores before the softmax: weights = torch.softmax(scores + bias, dim=-1)."
KERNEL = "scaled_dot_product_attention"
SUMS = ("add", "sub", "rsub", "iadd", "isub", "radd", "subtract")
MINUS = "Differential attention subtracts the second softmax: weights = first - lambda_ * second."
TURN = "Multiply the weights (q, k) by the values, without a transpose: context = weights @ v."
AFTER = "Scale the scores before the softmax, not the weights after it."
ONCE = f"Apply the softmax once, over the keys: {SOFTMAX}."
LAST = 4  # products of a module that are compared
HIDDEN = -1e4  # scores below it are those of hidden keys
LARGE = 5.0  # a bound of scores that usual inputs hardly reach
NONE = 1e-6  # a factor that is none
LEAST = 8  # scores of which a factor is read


def check_matrices(module: nn.Module, run: Callable[[], object], recorded: RecordedCalls) -> Iterator[Finding]:
    """Yield the mistakes that explain weights that are no softmax, or a softmax of a softmax."""
    added = find_added_context(module, run, recorded)
    if added is not None:
        yield added
        return
    if not recorded.matrices and not any(one.is_stored_as_weights for one in recorded.calls):
        return
    softmaxes, products = record_softmaxes(run, module)
    for one in recorded.matrices:
        wrong = (
            find_transposed_weights(one, softmaxes)
            or find_wrong_axis(one)
            or find_added_softmax(module, one)
            or find_change_after(one, softmaxes)
        )
        if wrong is not None:
            kind, does, cure = wrong
            yield Finding(kind, f"in {one.name or 'the layer'} {does}", cure, 1.7, "softmax", one.name)
            return
    twice = find_second_softmax(softmaxes)
    if twice is not None:
        yield Finding("not normalised", f"in {twice or 'the layer'} {NORMS['twice']}", ONCE, 1.7, "softmax", twice)
        return
    yield from find_changed_scores(softmaxes, products)


def check_function(call: Callable[[], object]) -> Iterator[Finding]:
    """Yield what a function, of no module, does to its scores before their softmax."""
    yield from find_changed_scores(*record_softmaxes(call), "the function")


def find_changed_scores(
    softmaxes: Sequence[FunctionCall], products: Mapping[str, list[Tensor]], subject: str = "the layer"
) -> Iterator[Finding]:
    """Yield the first change of scores between a product and the softmax that they are given to."""
    for call in softmaxes:
        around = call.module.rpartition(".")[0]  # of a module that is a softmax alone
        change = explain_scores(call.given, products.get(call.module) or products.get(around, []))
        if change is not None:
            sentence = f"in {call.module or subject} {change.does}"
            yield Finding("wrong scores", sentence, change.cure, 1.7, "scores", call.module)
            return


def find_log_weights(module: nn.Module, run: Callable[[], object]) -> str | None:
    """Return the first module that multiplies by what log_softmax returned, "" for the whole; None if none does."""
    try:
        calls = record_functions(("log_softmax", *MULTIPLIES), run, module)
    except Exception:  # whatever a user's layer raises: another probe reports it
        return None
    logarithms = [one.made.flatten() for one in calls if one.name == "log_softmax"]
    products = (one for one in calls if one.name != "log_softmax" and one.made.dim() > 2 and logarithms)  # no loss's
    return next((one.module for one in products if any(torch.equal(one.given.flatten(), x) for x in logarithms)), None)


def find_added_context(module: nn.Module, run: Callable[[], object], recorded: RecordedCalls) -> Finding | None:
    """Return that the contexts of two kernels are added in differential attention, which subtracts the second one."""
    counts = Counter(one.name for one in recorded.calls)
    if not any(count == 2 and has_lambda(module.get_submodule(name)) for name, count in counts.items()):
        return None
    contexts: dict[str, list[Tensor]] = {}
    for one in record_functions((KERNEL, *SUMS), run, module):
        made = contexts.setdefault(one.module, [])
        if one.name == KERNEL:
            made.append(one.made)
        elif len(made) == 2 and one.made.shape == made[0].shape and has_lambda(module.get_submodule(one.module)):
            first, second, total = (x.double().flatten() for x in (*made, one.made))
            factors = solve_least_squares(torch.stack((first, second), 1), total)
            if factors is None or not bool((factors > 1e-3).all()):
                continue
            if (factors[0] * first + factors[1] * second - total).abs().max() < 1e-4 * total.abs().max():
                does = f"the second context is added to the first, times {float(factors[1] / factors[0]):.3g}"
                where = one.module or "the layer"
                return Finding("not normalised", f"in {where} {does}", MINUS, 1.7, "softmax", one.module)
    return None


def record_softmaxes(
    run: Callable[[], object], module: nn.Module | None = None
) -> tuple[list[FunctionCall], dict[str, list[Tensor]]]:
    """Return each softmax of a run, as (b, h, q, k), and the products of each part of a module; empty if it raises."""
    softmaxes, products = list[FunctionCall](), dict[str, list[Tensor]]()
    try:
        calls = record_functions(("softmax", *MULTIPLIES), run, module)
    except Exception:  # whatever a user's layer raises: another probe reports it
        return [], {}
    for one in calls:
        if one.name != "softmax":
            products.setdefault(one.module, []).append(one.made)
        elif one.made.dim() in (3, 4):
            given, made = (x.unsqueeze(1) if x.dim() == 3 else x for x in (one.given, one.made))
            softmaxes.append(one._replace(given=given, made=made))
    return softmaxes, products


def get_tolerance(one: WeightMatrix, softmaxes: Sequence[FunctionCall] = ()) -> float:
    """Return the difference below which two weights may be the same."""
    return max([NEAR.get(call.made.dtype, 0.03) for call in softmaxes if call.made.shape == one.weights.shape] or [1e-4])


def find_transposed_weights(one: WeightMatrix, softmaxes: Sequence[FunctionCall]) -> tuple[str, str, str] | None:
    """Return that the queries and keys of a softmax are exchanged in the weights; None if they are not."""
    near, weights = get_tolerance(one, softmaxes), one.weights.cpu()
    for made in (call.made.double().cpu() for call in softmaxes if call.module == one.name):
        if made.mT.shape == weights.shape and bool(((made.mT - weights).abs() < near).all()):
            return None if bool(((made - weights).abs() < near).all()) else ("wrong roles", ROLES["turned"], TURN)
    return None


def find_wrong_axis(one: WeightMatrix) -> tuple[str, str, str] | None:
    """Return that weights sum to one over another axis than the keys; None if over none, or over the keys as well."""
    cure = f"Let each query's row sum to one: {SOFTMAX}."
    axes: dict[str, int | tuple[int, int]] = {"queries": -2, "heads": 1, "batch": 0, "heads and keys": (1, 3)}
    for name, axis in axes.items():
        sizes = [one.weights.shape[n] for n in ((axis,) if isinstance(axis, int) else axis)]
        if min(sizes) > 1 and bool(((one.weights.sum(axis) - 1).abs() < get_tolerance(one)).all()):
            return "wrong axis", AXES[name], cure
    return None


def find_added_softmax(module: nn.Module, one: WeightMatrix) -> tuple[str, str, str] | None:
    """Return that a second softmax is added in differential attention, which subtracts it."""
    if one.mixing is None or not has_lambda(module.get_submodule(one.name)):
        return None
    factors = one.mixing[0, 0][one.mixing[0, 0] != 0]
    if len(factors) != 2 or not bool((one.mixing >= 0).all()):
        return None
    made = f"the weights are a softmax plus {float(factors.min()):.3g} times another one"
    return "not normalised", f"{made}, and rows sum to {float(factors.sum()):.3g}", MINUS


def has_lambda(part: nn.Module) -> bool:
    """Return whether a module has a weight or an attribute that is named lambda, as in differential attention."""
    names = [*(name for name, _ in part.named_parameters()), *vars(part)]
    return any("lambda" in name or name.startswith("lam") for name in names)


def find_change_after(one: WeightMatrix, softmaxes: Sequence[FunctionCall]) -> tuple[str, str, str] | None:
    """Return what was done to weights after their softmax: a mask, a bias or a factor; None if that is not known."""
    near = get_tolerance(one, softmaxes)
    for call in softmaxes:
        made = call.made.double().cpu()
        if call.module != one.name or made.shape != one.weights.shape:
            continue
        if bool(((made.sum(-1) - 1).abs() > near).any()):
            continue
        weights = one.weights.cpu()
        kept = weights != 0
        if bool(((weights - made)[kept].abs() < near).all()) and bool((made[~kept] > near).any()):
            return "not normalised", "weights are set to 0 after the softmax, and rows no longer sum to one", MASK
        extra = weights - made
        if len(extra) > 1 and bool(((extra - extra[:1]).abs() < near).all()) and float(extra.abs().max()) > near:
            return "not normalised", describe_bias(extra), BIAS
        factor = float((weights * made).sum() / made.square().sum())
        if bool(((weights - factor * made).abs() < near).all()) and abs(factor - 1) > near:
            return "wrong scale", f"the weights are multiplied by {factor:.4g} after the softmax", AFTER
    return None


def describe_bias(extra: Tensor) -> str:
    """Describe a bias that is added to weights."""
    rows = (1 + extra.sum(-1)).flatten()
    return (
        "the same numbers are added to the weights of all sequences after the softmax, such as a bias by distance: rows sum to "
        f"{float(rows.min()):.3g} to {float(rows.max()):.3g}"
    )


def find_second_softmax(softmaxes: Sequence[FunctionCall]) -> str | None:
    """Return the module in which a softmax is given weights that a softmax made, masked or not; None if there is none."""
    for first, second in itertools.pairwise(softmaxes):
        if first.module != second.module or first.made.shape != second.given.shape:
            continue
        kept = second.given > -1e4  # others are hidden
        if bool(kept.any()) and bool(((second.given - first.made).abs()[kept] < 1e-6).all()):
            return second.module
    return None


class ScoreChange(NamedTuple):
    """What is done to scores, in words, and the cure."""

    does: str
    cure: str


PLAIN = "Give the softmax the scores themselves: weights = torch.softmax(scores, dim=-1)."
DIVIDE = "Divide with / in place of //: scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])."
BOUND = "Leave the clamp out; a softcap bounds scores and keeps their gradient: scores = cap * torch.tanh(scores / cap)."


def explain_scores(given: Tensor, products: Sequence[Tensor]) -> ScoreChange | None:
    """Return what was done to the last of these products before it was given to a softmax; None if nothing, or not this."""
    near = NEAR.get(given.dtype)
    if near is None:
        return None
    for product in reversed(products[-LAST:]):
        if product.numel() == given.numel():
            x, y = product.double().reshape(given.shape), given.double()
            seen = y > HIDDEN
            found = explain_change(x[seen], y[seen], near * float(y[seen].abs().max())) if seen.any() else None
            if found is not None:
                return found
    return None


def explain_change(x: Tensor, y: Tensor, near: float) -> ScoreChange | None:
    """Return what makes scores y of products x (n,), up to a positive factor; None if nothing, or none of these changes."""
    if is_rounded_down(x, y):
        return ScoreChange("scores are rounded down to whole numbers before the softmax, as by //", DIVIDE)
    low, high = float(y.min()), float(y.max())
    inside = (y > low + near) & (y < high - near) & (x > 0)
    if int(inside.sum()) < LEAST or near == 0:
        return None
    factor = float((x * y)[inside].sum() / x[inside].square().sum())
    scores = factor * x

    def is_equal(other: Tensor) -> bool:
        return bool(((y - other).abs() <= 10 * near).all())

    if factor <= 0 or is_equal(scores):
        return None
    if is_equal(scores.abs()):
        return ScoreChange("absolute values of scores go into the softmax: opposite keys have the weight of equal ones", PLAIN)
    if is_equal(x.square() * float((y * x.square()).sum() / x.square().square().sum())):
        return ScoreChange("scores are squared before the softmax: opposite keys have the weight of equal ones", PLAIN)
    negative = x < 0
    slope = float((y * scores)[negative].sum() / scores[negative].square().sum()) if negative.any() else 1.0
    if is_equal(torch.where(negative, slope * scores, scores)):
        does = "set to 0 before the softmax, as by relu" if slope < NONE else f"multiplied by {slope:.3g} before the softmax"
        return ScoreChange(f"negative scores are {does}", PLAIN)
    if is_equal(scores.clamp(low, high)):
        bounds = {"below": (low, (scores < low - near).any()), "above": (high, (scores > high + near).any())}
        reached = [
            f"{bound:.4g} from {side}" for side, (bound, is_active) in bounds.items() if is_active and abs(bound) < LARGE
        ]
        if reached:
            does = f"scores are clamped to {' and '.join(reached)}"
            return ScoreChange(f"{does}: keys beyond have one weight, and get no gradient", BOUND)
    return None


def is_rounded_down(x: Tensor, y: Tensor) -> bool:
    """Return whether one positive factor makes all of x (n,) products whose whole numbers below are y, which are several."""
    if len(y) < LEAST or not torch.equal(y, y.floor()) or bool((y == y[0]).all()) or not bool(x.all()):
        return False
    ends = torch.stack((y / x, (y + 1) / x))  # between which the factor is
    least, most = float(ends.amin(0).max()), float(ends.amax(0).min())
    return 0 < least <= most
