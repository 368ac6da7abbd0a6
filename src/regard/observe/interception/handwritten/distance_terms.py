"""Terms of relative positions in the formula of scores: products of tokens with a table, whose rows the distance picks.

The rows are picked after the product, by gather or by a shift, which the places of the moved entries show (DeBERTa, XLNet,
Transformer-XL), or before it, where the table has a row for each pair of tokens (Shaw).
"""

from dataclasses import replace

import torch
from torch import Tensor

from regard.map.distance_products import DistanceTerm
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.axis_groups import Groups
from regard.observe.interception.handwritten.entry_sources import FRACTION, find_sources
from regard.observe.interception.handwritten.score_form import DistanceIndex, ScoreForm, StepKind
from regard.observe.interception.handwritten.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.traces import MovedEntries
from regard.observe.interception.plain_tensors import UnreadableError


def follow_distances(table: AxisTable, moved: MovedEntries) -> ScoreForm | None:
    """Return the form of entries (..., i, j) that the distance of i and j picked from products; None if it picked none.

    One axis of the products is that of i, or of j, and another one depends on their distance alone.
    """
    places = moved.places - FRACTION
    if moved.form is None or moved.form.distances is not None or places.dim() < 2 or not places.numel():
        return None
    if not bool(((places >= 0) & (places == places.floor())).all()):
        return None
    flat = places.long()
    first, matrix = flat[..., :1, :1], flat[(0,) * (flat.dim() - 2)]
    if not torch.equal(flat, first + (matrix - matrix[0, 0])):
        return None
    sources = find_sources(table, moved._replace(places=first.double() + FRACTION))
    if sources is None or not all(one.is_whole or len(one.elsewhere) == 1 for one in sources[0]):
        return None
    varying = {axis for one in sources[0] for axis in one.axes}
    rows = find_rows(table, moved.dims, matrix, varying)
    if rows is None:
        return None
    own, along, picked = rows
    size = matrix.shape[1 - along]
    other = table.add_axis(size)
    pair = (own, other) if along == 0 else (other, own)
    dims = (*(one.axes for one in sources[0][:-2]), *pair)
    return moved.form._replace(dims=dims, distances=DistanceIndex(own, other, *picked))


def find_rows(table: AxisTable, dims: Dims, matrix: Tensor, varying: set[int]) -> tuple[Axes, int, tuple[Axes, Tensor]] | None:
    """Return the axis of the tokens along one dimension of a matrix of places, that dimension, and the axes of the table.

    The axes of the table come with the row of it that each distance picks. Those that vary outside of the matrix are left out.
    None if there are other axes along the matrix.
    """
    axes = [axis for group in table.expand_dims(dims) for axis in group]
    tokens: list[tuple[Axes, int]] = []
    axes_of_table: list[int] = []
    rows, stride, count = torch.zeros_like(matrix), 1, 1
    for axis, size in zip(reversed(axes), reversed(table.get_sizes(tuple(axes))), strict=True):
        places, stride = matrix // stride % size, stride * size
        if axis in varying:
            continue
        along = find_dimension(places, size)
        if along is not None and not tokens:
            tokens.append(((axis,), along))
            continue
        axes_of_table.insert(0, axis)
        rows, count = rows + places * count, count * size
    if not tokens or not axes_of_table or not is_by_distance(rows):
        return None
    own, along = tokens[0]
    return own, along, (tuple(axes_of_table), read_distances(rows if along == 0 else rows.mT))


def find_dimension(row: Tensor, size: int) -> int | None:
    """Return the dimension of a matrix along which its entries count up to a size, and along which alone they differ."""
    for along in (0, 1):
        counted = torch.arange(size, device=row.device).view((-1, 1) if along == 0 else (1, -1))
        if row.shape[along] == size and torch.equal(row, counted.expand(row.shape)):
            return along
    return None


def is_by_distance(x: Tensor) -> bool:
    """Return whether entries (i, j, ...) are the same wherever the distance of i and j is."""
    return torch.equal(x[1:, 1:], x[:-1, :-1])


def read_distances(x: Tensor) -> Tensor:
    """Return the entries (n + m - 1, ...) of x (n, m, ...) by their distance j - i + n - 1."""
    return torch.cat([x[1:, 0].flip(0), x[0]])


def read_terms(form: ScoreForm, table: AxisTable, groups: Groups) -> list[DistanceTerm] | None:
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
            terms = [scale_term(one, number) for one in terms]
        elif step.kind is StepKind.ADD and step.source is not None:
            more = read_terms(step.source, table, groups)
            if more is None:
                return None
            terms += [scale_term(one, step.amount) for one in more]
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


def build_term(form: ScoreForm, table: AxisTable, groups: Groups) -> DistanceTerm:
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
    is_of_keys = own == groups.keys
    used, index = form.distances.rows.unique(return_inverse=True)
    positions = positions.index_select(2, used).to(score_dtype(positions.dtype))
    return DistanceTerm(vectors.clone(), positions, index.flip(0) if is_of_keys else index, is_of_keys)


def scale_term(term: DistanceTerm, factor: float) -> DistanceTerm:
    """Return a term times a number."""
    return term if factor == 1 else replace(term, table=term.table * factor)
