"""What a function changes in single rows of scores or weights."""

from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import ROW_MAXIMA, Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.products.score_form import BOUNDS, COPIES, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.products.traces import Trace, Traced, TraceKind
from regard.observe.interception.handwritten.scores.score_parts import FILLED
from regard.observe.interception.plain_tensors import is_distributed

MAXIMA_OF_TWO = {"maximum", "fmax"}


def may_edit_weights(name: str, args: Any, trace: Trace, x: Tensor, y: Tensor) -> bool:
    """Return whether a function of weights x may have changed single rows, as no layout, number or sum of exponentials does."""
    core = strip_affixes(name)
    if core in VIEWS or name in PERMUTES or core in COPIES or core in ("getitem", "square"):
        return False
    if core in QUOTIENTS and trace.function.startswith("exp"):
        return False
    if core in PRODUCTS | QUOTIENTS | {"pow"} and not all(isinstance(one, Tensor) and one.numel() > 1 for one in args):
        return False
    if not can_compare(x, y):
        return True
    offset = x.shape[-1] - x.shape[-2] if x.dim() > 1 else -1  # of a causal mask, which changes no single row
    return not (torch.equal(x, y) or (offset >= 0 and torch.equal(x.tril(offset), y)))


def can_compare(x: Tensor, y: Tensor) -> bool:
    """Return whether the numbers of the result y of a function can be compared with those of its argument x."""
    are_plain = x.layout == y.layout == torch.strided and not is_distributed(x) and not is_distributed(y)
    return x is not y and x.shape == y.shape and x.device == y.device and are_plain


def keeps_numbers(name: str, x: Tensor, y: Tensor) -> bool:
    """Return whether a function bounds the numbers of x, all of which were within its bounds: it is no activation then."""
    return strip_affixes(name) in BOUNDS and can_compare(x, y) and torch.equal(x, y)


def may_edit_scores(name: str, args: Any, kwargs: Any, x: Tensor, y: Tensor) -> bool:
    """Return whether a function of scores x that their formula leaves out may have changed some that are not hidden."""
    core = strip_affixes(name)
    if core not in BOUNDS or keeps_numbers(name, x, y):
        return False
    has_upper = core in ("clamp_max", "nan_to_num") or len(args) > 2 or kwargs.get("max") is not None
    lower = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("other"))
    lower = float(lower) if isinstance(lower, Tensor) and lower.numel() == 1 else lower
    return has_upper or not (lower is None or (isinstance(lower, float | int) and lower <= FILLED))


def find_shifted(role: Role | None, traced: list[Traced], y: Tensor) -> Traced | None:
    """Return the scores from which y subtracts a maximum so far of each row, as in a loop over blocks of keys, if it does."""
    if role is not Role.ADD or len(traced) != 2:
        return None
    known = [one for one in traced if one[1].form is not None and one[0].shape == y.shape]
    scores = [one for one in known if one[1].kind is TraceKind.SCORES or one[1].function == "tanh"]
    others = [one for _, one in traced if one.kind is TraceKind.WEIGHTS and one.function in MAXIMA_OF_TWO]
    return scores[0] if len(scores) == len(others) == 1 else None


def find_scaled(role: Role | None, traced: list[Traced], y: Tensor) -> Traced | None:
    """Return the scores whose rows y multiplies or divides by numbers that were made of scores, as by sums of their sizes.

    There are as many of these numbers as scores if each row has a single key.
    """
    if role is not Role.MULTIPLY or len(traced) != 2:
        return None
    (x, trace), (other, of_rows) = sorted(traced, key=lambda one: (-one[0].numel(), sums_rows(one[1])))
    is_of_one_key = other.shape == x.shape and sums_rows(of_rows) and not sums_rows(trace)
    is_factor = (other.numel() < x.numel() or is_of_one_key) and x.numel() == y.numel() and other.dim() == x.dim()
    return (x, trace) if is_factor and trace.kind is TraceKind.SCORES and trace.pairs else None


def sums_rows(trace: Trace) -> bool:
    """Return whether a tensor was made by a sum, or by the largest, of scores."""
    return any(infer_role(name) is Role.SUM or name in ROW_MAXIMA for name in trace.changes)
