"""A v and Aᵀ r, block by block, without storing A; differentiable in v and in r."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.map import compiled_passes, pass_runner, small_maps
from regard.map.plane import DenominatorCache, Denominators, Plane, multiply_exactly

MOST_WEIGHTS = 2**14  # of a plane, up to which a product of several takes less time than compiled ones of each


class ApplyWeights(torch.autograd.Function):
    """A v for some planes, v (p, k, e) to (p, q, e); transposed Aᵀ r, r (p, q, e) to (p, k, e)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: Sequence[Plane], cache: DenominatorCache, is_transposed: bool) -> Tensor:
        ctx.given = planes, cache, not is_transposed
        return multiply_planes(planes, x, cache, is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ApplyWeights.apply(gradients[0], *ctx.given), None, None, None  # type: ignore[no-untyped-call]


def multiply_planes(planes: Sequence[Plane], x: Tensor, cache: DenominatorCache, is_transposed: bool) -> Tensor:
    """Compute the products of planes, or of their transposes, with x (p, n, e), compiled where possible, in x's dtype.

    The compiled products also compute the denominators, which are added to the cache.
    """
    quick = compiled_passes.apply_transposed_weights if is_transposed else compiled_passes.apply_weights
    plain = apply_transposed_weights if is_transposed else apply_weights
    found: list[tuple[Tensor, Denominators] | None] = [None] * len(planes)
    if planes and are_worth_batch(planes):
        return multiply_batches(planes, x, is_transposed)
    if (
        planes
        and compiled_passes.can_run_compiled(planes[0])
        and x.shape[-1]
        and torch.promote_types(x.dtype, torch.float32) == torch.float32
    ):
        exact = dict(zip(planes, x.float(), strict=True))
        found = pass_runner.run_planes(planes, lambda plane, threads: quick(plane, threads, exact[plane]))
    products = []
    for plane, part, one in zip(planes, x, found, strict=True):
        if one is not None:
            cache.add([(plane.b, plane.h)], one[1][None])
        products.append((plain(plane, part) if one is None else one[0]).to(x.dtype))
    return torch.stack(products)


def are_worth_batch(planes: Sequence[Plane]) -> bool:
    """Return whether several planes are multiplied together: small ones, and those on a GPU."""
    request, count = planes[0].request, len(planes)
    is_small = planes[0].shape[0] * planes[0].shape[1] <= MOST_WEIGHTS and small_maps.is_worth_batch(request, count)
    return is_small or small_maps.is_gpu_batch(request, count)


def multiply_batches(planes: Sequence[Plane], x: Tensor, is_transposed: bool) -> Tensor:
    """Compute the products of small planes of one request with x (p, n, e), several at a time, in x's dtype."""
    pairs = torch.tensor([(plane.b, plane.h) for plane in planes], device=x.device)
    products: list[Tensor] = []
    for batch in small_maps.iterate_batches(planes[0].request, pairs):
        first = sum(map(len, products))
        part = x[first : first + len(batch.weights)]
        exact = torch.promote_types(x.dtype, batch.weights.dtype)
        weights = batch.weights.mT if is_transposed else batch.weights
        products.append(multiply_exactly(weights.to(exact), part.to(exact)).to(x.dtype))
    return torch.cat(products)


def apply_weights(plane: Plane, v: Tensor) -> Tensor:
    """Compute A v for one plane, in v's dtype."""
    exact = v.to(torch.promote_types(v.dtype, plane.q.dtype))
    parts = [multiply_exactly(run.weights.to(exact.dtype), exact[run.columns]) for run in plane.iterate_runs()]
    return torch.cat([exact[:0], *parts]).to(v.dtype)


def apply_transposed_weights(plane: Plane, r: Tensor) -> Tensor:
    """Compute Aᵀ r for one plane, in r's dtype."""
    exact = r.to(torch.promote_types(r.dtype, plane.q.dtype))
    total = exact.new_zeros(plane.shape[1], r.shape[-1])
    for run in plane.iterate_runs():
        total.index_add_(0, run.columns, multiply_exactly(run.weights.to(exact.dtype).T, exact[run.start : run.stop]))
    return total.to(r.dtype)
