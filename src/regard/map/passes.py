"""Row and column statistics, products and pictures of a matrix, each gathered in one traversal.

This is the plain form in torch, which is the definition and runs on any device.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.plane import Denominators, Plane, RowRun, WeightRows, count_block_numbers, multiply_exactly
from regard.map.pooling import BinnedWeights

Statistic = Callable[[WeightRows], Tensor]  # (..., n)


def logsumexp(rows: WeightRows) -> Tensor:
    """Return the logarithm of each row's denominator, sink included, nats; -inf for a row that sees nothing."""
    return rows.denominators.logsumexp


def entropy(rows: WeightRows) -> Tensor:
    """Compute -Σ w log w over the keys of each row, nats; 0 for a row that sees nothing."""
    shift, total = (x.unsqueeze(-1) for x in (rows.denominators.shift, rows.denominators.total.log()))
    logarithm = (rows.masked - shift).sub_(total).masked_fill_(rows.weights == 0, 0)
    return -logarithm.mul_(rows.weights).sum(-1)


def largest_weight(rows: WeightRows) -> Tensor:
    """Return the largest weight of each row."""
    return rows.weights.amax(-1) if len(rows.columns) else rows.weights.sum(-1)


def mean_distance(rows: WeightRows) -> Tensor:
    """Compute Σ w (position of the query - key): how far each row looks back on average, in tokens."""
    return rows.weights.sum(-1) * rows.positions - multiply_exactly(rows.weights, rows.columns.to(rows.weights.dtype))


def weight_of_first_key(rows: WeightRows) -> Tensor:
    """Return the weight of each row on the first key."""
    sees_first = rows.ranges and rows.ranges[0][0] == 0
    return rows.weights[..., 0].clone() if sees_first else rows.weights.new_zeros(rows.positions.shape)


def make_diagonal_statistic(back: int) -> Statistic:
    """Make the statistic of the weight of each row on the key at its own position minus `back`; 0 if there is no such key."""

    def diagonal(rows: WeightRows) -> Tensor:
        if not len(rows.columns):
            return rows.weights.new_zeros(rows.positions.shape)
        targets = rows.positions - back
        places = torch.searchsorted(rows.columns, targets).clamp_(max=len(rows.columns) - 1)
        return rows.weights.gather(-1, places.unsqueeze(-1)).squeeze(-1).where(rows.columns[places] == targets, 0)

    return diagonal


ROWS: dict[str, Statistic] = {
    "logsumexp": logsumexp,
    "entropy": entropy,
    "largest": largest_weight,
    "distance": mean_distance,
    "first": weight_of_first_key,
    "itself": make_diagonal_statistic(0),
    "previous": make_diagonal_statistic(1),
}


@dataclass(frozen=True, eq=False)
class TraversalResult:
    """The results of one traversal of a plane, or of several with an axis of planes before the others."""

    rows: dict[str, Tensor]  # each (q,)
    received: Tensor  # (k,)
    denominators: Denominators

    def __getitem__(self, plane: int) -> "TraversalResult":
        """Return the results of one plane of several."""
        rows = {name: x[plane] for name, x in self.rows.items()}
        return TraversalResult(rows, self.received[plane], self.denominators[plane])

    def __setitem__(self, plane: int, one: "TraversalResult") -> None:
        """Replace the results of one plane of several."""
        for name, x in self.rows.items():
            x[plane] = one.rows[name]
        self.received[plane] = one.received
        self.denominators.shift[plane], self.denominators.total[plane] = one.denominators.shift, one.denominators.total


def gather_statistics(
    plane: Plane, statistics: Mapping[str, Statistic], watch: Iterable[Callable[[RowRun], None]] = (), rows: slice = slice(None)
) -> TraversalResult:
    """Compute row statistics by name, column sums and denominators; call each function of `watch` on every run."""
    watch = tuple(watch)
    parts: dict[str, list[Tensor]] = {name: [] for name in statistics}
    below = []
    received = torch.zeros(plane.shape[1], dtype=torch.float64, device=plane.q.device)
    for run in plane.iterate_runs(*rows.indices(plane.shape[0])[:2]):
        for name, statistic in statistics.items():
            parts[name].append(statistic(run))
        received.index_add_(0, run.columns, run.weights.sum(0, dtype=torch.float64))
        below.append(run.denominators)
        for watcher in watch:
            watcher(run)
    none = plane.q.new_zeros(0)
    by_name = {name: torch.cat([none, *found]) for name, found in parts.items()}
    shift, total = (torch.cat([none, *(getattr(one, name) for one in below)]) for name in ("shift", "total"))
    return TraversalResult(by_name, received.to(plane.q.dtype), Denominators(shift, total))


def gather_with_picture(
    plane: Plane, rows: Tensor, columns: Tensor, statistics: Mapping[str, Statistic]
) -> tuple[TraversalResult, BinnedWeights]:
    """Compute the statistics of the rows of a picture, and the picture, given the edges of its bins."""
    picture = BinnedWeights(plane, rows, columns)
    return gather_statistics(plane, statistics, [picture.add_run], slice(int(rows[0]), int(rows[-1]))), picture


