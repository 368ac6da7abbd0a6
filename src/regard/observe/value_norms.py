"""Norm-weighted attention: `|w_ij| |f(v_j)|`, where f is the head's part of the output projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map import AttentionMap
from regard.mechanism.heads import share
from regard.observe.map_view import MapView, view_map
from regard.observe.score_interval import QueryScores


@dataclass(frozen=True, eq=False)
class NormWeighted:
    """A[i, j] n[j] of a map A, where n (b, h, k), held in `norms`, is the norm of what key j contributes.

    A large weight on a short vector moves little. Shares are relative to a row's Σ_j A[i, j] n[j], held in `total`, (b, h, q).
    Source: Kobayashi et al. 2020, equation 5, f(x) = (x W_value + b_value) W_output.
    """

    look: MapView
    norms: Tensor
    total: Tensor

    def weight_on_first(self) -> Tensor:
        """Return the mean share of the first token, (b, h), over the queries that count and have a total above 0."""
        return self.score_first().mean()

    def score_first(self) -> QueryScores:
        """Return each query's share of the first token."""
        norms = [self.norms[row, :, first] for row, first in enumerate(self.look.first_token_indices)]
        handed, some = self.look.first_token_weight * torch.stack(norms).unsqueeze(-1), self.total > 0
        return self.look.score_queries(handed / self.total.where(some, 1), some)

    def first_value_ratio(self) -> Tensor:
        """Return the norm of the first token's value over the median norm of the other tokens' values, (b, h).

        Far below 1, the weight on the first token moves nothing: the head is parked there. NaN without another token.
        Source: Gu et al. 2024, who find the values of attention sinks to be small.
        """
        ratios = []
        for row, first in enumerate(self.look.first_token_indices):
            others = self.look.is_real_key[row].clone()
            others[:, first] = False
            norms = self.norms[row].double().masked_fill(~others, torch.nan)
            ratios.append(self.norms[row, :, first].double() / norms.nanmedian(-1).values)
        return torch.stack(ratios)


def weight_by_norm(m: AttentionMap | MapView, values: Tensor, projection: Tensor | None = None) -> NormWeighted:
    """Weight a map by the norms of its values (b, g, k, e), or of v W with a projection W (h, e, c)."""
    look = view_map(m)
    found = compute_value_norms(values, look.map.shape, projection).to(look.statistics.largest.dtype)
    return NormWeighted(look, found, (look.map @ found.unsqueeze(-1)).squeeze(-1))


def compute_value_norms(values: Tensor, shape: tuple[int, int, int, int], projection: Tensor | None = None) -> Tensor:
    """Return the norm of each value (b, g, k, e), or of v W with each head's W (h, e, c), as (b, h, k).

    Computed in float32 at least. Raises ShapeError.
    """
    b, h, _, k = shape
    if values.dim() != 4 or values.shape[0] != b or values.shape[2] != k or not values.shape[1] or h % values.shape[1]:
        raise ShapeError(f"values must be (b, g, k, e) = ({b}, {h} or a divisor, {k}, e), got {tuple(values.shape)}.")
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if projection is None:
        return share(values.norm(dim=-1).unsqueeze(-1), h).squeeze(-1)
    if projection.dim() != 3 or projection.shape[:2] != (h, values.shape[3]):
        expected = f"({h}, {values.shape[3]}, c)"
        raise ShapeError(
            f"projection must be (h, e, c) = {expected}, the rows of W_output by head; got {tuple(projection.shape)}."
        )
    gram = projection.to(values.dtype) @ projection.to(values.dtype).mT  # |v W|² = v W Wᵀ vᵀ, without a vector of width c
    groups = values.shape[1]
    found = [(values[:, head * groups // h] @ gram[head] * values[:, head * groups // h]).sum(-1) for head in range(h)]
    return torch.stack(found, 1).clamp(min=0).sqrt()
