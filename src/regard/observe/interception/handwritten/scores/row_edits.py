"""What a function changes in single rows of scores or weights."""

from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.score_form import BOUNDS, COPIES, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.products.traces import Trace
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
