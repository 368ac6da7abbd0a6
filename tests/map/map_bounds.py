"""How far the answers of a map in float32 may lie from the exact ones, which a map in float64 gives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bounds import EXPONENTIAL, AttentionBounds, assert_within, bounds_from_scores, entropy_bound, gamma, logsumexp_bound
from regard import AttentionMap
from regard.map import passes
from regard.map.plane import Plane
from regard.map.pooling import BinnedWeights


@dataclass(frozen=True)
class MapBounds:
    """The bounds of every answer, from the exact weights (..., q, k) and how far each score and weight may be off."""

    exact: Tensor
    scores: Tensor
    weights: Tensor

    @property
    def largest(self) -> Tensor:
        """Of the n-th largest weight of each row, (..., q), for any n: no more than the most that one is off."""
        return self.weights.amax(-1)

    @property
    def received(self) -> Tensor:
        return self.transpose_product_bounds(self.exact.new_ones(self.exact.shape[-2], 1)).squeeze(-1)

    @property
    def shares(self) -> Tensor:
        """Of the sum of the weights in a bin the share of each, (..., q, k)."""
        return self.weights + 2 * gamma(torch.float32, sum(self.exact.shape[-2:])) * self.exact

    def product_bounds(self, v: Tensor) -> Tensor:
        """Of A v."""
        size = v.double().abs()
        return self.weights @ size + 2 * gamma(torch.float32, self.exact.shape[-1]) * (self.exact @ size)

    def transpose_product_bounds(self, r: Tensor) -> Tensor:
        """Of Aᵀ r."""
        size = r.double().abs()
        return self.weights.mT @ size + 2 * gamma(torch.float32, self.exact.shape[-2]) * (self.exact.mT @ size)

    def row_statistics(self, logsumexp: Tensor, offset: int = 0) -> dict[str, Tensor]:
        """Of each of `passes.ROWS`, (..., q)."""
        bounds = AttentionBounds(self.scores, self.weights, self.weights)
        return {
            "logsumexp": logsumexp_bound(torch.float32, bounds, self.exact, logsumexp),
            "entropy": entropy_bound(torch.float32, bounds, self.exact),
            "largest": self.largest,
            "distance": self.distance(offset),
            "first": self.weights[..., 0],
            "itself": take_diagonal(self.weights, offset),
            "previous": take_diagonal(self.weights, offset - 1),
        }

    def distance(self, offset: int) -> Tensor:
        """Of Σ w (position - key), as the difference of two sums."""
        q, k = self.exact.shape[-2:]
        positions, keys = torch.arange(q).unsqueeze(-1) + offset, torch.arange(k)
        off = self.weights * (positions - keys).abs() + 2 * gamma(torch.float32, k) * self.exact * (positions.abs() + keys)
        return off.sum(-1)


def take_diagonal(matrix: Tensor, offset: int) -> Tensor:
    """The number of each row (..., q) at its own position, offset + row; 0 where there is none."""
    q, k = matrix.shape[-2:]
    places = (torch.arange(q) + offset).expand(matrix.shape[:-1])
    there = matrix.gather(-1, places.clamp(0, k - 1).unsqueeze(-1)).squeeze(-1)
    return there.where((places >= 0) & (places < k), 0)


def additive_score_error(weight: Tensor) -> Tensor:
    """How far Σ weight tanh(q + k) is off: the sum, each tanh, and q + k, of whose rounding |x| / cosh² x ≤ 0.45 is left."""
    return (gamma(torch.float32, len(weight)) + gamma(torch.float32, EXPONENTIAL + 1)) * weight.double().abs().sum()


def plane_bounds(double: Plane, *, exact_scores: bool = False) -> MapBounds:
    """The bounds of one matrix, given in float64.

    exact_scores: they are dot products of whole numbers, which float32 holds; what is left is the exponential of a difference.
    """
    (q, k), d = (x.double().abs() for x in (double.q, double.k)), double.q.shape[-1]
    if exact_scores:
        scores = double.compute_scores(double.q, double.k)
        e = gamma(torch.float32, 2) * (scores.amax(-1, keepdim=True) - scores)
    elif double.weight is None:
        operations = gamma(torch.float32, d + 4)
        if double.request.softcap is not None:  # |softcap tanh(s / softcap)| is at most |s|
            operations += gamma(torch.float32, EXPONENTIAL + 2)
        e = operations * abs(double.request.scale) * (q @ k.T)
    else:
        e = additive_score_error(double.weight).expand(len(q), len(k))
    for added in (double.bias, double.sink):
        if added is not None:
            e = e + gamma(torch.float32, 2) * added.double().abs().nan_to_num(posinf=0)
    exact = passes.compute_dense(double)
    found = bounds_from_scores(torch.float32, e, exact, exact.new_zeros(len(k), 1))
    return MapBounds(exact, found.scores, found.weights)


def map_bounds(double: AttentionMap, **options: bool) -> MapBounds:
    """The bounds of all matrices of a map in float64, (b, h, q, k)."""
    parts = [plane_bounds(plane, **options) for plane in double.planes]
    names = ("exact", "scores", "weights")
    return MapBounds(*(torch.stack([getattr(part, name) for part in parts]).view(double.shape) for name in names))


def assert_rows_within(found, expected, allowed, offset):
    """Assert that the row statistics of a traversal in float32 are those of one in float64."""
    bounds = allowed.row_statistics(expected.rows["logsumexp"], offset)
    for name, values in expected.rows.items():
        assert_within(found.rows[name], values, bounds[name], name)


def assert_pictures_within(found, expected, allowed, double):
    """Assert that mean, maximum and sum of each bin are exact within the bounds of its weights, pooled as these are."""
    for how, each in (("mean", allowed.shares), ("max", allowed.weights), ("sum", allowed.shares)):
        bounds = BinnedWeights(double, expected.rows, expected.columns)
        bounds.add(*map(torch.arange, each.shape), each)
        assert_within(found.pool(how), expected.pool(how), bounds.pool(how), how)
