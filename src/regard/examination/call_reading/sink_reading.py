"""Find what is done to the sinks of a layer, whose weights are read by its values, after the softmax that they stand in.

A sink takes its part of each row by its score; its weight is left out then, and nothing else.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from regard.examination.call_reading.function_calls import FunctionCall
from regard.examination.call_reading.rounding import is_near
from regard.examination.call_reading.terms import find_sinks

CURE = "Put sinks beside the scores, and leave their own weights out: torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]."
OTHER = "the weight of a key is left out after the softmax, not that of the sink: each value has the weight of another key"
AGAIN = "weights are divided by their sum again after the sinks are left out, so that the sinks change nothing"
AFTER = "sinks are a factor of each head after the softmax: its rows sum to one number, whatever their scores"


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
            yield OTHER
        if is_near(weights, kept / kept.sum(-1, keepdim=True)):
            yield AGAIN
