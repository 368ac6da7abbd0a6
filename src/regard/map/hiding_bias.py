"""Masks inside a bias: -1e9 or the smallest number of a dtype, added to the scores, hides a key as -inf does."""

import math

import torch
from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.map.distance_products import DistanceProducts
from regard.map.grid_bias import GridBias
from regard.map.grouped_bias import GroupedBias
from regard.map.relative_bias import RelativeBias
from regard.mechanism.request import Request
from regard.mechanism.scores import score_dtype

BLOCK_NUMBERS = 2**22  # entries of a bias that are compared at a time
SPARE = 1.001  # times a bound of the scores: more than they are rounded by


def find_hiding_bias(request: Request) -> float:
    """Return the largest number in the bias that hides its key as -inf does; -inf if no other number does.

    Numbers that hide lie below a gap: beside any number above it their weight underflows to 0, for every query and key of the
    request. A bias that falls with distance has no such gap, since its steps are small. A row in which every number hides is
    masked out everywhere, though its softmax has weights; so 0, which hides nothing, counts as one of the numbers. Products
    with distances count as scores, and hide nothing.
    """
    bias, products = request.bias, 0.0
    if isinstance(bias, DistanceProducts):
        products, bias = bias.bound(), bias.rest
    exact = torch.finfo(score_dtype(request.q.dtype))
    underflow = 1 + math.log(2) - math.log(exact.smallest_normal) - math.log(exact.eps)
    if bias is None or not bias.numel() or (isinstance(bias, GroupedBias | GridBias) and bias.bound() <= underflow):
        return -math.inf
    blocks = split_entries(bias)
    found, lowest = -math.inf, find_lowest(blocks, -math.inf)
    if lowest < -underflow:
        reach = underflow + 2 * SPARE * (bound_scores(request) + products)
        while lowest < -underflow:
            hiding, shown = find_highest(blocks, lowest / 2), find_lowest(blocks, lowest / 2)
            if not shown - hiding > reach - 2 * exact.eps * lowest:  # nor if the bound is NaN
                break
            found, lowest = hiding, shown
    return found + SPARE * products


def replace_hiding_numbers(request: Request) -> Request:
    """Return the request with -inf for each number of its bias that hides its key, or the request itself if none does."""
    hiding, bias = find_hiding_bias(request), request.bias
    if bias is None or hiding == -math.inf:
        return request
    return request._replace(bias=hide_numbers(bias, hiding))


def hide_numbers(bias: Tensor, most: float) -> Tensor:
    """Return a bias with -inf for each of its numbers that is at most `most`."""
    if isinstance(bias, DistanceProducts):
        return bias if bias.rest is None else bias.with_rest(hide_numbers(bias.rest, most))
    entries = drop_repeats(bias)
    replaced = entries.masked_fill(entries <= most, -math.inf)
    if isinstance(bias, RelativeBias):
        return bias.copy_with(replaced.expand(bias.numbers.shape))
    return replaced.expand(bias.shape)


def drop_repeats(bias: Tensor) -> Tensor:
    """Return the numbers of a bias, of a relative one its diagonals, with size 1 for each axis along which it is expanded."""
    return drop_repeated_axes(bias.numbers if isinstance(bias, RelativeBias) else bias)


def split_entries(bias: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of a bias in blocks, without the repeats of axes along which it is expanded."""
    blocks: tuple[Tensor, ...] = drop_repeats(bias).flatten().split(BLOCK_NUMBERS)
    return blocks


def find_lowest(blocks: tuple[Tensor, ...], above: float) -> float:
    """Return the smallest number larger than `above`, or 0 if that is smaller."""
    return float(torch.stack([block.where(block > above, 0).amin() for block in blocks]).amin())


def find_highest(blocks: tuple[Tensor, ...], most: float) -> float:
    """Return the largest number of at most `most`; -inf if there is none."""
    return float(torch.stack([block.where(block <= most, -math.inf).amax() for block in blocks]).amax())


def bound_scores(request: Request) -> float:
    """Return a bound of the size of the scores before the bias is added; not finite if queries or keys are not."""
    exact = score_dtype(request.q.dtype)
    if request.weight is not None:  # times tanh
        bound = float(request.weight.abs().sum(dtype=exact))
    else:
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=exact).amax() if x.numel() else 0 for x in (request.q, request.k)]
        bound = float(longest[0]) * float(longest[1])
    bound *= abs(request.scale)
    return bound if request.softcap is None else min(bound, request.softcap)
