"""A v and Aᵀ r, block by block, A being never stored; differentiable in v and in r."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.map.plane import Plane, product


class Forward(torch.autograd.Function):
    """A v of some planes: v (p, k, e) to (p, q, e)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, planes: Sequence[Plane]) -> Tensor:
        ctx.planes = planes
        return torch.stack([mixed(plane, x) for plane, x in zip(planes, v, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Transposed.apply(gradients[0], ctx.planes), None  # type: ignore[no-untyped-call]


class Transposed(torch.autograd.Function):
    """Aᵀ r of some planes: r (p, q, e) to (p, k, e)."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, planes: Sequence[Plane]) -> Tensor:
        ctx.planes = planes
        return torch.stack([returned(plane, x) for plane, x in zip(planes, r, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Forward.apply(gradients[0], ctx.planes), None  # type: ignore[no-untyped-call]


def mixed(plane: Plane, v: Tensor) -> Tensor:
    """A v of one plane, in v's dtype."""
    exact = v.to(torch.promote_types(v.dtype, plane.q.dtype))
    parts = [product(run.weights.to(exact.dtype), exact[run.columns]) for run in plane.runs()]
    return torch.cat([exact[:0], *parts]).to(v.dtype)


def returned(plane: Plane, r: Tensor) -> Tensor:
    """Aᵀ r of one plane, in r's dtype."""
    exact = r.to(torch.promote_types(r.dtype, plane.q.dtype))
    total = exact.new_zeros(plane.shape[1], r.shape[-1])
    for run in plane.runs():
        total.index_add_(0, run.columns, product(run.weights.to(exact.dtype).T, exact[run.start : run.stop]))
    return total.to(r.dtype)
