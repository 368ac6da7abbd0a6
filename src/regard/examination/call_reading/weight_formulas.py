"""Name how weights that are no softmax are made of the products of queries and keys, and what is done to sinks after it.

Linear attention by design has features, decays, gates or norms, and sigmoid attention a constant beside its scores.
Source: Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid Self-Attention, section 3.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from regard.examination.call_reading.function_calls import FunctionCall
from regard.examination.call_reading.rounding import is_near
from regard.examination.call_reading.terms import find_sinks
from regard.examination.identify.mistakes import NORMS

OFF = 0.02  # of the scale 1 / √d
LEAST = 8  # weights of which a factor is read
POWERS = {"sum": 1.0, "absolute sum": 1.0, "length": 2.0}  # of the absolute weights of a row, whose sum is one
SINKS = "Put sinks beside the scores, and leave their own weights out: torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]."
OTHER_KEY = "the weight of a key is left out after the softmax, not that of the sink: each value has the weight of another key"
AGAIN = "weights are divided by their sum again after the sinks are left out, so that the sinks change nothing"
AFTER = "sinks are a factor of each head after the softmax: its rows sum to one number, whatever their scores"


def explain_weights(weights: Tensor, products: Sequence[Tensor], width: int) -> str:
    """Return how weights (b, h, q, k) are made of one of these products of heads of a width, in words; "" if not known."""
    for product in reversed(products):
        if product.numel() != weights.numel():
            continue
        scores = product.double().reshape(weights.shape)
        found = name_function(weights, scores, width**-0.5) or name_divisor(weights, scores)
        if found:
            return NORMS[found]
    return ""


def describe_late_mask(weights: Tensor, softmaxes: Sequence[FunctionCall]) -> str:
    """Return that large negative numbers hide keys after the softmax, of weights (b, h, q, k), in words; "" if none do."""
    hidden = weights < -1
    kept = weights.masked_fill(hidden, 0)
    for made in (one.made.double() for one in softmaxes if hidden.any()):
        if made.shape == weights.shape and is_near(made.masked_fill(hidden, 0), kept):
            number = float(weights[hidden].median())
            return f"keys are hidden after the softmax: their weights are about {number:.0e}, which multiply their values"
    return ""


def name_function(weights: Tensor, scores: Tensor, scale: float) -> str:
    """Return the function of each scaled score that gives its weight, as in NORMS; "" if it is none, or has another scale."""
    seen = weights != 0
    if int(seen.sum()) < LEAST:
        return ""
    x, y = scores[seen], weights[seen]
    made = {"none": y, "sigmoid": y.logit()}
    for name, given in made.items():
        factor = float((x * given).sum() / x.square().sum()) if bool(given.isfinite().all()) else 0.0
        if abs(factor / scale - 1) < OFF and is_near(factor * x, given):
            return name
    return ""


def name_divisor(weights: Tensor, scores: Tensor) -> str:
    """Return what of its own each row of scores was divided by, as in NORMS; "" if by nothing, or if no weight is negative.

    Positive scores are those of features, as in linear attention.
    """
    if not bool((weights < 0).any()):
        return ""
    seen = weights != 0
    kept = torch.where(seen, scores, 0.0)
    factors = (weights * kept).sum(-1, keepdim=True) / kept.square().sum(-1, keepdim=True)
    if not is_near(factors * kept, weights):
        return ""
    sums = {name: (weights if name == "sum" else weights.abs() ** power).sum(-1) for name, power in POWERS.items()}
    return next((name for name, rows in sums.items() if is_near(rows, torch.ones_like(rows))), "")


def explain_sinks(module: nn.Module, weights: Tensor, softmaxes: Sequence[FunctionCall]) -> str:
    """Return what is wrong with the sinks that a module holds, of weights (b, h, q, k), in words; "" if nothing is seen."""
    h, k = weights.shape[1], weights.shape[3]
    sinks = next((found for part in module.modules() if (found := find_sinks(part, h)) is not None), None)
    if sinks is None:
        return ""
    for given, made in ((one.given, one.made.double()) for one in softmaxes):
        if made.shape[:3] != weights.shape[:3] or made.shape[3] not in (k, k + 1):
            continue
        if made.shape[3] == k:
            factors = (weights * made).sum((0, 2, 3), keepdim=True) / made.square().sum((0, 2, 3), keepdim=True)
            return AFTER if is_near(factors * made, weights) and not is_near(made, weights) else ""
        return next(iterate_mistakes(weights, given, made, sinks.detach().double().reshape(1, h, 1)), "")
    return ""


def iterate_mistakes(weights: Tensor, given: Tensor, made: Tensor, sinks: Tensor) -> Iterator[str]:
    """Yield what was done to weights of a softmax (b, h, q, k + 1) over k keys and a sink, its first or last column."""
    k = weights.shape[-1]
    for place, start in ((k, 0), (0, 1)):
        if not is_near(given[..., place].double(), sinks.expand(given.shape[:3])):
            continue
        kept, other = made.narrow(-1, start, k), made.narrow(-1, 1 - start, k)
        if is_near(weights, kept):
            return
        if is_near(weights, other):
            yield OTHER_KEY
        if is_near(weights, kept / kept.sum(-1, keepdim=True)):
            yield AGAIN
