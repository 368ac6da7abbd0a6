"""Read a bias of scores by T5's buckets of distances: a table holds one row for each bucket, one number for each head.

Buckets are those of Raffel et al. (2020), https://arxiv.org/abs/1910.10683, as in Mesh TensorFlow's relative positions.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.bias_reading import read_seen
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Checked, Finding

WHAT = "a bias is one number for each of T5's buckets of distances"
FEWEST = 4  # buckets, of which T5 keeps half for single distances
FARTHEST = 2048  # the largest max_distance that is tried
NEAR = 1e-4  # of the largest number
CAUSAL = "Pass bidirectional=False in a decoder; or expects=Prefix(n) | Causal(), if the first n tokens are seen by all."
BIDIRECTIONAL = "Pass bidirectional=True in an encoder: half of the buckets are those of later keys."
STATED = "max_distance"  # in the name of an attribute that states it


class DistanceBias(NamedTuple):
    """The distances j - i from query i to key j that a call shows, (n,), and the bias of each in each head, (n, h)."""

    distances: Tensor
    numbers: Tensor


class T5Buckets(NamedTuple):
    """T5's buckets: the table that holds their numbers, their count, and each max_distance that gives the same buckets."""

    table: str
    bucket_count: int
    max_distances: list[int]
    is_bidirectional: bool


def check_buckets(calls: Sequence[InnerCall], root: nn.Module | None) -> Iterator[Finding | Checked]:
    """Yield that a bias is by T5's buckets, with their numbers, or that those of another direction are used; once for a table.

    `root` is a module that holds the tables, and may state max_distance in an attribute.
    """
    found: dict[str, list[tuple[InnerCall, DistanceBias, T5Buckets]]] = {}
    for one in calls if root is not None else ():
        assert root is not None
        bias = read_distance_bias(one)
        buckets = None if bias is None else read_buckets(bias, root)
        if bias is not None and buckets is not None:
            found.setdefault(buckets.table, []).append((one, bias, buckets))
    for same in found.values():
        assert root is not None
        one, bias, buckets = same[0]
        wrong = find_wrong_direction(buckets, [other for _, other, _ in same])
        if wrong is not None:
            does, cure = wrong
            yield Finding("wrong positions", f"in {one.name or 'the layer'} {does}", cure, 1.4, "positions", one.name)
            continue
        most, others = choose_max_distance(buckets, root), buckets.max_distances
        way = "bidirectional" if buckets.is_bidirectional else "causal"
        where = f"in {one.name or 'a recorded call'}, with the row of {buckets.table} of {len(bias.distances)} distances"
        where += f"; a max_distance from {others[0]} to {others[-1]} gives the same" * (len(others) > 1)
        yield Checked(f"{WHAT}: num_buckets={buckets.bucket_count}, max_distance={most}, {way}", where)


def find_wrong_direction(buckets: T5Buckets, biases: Sequence[DistanceBias]) -> tuple[str, str] | None:
    """Return that buckets are those of another direction than that of all calls which read them, and the cure; else None."""
    half, count, table = buckets.bucket_count // 2, buckets.bucket_count, buckets.table
    if buckets.is_bidirectional and all(int(one.distances.max()) <= 0 for one in biases):
        rows = f"rows {half} to {count - 1} of {table}, those of later keys, are never read"
        return f"T5's bidirectional buckets are used where no later key is seen: {rows}", CAUSAL
    if not buckets.is_bidirectional and any(int(one.distances.max()) == -int(one.distances.min()) for one in biases):
        row = f"all of them have the row of the query's own key, row 0 of {table}"
        return f"T5's causal buckets are used where later keys are seen: {row}", BIDIRECTIONAL
    return None


def has_table(one: InnerCall, root: nn.Module) -> bool:
    """Return whether the bias of each distance is a row of a table of `root`, whose first row is that of distance 0."""
    bias = read_distance_bias(one)
    return bias is not None and any(
        find_rows(bias, table) is not None for _, table in iterate_tables(root, bias.numbers.shape[1])
    )