def stack_results(
    found: Iterable[tuple[TraversalResult, BinnedWeights]], names: Iterable[str]
) -> tuple[TraversalResult, BinnedWeights]:
    """Stack the results of several planes, with the statistics of these names."""
    results, pictures = zip(*found, strict=True)
    rows = {name: torch.stack([one.rows[name] for one in results]) for name in names}
    shift, total = (torch.stack([getattr(one.denominators, name) for one in results]) for name in ("shift", "total"))
    result = TraversalResult(rows, torch.stack([one.received for one in results]), Denominators(shift, total))
    sums, largest = torch.stack([one.sum for one in pictures]), torch.stack([one.max for one in pictures])
    return result, BinnedWeights.from_sums(pictures[0].rows, pictures[0].columns, sums, largest)


def compute_pair_weights(plane: Plane, below: Denominators, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the weights (n,) of queries (n,) on the keys (n,), pair by pair: a dot product for each."""
    found = [plane.q.new_zeros(0)]
    part = max(1, count_block_numbers(plane.q.device) // max(plane.q.shape[-1], 1))
    for i, j in zip(queries.split(part), keys.split(part), strict=True):
        found.append(below[i].weigh(plane.score_pairs(i, j).unsqueeze(-1)).squeeze(-1))
    return torch.cat(found)


def diagonal(plane: Plane, below: Denominators, back: int) -> Tensor:
    """Compute the weight of each query on the key at its own position minus `back`, (q,); 0 if there is no such key."""
    q, k = plane.shape
    start = min(max(back - plane.offset, 0), q)
    queries = torch.arange(start, max(start, min(q, k - plane.offset + back)), device=plane.q.device)
    found = plane.q.new_zeros(q)
    found[queries] = compute_pair_weights(plane, below, queries, queries + (plane.offset - back))
    return found


def mass(plane: Plane, below: Denominators, keys: Tensor) -> Tensor:
    """Compute the weight of each row on some keys (m,), given as sorted indices, (q,); only those columns are computed."""
    found = plane.q.new_zeros(plane.shape[0])
    for start, stop, ranges in plane.iterate_run_bounds():
        near = keys[(keys >= ranges[0][0]) & (keys < ranges[-1][1])] if ranges else keys[:0]
        queries = torch.arange(start, stop, device=keys.device)
        found[start:stop] = below[queries].weigh(plane.compute_masked_scores(queries, near)).sum(-1)
    return found


@dataclass(frozen=True, eq=False)
class AppliedWeights:
    """A v (q, e), the denominators and mean distances (q,) of the rows, and the sums of some rows by key, (k,) or (0,)."""

    product: Tensor
    denominators: Denominators
    distance: Tensor
    received: Tensor


def apply_weights_with_statistics(plane: Plane, v: Tensor) -> AppliedWeights:
    """Compute A v for v (k, e) in the dtype of the weights, with the denominators and mean distances of all rows."""
    none = plane.q.new_zeros(0)
    products, below, distances = [v.new_zeros(0, v.shape[1])], [], [none]
    for run in plane.iterate_runs():
        products.append(multiply_exactly(run.weights, v[run.columns]))
        below.append(run.denominators)
        distances.append(mean_distance(run))
    shift, total = (torch.cat([none, *(getattr(one, name) for one in below)]) for name in ("shift", "total"))
    return AppliedWeights(torch.cat(products), Denominators(shift, total), torch.cat(distances), none)


def find_top(plane: Plane, n: int) -> tuple[Tensor, Tensor]:
    """Return the n largest weights of each row and their keys, (q, n)."""
    values, keys = [plane.q.new_zeros(0, n)], [torch.zeros(0, n, dtype=torch.int64, device=plane.q.device)]
    for run in plane.iterate_runs():
        if len(run.columns) >= n:
            found = run.weights.topk(n)
            values.append(found.values)
            keys.append(run.columns[found.indices])
        else:
            found = expand_run(run, plane).topk(n)
            values.append(found.values)
            keys.append(found.indices)
    return torch.cat(values), torch.cat(keys)


def expand_run(run: RowRun, plane: Plane) -> Tensor:
    """Expand the rows of a run to every key, (n, k)."""
    return run.weights.new_zeros(len(run.weights), plane.shape[1]).index_copy_(1, run.columns, run.weights)


def compute_dense(plane: Plane) -> Tensor:
    """Compute the matrix (q, k)."""
    matrix = plane.q.new_zeros(plane.shape)
    for run in plane.iterate_runs():
        matrix[run.start : run.stop] = expand_run(run, plane)
    return matrix


def largest_row_error(plane: Plane, below: Denominators, queries: Tensor) -> Tensor:
    """Return the largest error of the sums of recomputed rows, sink included: the distance from 1, or from 0 if blind.

    It is NaN if that of any row is.
    """
    errors = [torch.zeros((), dtype=torch.float64, device=queries.device)]
    for part in queries.split(16) if len(queries) else ():
        masked = plane.compute_masked_scores(part, torch.arange(plane.shape[1], device=queries.device))
        under = below[part]
        sums = under.weigh(masked).sum(-1, dtype=torch.float64)
        if plane.sink is not None:
            sums += under.divide((plane.sink - under.shift).exp_().unsqueeze(-1)).squeeze(-1)
        expected = (under.total != 0).double()
        errors.append((sums - expected).abs().max())
    return torch.stack(errors).max()
