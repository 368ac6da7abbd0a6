"""Scores of heads of layers without a softmax: on which keys the absolute values of their entries lie."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.convolution import Convolution
from regard.map.implicit_map import ImplicitMap
from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.classification.head_scores import HeadOptions
from regard.observe.score_interval import UNLIMITED, QueryScores, Score, estimate_all_scores

HEADS = 32  # whose blocks are computed side by side, so that they share what is known of the places
DISTANCE = "distance"


def check_implicit_options(wanted: HeadOptions) -> None:
    """Raise ConfigError for a setting of `heads` that layers without a softmax do not have."""
    given = {"needle": wanted.needle, "projections": wanted.projections, "scores": wanted.scores or None}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"heads of layers without a softmax takes no {name}: leave it out.")


def estimate_absolute_shares(m: ImplicitMap, name: str, wanted: HeadOptions, tokens: Tensor | None) -> list[dict[str, Score]]:
    """Return the scores of each head of a map, with their intervals; tokens are ids (b, k).

    Raises ConfigError unless the layer is a recurrence or a convolution, whose keys are known to be its queries' own tokens.
    """
    if not isinstance(m.mechanism, LinearRecurrence | Convolution):
        raise ConfigError(
            f"{name} is neither a recurrence nor a convolution, so whether its keys are the tokens of its queries is not "
            "recorded: leave it out by layers=."
        )
    found = score_absolute_shares(m, wanted.window, wanted.offsets, tokens)
    limits = [UNLIMITED if one == DISTANCE else (0.0, 1.0) for one in found]
    heads = zip(*estimate_all_scores(list(found.values()), limits), strict=True)
    return [dict(zip(found, scores, strict=True)) for scores in heads]


def score_absolute_shares(m: ImplicitMap, window: int, offsets: Sequence[int], tokens: Tensor | None) -> dict[str, QueryScores]:
    """Return Σ a_ij over the keys of each pattern, with a_ij = |M_ij| / Σ_n |M_in|, of each query, with what it is by chance.

    A query counts if it reaches a key of the pattern and an entry of it is not 0. Chance is the share of these keys among all
    that the query reaches. The distance is Σ a_ij (i - j). These shares are defined here: Ali, Zimerman and Wolf 2024 draw
    absolute values too, without a score of them.
    """
    b, h, q, _ = m.shape
    names = ["previous token", "itself", *(("duplicate", "induction") if tokens is not None else ()), "first token"]
    names += [*(f"back {back}" for back in offsets), "local"]
    weights = torch.zeros(len(names), b, h, q, dtype=torch.float64, device=m.device)
    counts = torch.zeros(len(names), b, q, dtype=torch.float64, device=m.device)
    distances, totals = weights.new_zeros(b, h, q), weights.new_zeros(b, h, q)
    reached = weights.new_zeros(q)
    for row in range(b):
        ids = None if tokens is None else tokens[row]
        for heads, start, stop, columns, blocks in iterate_head_blocks(m, row):
            own = torch.arange(start, stop, device=m.device).unsqueeze(-1) + m.offset
            is_reached = m.mechanism.can_reach(own - columns)  # type: ignore[union-attr]
            on = torch.stack(mark_patterns(own, columns, window, offsets, ids)) & is_reached
            part = slice(start, stop)
            counts[:, row, part], reached[part] = on.sum(-1).double(), is_reached.sum(-1).double()
            for head, entries in zip(heads, blocks, strict=True):
                sizes = entries.abs()
                totals[row, head, part] = sizes.sum(-1)
                weights[:, row, head, part] = torch.einsum("pik,ik->pi", on.double(), sizes)
                distances[row, head, part] = (sizes * (own - columns)).sum(-1)
    is_counted, divisor = totals > 0, totals.where(totals > 0, 1)
    found = {}
    for n, name in enumerate(names):
        among = is_counted & (counts[n] > 0).unsqueeze(1)
        shares = (counts[n] / reached.clamp(min=1)).unsqueeze(1).expand(b, h, q)
        chance = shares.where(among, 0).sum(-1) / among.sum(-1)
        found[name] = QueryScores(weights[n] / divisor, among, chance)
    found[DISTANCE] = QueryScores(distances / divisor, is_counted)
    return found


def iterate_head_blocks(m: ImplicitMap, row: int) -> Iterator[tuple[range, int, int, Tensor, list[Tensor]]]:
    """Yield heads, the first query and the end of a block, its keys, and the entries (n, m) of each of these heads."""
    for first in range(0, m.shape[1], HEADS):
        heads = range(first, min(first + HEADS, m.shape[1]))
        for pairs in zip(*(m.iterate_plane(row, head) for head in heads), strict=True):
            block = pairs[0][0]
            yield heads, block.start, block.stop, block.columns, [entries for _, entries in pairs]


def mark_patterns(own: Tensor, columns: Tensor, window: int, offsets: Sequence[int], ids: Tensor | None) -> list[Tensor]:
    """Return whether keys (m,) are those of each pattern for queries at places (n, 1), each (n, m)."""
    back = own - columns
    found = [back == 1, back == 0]
    if ids is not None:
        before = torch.cat([ids[:1], ids[:-1]])
        found += [(ids[own] == ids[columns]) & (back > 0), (ids[own] == before[columns]) & (columns > 0) & (back >= 0)]
    return [*found, (columns == 0).expand_as(back), *(back == one for one in offsets), back.abs() <= window]
