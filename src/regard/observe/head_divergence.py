"""Jensen-Shannon divergence of two rows of weights, nats, and its matrix between heads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map import AttentionMap
from regard.map.plane import BLOCK_NUMBERS
from regard.mechanism.arguments import check_count
from regard.observe.map_view import SAMPLE, MapView, select_spaced, view_map

OPERATIONS = 10  # rounding steps of a weight besides the sum: exponential, division, order


@dataclass(frozen=True, eq=False)
class Similarity:
    """The divergence between heads, (n, n), nats: 0 for heads that attend alike, log 2 for heads that share no key.

    heads names them as (map, head). The mean is over `rows` queries of each batch row; `exact` states whether these are all.
    """

    heads: tuple[tuple[int, int], ...]
    divergence: Tensor
    rows: int
    is_exact: bool


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return ½ Σ p log(p / m) + ½ Σ q log(q / m), m = (p + q) / 2, over the last axis, nats; between 0 and log 2.

    What a row lacks of 1, because of a sink or because its query sees nothing, counts as one more key.
    Source: Lin 1991.
    """
    return elementwise_divergence(p, q).sum(-1) + elementwise_divergence(missing_weight(p), missing_weight(q))


def missing_weight(p: Tensor) -> Tensor:
    """Return what a row lacks of 1, beyond the rounding error of its sum."""
    lack = 1 - p.sum(-1, dtype=torch.float64)
    return lack.where(lack > sum_error_bound(p.dtype, p.shape[-1]), 0).to(p.dtype)


def sum_error_bound(dtype: torch.dtype, keys: int) -> float:
    """Return γ(n) = min(n, 4 √n) u, n = keys + 10: a bound on |sum - 1| for weights whose total was summed in `dtype`.

    Source: Higham and Mary 2019, theorem 2.4, with λ = 4: to first order in u, half the distance from 1 to the next number.
    """
    terms = keys + OPERATIONS
    return min(terms, 4 * math.sqrt(terms)) * torch.finfo(dtype).eps / 2


def elementwise_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return ½ p log(p / m) + ½ q log(q / m), entry by entry."""
    both = p + q
    tilt = (p - q) / both.where(both > 0, 1)  # p / m = 1 + tilt, whose logarithm keeps small differences
    apart: Tensor = torch.special.xlog1py(1 + tilt, tilt) + torch.special.xlog1py(1 - tilt, -tilt)
    return both / 4 * apart


def similarity(maps: AttentionMap | MapView | Sequence[AttentionMap | MapView], rows: int = SAMPLE) -> Similarity:
    """Compute the mean Jensen-Shannon divergence of every two heads of a map, or of several maps of the same text.

    The mean is over at most `rows` evenly spaced queries of each batch row that are not padding; for two heads, over those that
    see something in both. Time grows with the square of the number of heads, memory linearly. Raises ShapeError for maps of
    different shapes.
    Source: Clark et al. 2019, section 6.
    """
    looks = [view_map(m) for m in (maps if isinstance(maps, Sequence) else [maps])]
    shapes = {(look.map.shape[0], *look.map.shape[2:]) for look in looks}
    if len(shapes) != 1:
        raise ShapeError(f"similarity needs maps of one shape apart from their heads, got (b, q, k) = {sorted(shapes)}.")
    check_count("rows", rows)
    heads = tuple((n, head) for n, look in enumerate(looks) for head in range(look.map.shape[1]))
    total = torch.zeros(len(heads), len(heads), dtype=torch.float64, device=looks[0].map.device)
    count = torch.zeros_like(total)
    chosen = [select_spaced(among.any(0), rows) for among in looks[0].is_token]
    for weights, counts in iterate_rows(looks, chosen):
        for n, mine in enumerate(weights):
            among = counts[n] & counts[: n + 1]
            total[n, : n + 1] += jensen_shannon(mine.expand_as(weights[: n + 1]), weights[: n + 1]).where(among, 0).sum(-1)
            count[n, : n + 1] += among.sum(-1)
    total, count = total + total.tril(-1).mT, count + count.tril(-1).mT
    exact = all(len(queries) == int(among.any(0).sum()) for queries, among in zip(chosen, looks[0].is_token, strict=True))
    return Similarity(heads, total / count, max(len(queries) for queries in chosen), exact)


def iterate_rows(looks: Sequence[MapView], chosen: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of all heads (n, r, k) in blocks, and which of these count, (n, r)."""
    heads, k = sum(look.map.shape[1] for look in looks), looks[0].map.shape[3]
    for row, queries in enumerate(chosen):
        for some in queries.split(max(1, BLOCK_NUMBERS // max(heads * k, 1))):
            weights = torch.cat([look.map[row, :, some] for look in looks])
            standing = torch.cat([look.is_token[row, :, some] for look in looks])
            yield weights, standing & (weights != 0).any(-1)
