"""A v and Aᵀ r, block by block, without storing A; differentiable in v and in r."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.map import fast
from regard.map.plane import Plane, product


class Forward(torch.autograd.Function):
    """A v for some planes: v (p, k, e) to (p, q, e)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, planes: Sequence[Plane]) -> Tensor:
        ctx.planes = planes
        return each(planes, v, fast.mixed, mixed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Transposed.apply(gradients[0], ctx.planes), None  # type: ignore[no-untyped-call]


class Transposed(torch.autograd.Function):
    """Aᵀ r for some planes: r (p, q, e) to (p, k, e)."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, planes: Sequence[Plane]) -> Tensor:
        ctx.planes = planes
        return each(planes, r, fast.returned, returned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Forward.apply(gradients[0], ctx.planes), None  # type: ignore[no-untyped-call]


Quick = Callable[[Plane, int, Tensor], Tensor | None]


def each(planes: Sequence[Plane], x: Tensor, quick: Quick, plain: Callable[[Plane, Tensor], Tensor]) -> Tensor:
    """Compute the products of planes with x (p, n, e), compiled where possible, in x's dtype."""
    found: list[Tensor | None] = [None] * len(planes)
    if planes and fast.suits(planes[0]) and x.shape[-1] and torch.promote_types(x.dtype, torch.float32) == torch.float32:
        exact = dict(zip(planes, x.float(), strict=True))
        found = fast.each(planes, lambda plane, threads: quick(plane, threads, exact[plane]))
    parts = zip(planes, x, found, strict=True)
    return torch.stack([(plain(plane, part) if one is None else one).to(x.dtype) for plane, part, one in parts])


def mixed(plane: Plane, v: Tensor) -> Tensor:
    """Compute A v for one plane, in v's dtype."""
    exact = v.to(torch.promote_types(v.dtype, plane.q.dtype))
    parts = [product(run.weights.to(exact.dtype), exact[run.columns]) for run in plane.runs()]
    return torch.cat([exact[:0], *parts]).to(v.dtype)


def returned(plane: Plane, r: Tensor) -> Tensor:
    """Compute Aᵀ r for one plane, in r's dtype."""
    exact = r.to(torch.promote_types(r.dtype, plane.q.dtype))
    total = exact.new_zeros(plane.shape[1], r.shape[-1])
    for run in plane.runs():
        total.index_add_(0, run.columns, product(run.weights.to(exact.dtype).T, exact[run.start : run.stop]))
    return total.to(r.dtype)
