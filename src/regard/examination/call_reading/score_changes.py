"""Find what is done to each score of a product before its softmax: a relu, absolute values, squares, a clamp, or //.

The numbers that a softmax is given are compared, up to a factor, with the products of the same size in its module.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAST = 4  # products of a module that are compared
HIDDEN = -1e4  # scores below it are those of hidden keys
LARGE = 5.0  # a bound of scores that usual inputs hardly reach
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest score
NONE = 1e-6  # a factor that is none
LEAST = 8  # scores of which a factor is read


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