def read_distance_bias(one: InnerCall) -> DistanceBias | None:
    """Return the bias of each distance; None unless it is the same for all pairs of one distance, in each head."""
    bias, (_, h, t, _) = one.call.bias, one.call.q.shape
    if bias is None or bias.dim() < 3 or bias.shape[-3] != h:
        return None
    seen = read_seen(one)
    if seen is None or seen.shape[1:] != (t, t):
        return None
    numbers = bias.detach().double().cpu().expand(*bias.shape[:-2], t, t).reshape(-1, h, t * t)[0]
    shown, place = seen[0].flatten(), torch.arange(t)
    distances, which = (place - place[:, None]).flatten()[shown].unique(return_inverse=True)
    start, pairs = numbers.new_zeros(h, len(distances)), numbers[:, shown]
    least, most = (
        start.scatter_reduce(1, which.expand_as(pairs), pairs, how, include_self=False).mT for how in ("amin", "amax")
    )
    size = float(most.abs().max())
    return DistanceBias(distances, most) if 0 < size < torch.inf and float((most - least).max()) <= NEAR * size else None


def read_buckets(bias: DistanceBias, root: nn.Module) -> T5Buckets | None:
    """Return T5's buckets whose rows of a table of `root` are the bias; None if there are none, or single distances alone."""
    for name, table in iterate_tables(root, bias.numbers.shape[1]):
        rows = find_rows(bias, table)
        if rows is None or len(rows.unique()) == len(rows):
            continue
        for is_bidirectional in (True, False):
            found = find_max_distances(bias.distances, rows, len(table), is_bidirectional)
            if found:
                return T5Buckets(name, len(table), found, is_bidirectional)
    return None


def iterate_tables(root: nn.Module, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the numbers (buckets, h) of each parameter that may hold a number for each bucket and head."""
    for name, one in root.named_parameters():
        for table in (one, one.mT) if one.dim() == 2 else ():
            if table.shape[1] == heads and table.shape[0] >= FEWEST:
                yield name, table.detach().double().cpu()


def find_rows(bias: DistanceBias, table: Tensor) -> Tensor | None:
    """Return the row of a table (buckets, h) that is the bias of each distance, up to one factor; None if one has no row.

    T5's row of distance 0 is the first, from which the factor follows.
    """
    own = bias.numbers[bias.distances == 0]
    if not len(own) or not table[0].any():
        return None
    scaled = table * (own[0] @ table[0] / table[0].square().sum())
    gaps = torch.cdist(bias.numbers, scaled, p=torch.inf)  # (n, buckets)
    is_near = gaps <= NEAR * float(bias.numbers.abs().max())
    return is_near.int().argmax(-1) if bool((is_near.sum(-1) == 1).all()) else None  # rows may be alike before training


def find_max_distances(distances: Tensor, rows: Tensor, count: int, is_bidirectional: bool) -> list[int]:
    """Return each max_distance up to FARTHEST with which T5's buckets of these distances are these rows."""
    exact = (count // 2 if is_bidirectional else count) // 2
    if exact < 1:
        return []
    tried = torch.arange(exact + 1, FARTHEST + 1)
    found: list[int] = tried[(compute_buckets(distances, count, tried[:, None], is_bidirectional) == rows).all(-1)].tolist()
    return found


def compute_buckets(distances: Tensor, count: int, max_distance: Tensor, is_bidirectional: bool) -> Tensor:
    """Return T5's bucket of each distance j - i from query i to key j, in the shape of both tensors broadcast.

    The logarithm is in float32 as in T5's code, which decides where a distance is at the edge of two buckets.
    """
    if is_bidirectional:
        count //= 2
        first, far = (distances > 0) * count, distances.abs()
    else:
        first, far = torch.zeros_like(distances), (-distances).clamp_min(0)
    exact = count // 2
    ratio = (max_distance.double() / exact).log().float()
    steps = (far.clamp_min(1).float() / exact).log() / ratio * (count - exact)
    return first + torch.where(far < exact, far, (exact + steps.long()).clamp_max(count - 1))


def choose_max_distance(buckets: T5Buckets, root: nn.Module) -> int:
    """Return the max_distance that `root` states if it gives these buckets, or else the least that does."""
    stated = [value for part in root.modules() for name, value in vars(part).items() if STATED in name]
    return next((value for value in stated if value in buckets.max_distances), buckets.max_distances[0])
