"""Scores of heads of layers without a softmax: on which keys the absolute values of their entries lie."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError
from regard.map.convolution import Convolution
from regard.map.implicit_map import MOST_ROWS, ImplicitMap, Mechanism
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import JoinedMatrices
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

    Raises ConfigError unless the keys of the layer are known to be its queries' own tokens: it is a recurrence or a
    convolution, or a mask hides later keys.
    """
    if not has_own_tokens(m):
        raise ConfigError(
            f"{name} is neither a recurrence nor a convolution, and no mask hides later keys, so whether its keys are the "
            "tokens of its queries is not recorded: leave it out by layers=."
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
            is_reached = mark_reached(m.mechanism, m.places[row][0][0], own, columns)
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


def has_own_tokens(m: ImplicitMap) -> bool:
    """Return whether the keys of a map are known to be the tokens of its queries, by their order in time.

    A mask shows that if it depends on the query, and lets none of several see a later key, and each its own if it sees any.
    """
    parts = list_parts(m.mechanism)
    masked = [one for one in parts if isinstance(one, ScoredMatrix)]
    if len(masked) < len(parts):
        return all(isinstance(one, ScoredMatrix | LinearRecurrence | Convolution) for one in parts)
    if not any(one.rows > 1 and one.mask.is_query_dependent for one in masked):
        return False
    columns = torch.arange(m.shape[3], device=m.device)
    for row in dict.fromkeys(places[0][0] for places in m.places):
        for own in (torch.arange(m.shape[2], device=m.device) + m.offset).unsqueeze(-1).split(MOST_ROWS):
            is_reached = mark_reached(m.mechanism, row, own, columns)
            sees_own = is_reached.gather(1, own).squeeze(-1)
            if bool((is_reached & (columns > own)).any() | (is_reached.any(-1) & ~sees_own).any()):
                return False
    return True


def list_parts(mechanism: Mechanism | JoinedMatrices) -> list[Mechanism]:
    """Return the matrices of the calls of a map, in order."""
    return [*mechanism.parts] if isinstance(mechanism, JoinedMatrices) and mechanism.axis == "queries" else [mechanism]  # type: ignore[list-item]


def mark_reached(mechanism: Mechanism | JoinedMatrices, row: int, own: Tensor, columns: Tensor) -> Tensor:
    """Return whether queries at places (n, 1) reach the keys (m,) in any head of a batch row, (n, m)."""
    found = torch.zeros(len(own), len(columns), dtype=torch.bool, device=columns.device)
    for part in list_parts(mechanism):
        if isinstance(part, LinearRecurrence | Convolution):
            found |= part.can_reach(own - columns) & (own < part.rows)
            continue
        assert isinstance(part, ScoredMatrix)
        queries, keys = own.squeeze(-1) - (part.shape[2] - part.rows), columns[columns < part.shape[2]]
        inside = (queries >= 0) & (queries < part.rows)
        table = part.mask.block(queries[inside], keys, part.offset)
        own_table = table[row if len(table) > 1 else 0].any(0).expand(int(inside.sum()), len(keys))
        found[inside] = found[inside] | F.pad(own_table, (0, len(columns) - len(keys)))
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
