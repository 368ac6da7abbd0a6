"""Terms of relative positions in the formula of scores: products of tokens with a table, whose rows the distance picks.

The rows are picked after the product, by gather or by a shift, which the places of the moved entries show (DeBERTa, XLNet,
Transformer-XL), or before it, where the table has a row for each pair of tokens (Shaw).
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.map.computed_bias import ComputedBias
from regard.map.distance_products import DistanceProducts, DistanceTerm
from regard.mechanism.mask_algebra import Mask, Offset
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.products.score_form import DistanceIndex, ScoreForm, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import MovedEntries
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.handwritten.scores.entry_sources import FRACTION, are_places, find_sources
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.stored_calls.mask_inference import ROWS


def follow_distances(table: AxisTable, moved: MovedEntries) -> ScoreForm | None:
    """Return the form of entries that the distance of two tokens picked from products; None if it picked none.

    One axis of the products is that of one of the tokens, and others depend on the distance alone. The two tokens are those of
    the last dimensions, or of the first. Some distances may have entries of other tokens: in Transformer-XL, of later keys.
    """
    rank = moved.places.dim()
    if moved.form is None or moved.form.distances is not None or rank < 2 or not moved.places.numel():
        return None
    for order in ([*range(rank)], [*range(2, rank), 0, 1])[: 1 + (rank > 2)]:
        found = find_distances(table, moved._replace(places=moved.places.permute(order)))
        if found is not None:
            dims, distances = found
            return moved.form._replace(dims=tuple(dims[order.index(n)] for n in range(rank)), distances=distances)
    return None


def find_distances(table: AxisTable, moved: MovedEntries) -> tuple[Dims, DistanceIndex] | None:
    """Return the axes of entries (..., i, j), and which rows of a table the distance of i and j picked; None if it did not."""
    first, matrix = moved.places[..., :1, :1], moved.places[(0,) * (moved.places.dim() - 2)] - FRACTION
    is_known = are_places(matrix)
    sources = find_sources(table, moved._replace(places=first)) if is_known[0, 0] else None
    if sources is None or not all(one.is_whole or len(one.elsewhere) == 1 for one in sources[0]):
        return None
    varying = {axis for one in sources[0] for axis in one.axes}
    found = find_rows(table, moved.dims, matrix, is_known, varying)
    if found is None or not are_alike(moved.places, first + (matrix - matrix[0, 0]), is_known):
        return None
    own, along, axes_of_table, rows = found
    other = table.add_axis(matrix.shape[1 - along])
    pair = (own, other) if along == 0 else (other, own)
    return (*(one.axes for one in sources[0][:-2]), *pair), DistanceIndex(own, other, axes_of_table, rows)


def are_alike(x: Tensor, y: Tensor, is_known: Tensor) -> bool:
    """Return whether two tensors have the same numbers wherever they are known."""
    return torch.equal(x, y) if bool(is_known.all()) else bool(((x == y) | ~is_known).all())


def find_rows(
    table: AxisTable, dims: Dims, matrix: Tensor, is_known: Tensor, varying: set[int]
) -> tuple[Axes, int, Axes, Tensor] | None:
    """Return the axis of the tokens along one dimension of a matrix of places, that dimension, and the axes of the table.

    The axes of the table come with the row of it that each distance picks, -1 if it has entries of other tokens. Axes that vary
    outside of the matrix are left out. None if there are other axes along the matrix.
    """
    axes = [axis for group in table.expand_dims(dims) for axis in group]
    tokens: list[tuple[int, int]] = []
    axes_of_table: list[int] = []
    rows, outer, count = torch.zeros_like(matrix), matrix, 1
    for axis, size in zip(reversed(axes), reversed(table.get_sizes(tuple(axes))), strict=True):
        quotient = (outer / size).floor()
        places, outer = outer - quotient * size, quotient
        if axis in varying:
            continue
        along, own = find_tokens(places, size, is_known)
        if along is not None and not tokens:
            tokens.append((axis, along))
            is_known = own
            continue
        axes_of_table.insert(0, axis)
        rows, count = rows + places * count, count * size
    rows = rows.masked_fill(~is_known, -1).long()
    if not tokens or not axes_of_table or not is_by_distance(rows):
        return None
    axis, along = tokens[0]
    return (axis,), along, tuple(axes_of_table), read_distances(rows if along == 0 else rows.mT)


def find_tokens(places: Tensor, size: int, is_known: Tensor) -> tuple[int | None, Tensor]:
    """Return the dimension of a matrix along which its numbers count up to a size, and where they do; None if there is none.

    They may differ from it at some distances, but not in the first row or column.
    """
    for along in (0, 1):
        numbers = torch.arange(places.shape[along], dtype=places.dtype, device=places.device)
        if len(numbers) == size and torch.equal(places.select(1 - along, 0), numbers):
            own = (places == (numbers.unsqueeze(-1) if along == 0 else numbers)) & is_known
            if bool(own.select(1 - along, 0).all()) and is_by_distance(own):
                return along, own
    return None, is_known


def is_by_distance(x: Tensor) -> bool:
    """Return whether entries (i, j, ...) are the same wherever the distance of i and j is."""
    return torch.equal(x[1:, 1:], x[:-1, :-1])


def read_distances(x: Tensor) -> Tensor:
    """Return the entries (n + m - 1, ...) of x (n, m, ...) by their distance j - i + n - 1."""
    return torch.cat([x[1:, 0].flip(0), x[0]])


class RelativeTerm(NamedTuple):
    """A term of relative positions, and the distances at which the scores have entries of other tokens instead."""

    term: DistanceTerm
    unknown: Tensor  # (q + k - 1,)

    def scale(self, factor: float) -> "RelativeTerm":
        """Return the term times a number."""
        return self if factor == 1 else self._replace(term=replace(self.term, table=self.term.table * factor))

    def is_hidden(self, mask: Mask, offset: Offset) -> bool:
        """Return whether a mask hides the keys at all distances that are not known."""
        if not bool(self.unknown.any()):
            return True
        queries, keys = (torch.arange(n, device=self.unknown.device) for n in self.term.shape[-2:])
        for part in queries.split(ROWS):
            unknown = self.unknown[keys - part.unsqueeze(-1) + len(queries) - 1]
            if bool((mask.block(part, keys, offset) & unknown).any()):
                return False
        return True


def read_terms(form: ScoreForm, table: AxisTable, groups: Groups) -> list[RelativeTerm] | None:
    """Return the terms of relative positions that a form amounts to, up to a number for each row; None if it is another one."""
    relative = form if form.distances is not None else pick_distances(form, table)
    if relative is None:
        return None
    try:
        terms = [build_term(relative, table, groups)]
    except UnreadableError:
        return None
    for step in form.steps:
        number = read_number(step.operand)
        if step.kind is StepKind.MULTIPLY and number is not None:
            terms = [one.scale(number) for one in terms]
        elif step.kind is StepKind.ADD and step.source is not None:
            more = read_terms(step.source, table, groups)
            if more is None:
                return None
            terms += [one.scale(step.amount) for one in more]
        elif step.kind is not StepKind.ADD or number is None:
            return None
    return terms


def read_number(x: object) -> float | None:
    """Return a number, or the entry of a tensor of one; None for anything else."""
    return float(x) if isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1) else None


def pick_distances(form: ScoreForm, table: AxisTable) -> ScoreForm | None:
    """Return the form of products with a table of a row for each pair of tokens, which depends on their distance alone."""
    sides = (form.a, table.expand_dims(form.a_dims)), (form.b, table.expand_dims(form.b_dims))
    scores = [axis for axes in table.expand_dims(form.dims) for axis in axes]
    for (vectors, own_dims), (rows, dims) in (sides, sides[::-1]):
        own, have = {axis for axes in own_dims for axis in axes}, [axis for axes in dims for axis in axes]
        others = [axis for axis in have if axis in scores and axis not in own]
        if len(others) != 1:
            continue
        flat = rows.detach().reshape(table.get_sizes(tuple(have)))
        for axis in (axis for axis in have if axis in own and axis in scores):
            x = flat.movedim((have.index(axis), have.index(others[0])), (0, 1))
            if not is_by_distance(x):
                continue
            distances = read_distances(x)
            (new,) = table.add_axis(len(distances))
            rest = [one for one in have if one not in (axis, others[0])]
            index = DistanceIndex((axis,), tuple(others), (new,), torch.arange(len(distances), device=x.device))
            table_dims = ((new,), *((one,) for one in rest))
            return form._replace(a=vectors, b=distances, a_dims=own_dims, b_dims=table_dims, distances=index)
    return None


def build_term(form: ScoreForm, table: AxisTable, groups: Groups) -> RelativeTerm:
    """Return the term of a form without its steps. Raises UnreadableError if its axes are not those of queries and keys."""
    assert form.distances is not None
    own, other, rows = map(table.expand_axes, (form.distances.own, form.distances.other, form.distances.table))
    if (own, other) not in ((groups.queries, groups.keys), (groups.keys, groups.queries)):
        raise UnreadableError("its positions are not those of queries and keys")
    sides = [(form.a, table.expand_dims(form.a_dims)), (form.b, table.expand_dims(form.b_dims))]
    if any(axis in rows for axes in sides[0][1] for axis in axes):
        sides.reverse()
    result = {axis for axes in table.expand_dims(form.dims) for axis in axes} | set(rows)
    summed = tuple(axis for axes in sides[0][1] for axis in axes if axis not in result)
    vectors, positions = (
        table.arrange(x.detach(), dims, (groups.batch, groups.heads, axes, summed))
        for (x, dims), axes in zip(sides, (own, rows), strict=True)
    )
    if is_autocast_on(vectors.device):
        vectors, positions = autocast_tensor(vectors), autocast_tensor(positions)
    if len(positions) > 1 and torch.equal(positions, positions[:1].expand(positions.shape)):
        positions = positions[:1]
    is_of_keys, picked = own == groups.keys, form.distances.rows
    picked = picked.flip(0) if is_of_keys else picked
    used, index = picked.clamp(min=0).unique(return_inverse=True)
    positions = positions.index_select(2, used).to(score_dtype(positions.dtype))
    return RelativeTerm(DistanceTerm(vectors.clone(), positions, index, is_of_keys), picked < 0)


def add_terms(terms: list[RelativeTerm], bias: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Return the sum of terms of relative positions and a bias; all of its entries if that has a number for each pair."""
    if not terms:
        return bias
    own = tuple(one.term for one in terms)
    if isinstance(bias, DistanceProducts):
        own, bias = own + bias.terms, bias.rest
    if bias is None or isinstance(bias, ComputedBias) or min(bias.shape[2:]) == 1:
        return DistanceProducts(own, bias).expand(shape)
    return DistanceProducts(own).to_dense() + bias
