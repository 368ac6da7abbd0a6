"""Read which row of a table each distance of a key has: numbers added to scores, or vectors multiplied by queries.

Vectors are those of Shaw et al. 2018, https://arxiv.org/abs/1803.02155: a table has 2 k + 1, for distances clipped to -k to k.
T5's buckets of distances are those of Raffel et al. 2020, https://arxiv.org/abs/1910.10683, as in Mesh TensorFlow.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.bias_reading import read_seen
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Checked, Finding, Unknown

NEAR = 1e-4  # of the largest number
FEWEST, MOST = 3, 2048  # rows of a table
BEYOND = 8  # distances that have the row of the farthest one, from which it is clipped
FARTHEST = 2048  # the largest max_distance of T5's buckets that is tried
STATED = re.compile(r"^max\w*(?:rel|dist|pos)|clip|^k$")  # attributes that state the farthest distance
CURE = "Clip distances to -k to k for a table of 2 k + 1 rows: table[(j - i).clamp(-k, k) + k] for query i and key j."
MEANT = "nothing, if the row is meant for something else: a table of 2 k + 1 rows has one for each distance from -k to k"
BUCKETS = "a bias is one number for each of T5's buckets of distances"
CAUSAL = "Pass bidirectional=False in a decoder; or expects=Prefix(n) | Causal(), if the first n tokens are seen by all."
BIDIRECTIONAL = "Pass bidirectional=True in an encoder: half of the buckets are those of later keys."


class TableRows(NamedTuple):
    """The table of this name, how many rows it has, and the row of each distance j - i from query i to key j, both (n,)."""

    table: str
    row_count: int
    distances: Tensor
    rows: Tensor


class Clipping(NamedTuple):
    """The least and the largest distance that have rows of their own, and rows that no distance reads."""

    least: int
    most: int
    unread: list[int]


def check_tables(calls: Sequence[InnerCall], root: nn.Module | None) -> Iterator[Finding | Checked | Unknown]:
    """Yield of each table of relative positions whether its rows are T5's buckets, or else rows that no distance reads.

    `root` is a module that holds the tables, and may state the farthest distance in an attribute.
    """
    found: dict[str, list[tuple[InnerCall, TableRows]]] = {}
    for one in calls if root is not None else ():
        assert root is not None
        for read in read_tables(one, root):
            found.setdefault(read.table, []).append((one, read))
    for same in found.values():
        assert root is not None
        one, read = same[0]
        is_single = len(read.rows.unique()) == len(read.rows)  # distances
        ways = {way: find_max_distances(read, way) for way in (True, False) if not is_single}
        is_bidirectional = next((way for way, most in ways.items() if most), None)
        clipping = find_clipping(read) if is_bidirectional is None else None
        if is_bidirectional is not None:
            yield report_buckets(one, [other for _, other in same], is_bidirectional, ways[is_bidirectional], root)
        elif clipping is not None and clipping.unread:
            yield report_clipping(one, read, clipping)


def report_buckets(
    one: InnerCall, reads: Sequence[TableRows], is_bidirectional: bool, max_distances: list[int], root: nn.Module
) -> Finding | Checked:
    """Return T5's buckets of a table with their numbers, or that those of another direction than its calls see are used.

    `max_distances` give the same buckets: the one that an attribute of `root` states is named, or else the least.
    """
    table, count, distances, _ = reads[0]
    if is_bidirectional and all(int(read.distances.max()) <= 0 for read in reads):
        rows = f"rows {count // 2} to {count - 1} of {table}, those of later keys, are never read"
        does = f"T5's bidirectional buckets are used where no later key is seen: {rows}"
        return one.report("wrong positions", does, CAUSAL, 1.4, "positions")
    if not is_bidirectional and any(int(read.distances.max()) == -int(read.distances.min()) for read in reads):
        row = f"all of them have the row of the query's own key, row 0 of {table}"
        does = f"T5's causal buckets are used where later keys are seen: {row}"
        return one.report("wrong positions", does, BIDIRECTIONAL, 1.4, "positions")
    stated = [value for part in root.modules() for name, value in vars(part).items() if STATED.search(name)]
    most = next((value for value in stated if value in max_distances), max_distances[0])
    where = f"in {one.name or 'a recorded call'}, with the row of {table} of {len(distances)} distances"
    if len(max_distances) > 1:
        where += f"; a max_distance from {max_distances[0]} to {max_distances[-1]} gives the same"
    way = "bidirectional" if is_bidirectional else "causal"
    return Checked(f"{BUCKETS}: num_buckets={count}, max_distance={most}, {way}", where)


def find_max_distances(read: TableRows, is_bidirectional: bool) -> list[int]:
    """Return each max_distance up to FARTHEST with which T5's buckets of the distances of a table are its rows."""
    exact = (read.row_count // 2 if is_bidirectional else read.row_count) // 2
    if exact < 1:
        return []
    tried = torch.arange(exact + 1, FARTHEST + 1)
    buckets = compute_buckets(read.distances, read.row_count, tried[:, None], is_bidirectional)
    found: list[int] = tried[(buckets == read.rows).all(-1)].tolist()
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


def report_clipping(one: InnerCall, read: TableRows, clipping: Clipping) -> Finding | Unknown:
    """Return the finding of rows that are never read; one alone may be meant, unless the module states a farther distance."""
    unread = clipping.unread
    rows = f"row{'s' * (len(unread) > 1)} {format_ranges(unread)}"
    does = f"distances are clipped to {clipping.least} to {clipping.most}, and no distance reads {rows} of {read.table}"
    if len(unread) > 1 or is_stated(one.module, max(-clipping.least, clipping.most) + 1):
        return one.report("wrong positions", does, CURE, 1.4, "positions")
    return Unknown(f"whether it is intended that in {one.name or 'the layer'} {does}", MEANT)


def is_stated(module: nn.Module | None, distance: int) -> bool:
    """Return whether an attribute of a module states this distance."""
    return module is not None and any(STATED.search(name) and value == distance for name, value in vars(module).items())


def find_clipping(read: TableRows) -> Clipping | None:
    """Return how distances are clipped; None unless near ones have rows in their order, and all farther ones that of the last.

    Rows of later keys may not be read where none is seen.
    """
    distances, rows = read.distances, read.rows
    own = rows[distances == 0]
    if not len(own):
        return None
    steps = rows - own[0]
    is_causal = int(distances.max()) <= 0
    for sign in (1, -1):
        least, most = (int(distances[steps == sign * end].abs().min()) for end in (steps * sign).aminmax())
        clipped = distances.clamp(-least, most)
        is_clipped = int(-distances.min()) >= least + BEYOND and (is_causal or int(distances.max()) >= most + BEYOND)
        if is_clipped and torch.equal(steps, sign * clipped):
            past = range(int(own[0]) - sign * least, -1 if sign > 0 else read.row_count, -sign)
            future = range(int(own[0]) + sign * most, read.row_count if sign > 0 else -1, sign)
            return Clipping(-least, most, sorted([*past[1:], *(() if is_causal else future[1:])]))
        both = int(steps.abs().max())
        if is_clipped and not is_causal and torch.equal(steps, sign * distances.abs().clamp_max(both)):
            used = set(rows.tolist())
            return Clipping(-both, both, [row for row in range(read.row_count) if row not in used])
    return None


def has_table(one: InnerCall, root: nn.Module) -> bool:
    """Return whether the bias of each distance follows from a row of a table of `root`."""
    return next(read_tables(one, root), None) is not None


def read_tables(one: InnerCall, root: nn.Module) -> Iterator[TableRows]:
    """Yield the tables of `root` of which one row for each distance gives a call's bias."""
    call, seen = one.call, read_seen(one)
    (_, h, t, d) = call.q.shape
    if call.bias is None or seen is None or seen.shape[1:] != (t, t) or call.bias.dim() < 3 or call.bias.shape[-3] != h:
        return
    queries = sorted({0, t // 2, t - 1})
    bias = call.bias.detach().double().cpu().expand(*call.bias.shape[:-2], t, t).reshape(-1, h, t, t)[:, :, queries]
    q = call.q.detach().double().cpu()[: len(bias), :, queries]
    scale = d**-0.5 if call.scale is None else call.scale
    shown = seen[0, queries]
    distances = torch.arange(t) - torch.tensor(queries)[:, None]
    for name, table in iterate_tables(root, h, d):
        made = (
            torch.einsum("bhnd,hrd->bhnr", q, table)
            if table.dim() == 3
            else table.T[None, :, None].expand(len(bias), h, len(queries), -1)
        )
        own = made[:, :, 0, 0]  # of T5's distance 0, and any other factor on it
        size = float(own.square().sum())
        factors = (1.0, scale, *([float((bias[:, :, 0, 0] * own).sum()) / size] if size > 0 and shown[0, 0] else []))
        for factor in factors:
            rows = match_table_rows(bias, factor * made, shown, distances)
            if rows is not None:
                yield TableRows(name, made.shape[-1], *rows)
                break


def iterate_tables(root: nn.Module, heads: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters that may hold a number for each head in each row, (r, h), or a vector, (h, r, d), in float64."""
    for name, one in root.named_parameters():
        table = one.detach().double().cpu()
        if table.dim() == 2 and FEWEST <= len(table) <= MOST:
            if table.shape[1] == heads:
                yield name, table
            if table.shape[0] == heads:
                yield name, table.T
            if table.shape[1] == width:
                yield name, table.expand(heads, -1, -1)
            if table.shape[1] == heads * width and heads > 1:
                yield name, table.unflatten(1, (heads, width)).transpose(0, 1)
        if table.dim() == 3 and FEWEST <= table.shape[1] <= MOST and table.shape[::2] == (heads, width):
            yield name, table


def match_table_rows(bias: Tensor, made: Tensor, shown: Tensor, distances: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the distances that are shown and the row of each, both (n,); None unless each has one row, whatever the query.

    `bias` (b, h, n, t) is that of n queries, `made` (b, h, n, r) what each row gives, `shown` and `distances` are (n, t).
    """
    near = NEAR * float(made.abs().max())
    found: dict[int, int] = {}
    for n in range(len(shown)):
        own = shown[n]
        gaps = torch.cdist(bias[:, :, n, own].flatten(0, 1).T, made[:, :, n].flatten(0, 1).T, p=torch.inf)  # (keys, r)
        fits = gaps <= near
        if not bool((fits.sum(-1) == 1).all()):
            return None
        for distance, row in zip(distances[n, own].tolist(), fits.int().argmax(-1).tolist(), strict=True):
            if found.setdefault(distance, row) != row:
                return None
    known = torch.tensor(sorted(found.items()))
    return known[:, 0], known[:, 1]


def format_ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as `0 to 3` or `0 and 8`, at most three parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts[:3]]
    return " and ".join(shown) + " and more" * (len(parts) > 3)
