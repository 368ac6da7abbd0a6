"""Check that values and contexts of recorded calls are multiplied by no number: a row of weights sums to one."""

from collections.abc import Iterator, Sequence

from torch import nn

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Finding, Unknown

WHAT = "the scale of values"
NEAR = 1e-3  # of a factor
OFTEN_MEANT = (0.5, 2.0)  # factors of a branch, even if √d is the same number
CURE = "Multiply the scores alone by 1 / √d, before the softmax: context = weights @ v."
MEANT = "nothing, if it is intended: weights of other layers expect a context of weights @ v"


def check_values(calls: Sequence[InnerCall]) -> Finding | Unknown | None:
    """Return that values or contexts are multiplied by a number: a mistake if it is one of scales, else possibly meant."""
    unknown = None
    for one in calls:
        factors = read_factors(one)
        factor = 1.0 if factors is None else factors[0] * factors[1]
        if factors is None or is_near(factor, 1.0):
            continue
        who = describe_product(*factors)
        where, name = one.name or "the layer", next(iterate_names(one, factor), "")
        if name and not is_learned(one.module, factor):
            return Finding("wrong scale", f"in {where} {who} multiplied by {factor:.4g}, {name}", CURE, 1.4, "values", one.name)
        what = f"whether it is intended that in {where} {who} multiplied by {factor:.4g}"
        unknown = unknown or Unknown(what, MEANT)
    return unknown


def read_factors(one: InnerCall) -> tuple[float, float] | None:
    """Return the factors on the outputs of the projection of values and on the context; None if one is not known."""
    v, output = one.v_source, one.output
    is_known = v is not None and bool(v.slices) and not v.is_ambiguous and not v.is_joined
    if v is None or not is_known or output is None or output.wrong or one.absorbed is not None:
        return None
    return v.factor, output.factor


def describe_product(values: float, context: float) -> str:
    """Return which of values and context have a factor other than 1, in words."""
    if is_near(context, 1.0):
        return "values are"
    return "the context is" if is_near(values, 1.0) else "values and their context are"


def iterate_names(one: InnerCall, factor: float) -> Iterator[str]:
    """Yield what a factor is in terms of widths and the number of tokens, in words."""
    d, (_, h, t, _) = one.width, one.call.q.shape
    if any(is_near(factor, other) for other in OFTEN_MEANT):
        return
    for n, what in ((d, "the width of a head"), (h * d, "the width of all heads"), (t, "the number of tokens")):
        for number, words in ((n**0.5, f"√{n}"), (n**-0.5, f"1 / √{n}"), (float(n), f"{n}"), (1 / n, f"1 / {n}")):
            if is_near(factor, number):
                yield f"{words}, where {n} is {what}"


def is_learned(module: nn.Module | None, factor: float) -> bool:
    """Return whether a parameter of a module is this one number."""
    numbers = [] if module is None else [float(one) for one in module.parameters() if one.numel() == 1]
    return any(is_near(number, factor) for number in numbers)


def is_near(factor: float, other: float) -> bool:
    """Return whether two factors are equal up to rounding."""
    return abs(factor - other) <= NEAR * abs(other)
