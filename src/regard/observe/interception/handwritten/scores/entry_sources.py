"""Sources of moved entries: the axes that vary along each dimension, and the formula of the entries that are left.

An axis that kept its order is known again, another one is a selection of the rows of queries or keys. A column from elsewhere
beside the scores of a softmax is its sink.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.handwritten.products.score_form import ScoreForm, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import MovedEntries

FRACTION = 0.3125  # of every place, so that a number which a function writes is none


class DimSource(NamedTuple):
    """The axes of the base that vary along a dimension, the place of each entry on them, and whether all stand in order."""

    axes: Axes
    places: Tensor  # (axes, entries)
    is_whole: bool
    elsewhere: Tensor  # (entries of the dimension), True where its entries are from elsewhere


def find_sources(table: AxisTable, moved: MovedEntries) -> tuple[list[DimSource], dict[int, int]] | None:
    """Return where the entries along each dimension come from, and the places of axes that none varies along.

    None unless each axis of the base varies along one dimension at most.
    """
    if has_no_lines(moved.places):
        return None
    axes = tuple(axis for group in table.expand_dims(moved.dims) for axis in group)
    sizes = table.get_sizes(axes)
    places = moved.places - FRACTION
    is_moved = are_places(places)
    ranks = range(places.dim())
    from_base = [is_moved.any(dim=[m for m in ranks if m != n]) if len(ranks) > 1 else is_moved for n in ranks]
    counts = [int(one.sum()) for one in from_base]
    if not is_moved.any() or int(is_moved.sum()) != torch.tensor(counts).prod():
        return None
    for n in ranks:
        if counts[n] < places.shape[n]:
            places = places.index_select(n, from_base[n].nonzero().flatten())
    flat = places.long()
    start = flat[(0,) * flat.dim()]
    lines = [flat[(0,) * n + (slice(None),) + (0,) * (flat.dim() - n - 1)] for n in ranks]
    total = start
    for n, line in enumerate(lines):
        total = total + (line - start).view([-1 if m == n else 1 for m in ranks])
    if not bool((total == flat).all()):
        return None
    varying: list[list[tuple[int, Tensor, int]]] = [[] for _ in ranks]
    fixed, stride = {}, 1
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        along = [(n, line // stride % size) for n, line in enumerate(lines)]
        along = [(n, one) for n, one in along if bool((one != one[0]).any())]
        if len(along) > 1:
            return None
        if along:
            varying[along[0][0]].insert(0, (axis, along[0][1], size))
        else:
            fixed[axis] = int(start) // stride % size
        stride *= size
    return [build_source(one, int(count), ~keep) for one, count, keep in zip(varying, counts, from_base, strict=True)], fixed


def are_places(x: Tensor) -> Tensor:
    """Return which numbers are places of entries that were moved, and not of entries from elsewhere."""
    return (x >= 0) & (x == x.floor())


def has_no_lines(places: Tensor) -> bool:
    """Return whether the first matrix of places is one of moved entries alone whose rows are no shifts of each other."""
    matrix = places[(0,) * max(places.dim() - 2, 0)]
    if matrix.dim() < 2 or not matrix.numel():
        return False
    shifts = matrix[:, :1] - matrix[:1, :1]
    is_shifted = torch.equal(matrix - matrix[:1], shifts.expand(matrix.shape))
    return not is_shifted and bool(are_places(matrix - FRACTION).all())


def build_source(varying: list[tuple[int, Tensor, int]], count: int, elsewhere: Tensor) -> DimSource:
    """Return the source of a dimension along which these axes vary."""
    order, total = torch.zeros(count, dtype=torch.long, device=elsewhere.device), 1
    for _, places, size in varying:
        order, total = order * size + places, total * size
    is_whole = total == count == len(elsewhere) and bool((order == torch.arange(count, device=order.device)).all())
    places = torch.stack([one for _, one, _ in varying]) if varying else order[None, :0]
    return DimSource(tuple(axis for axis, _, _ in varying), places, is_whole, elsewhere)


def select_form(
    table: AxisTable, form: ScoreForm | None, sources: list[DimSource], fixed: dict[int, int], dims: Dims
) -> ScoreForm | None:
    """Return a form of the entries that were selected along its axes; None if some are from elsewhere or of joined axes."""
    moved = [
        (one, axes) for one, axes in zip(sources, dims, strict=True) if not one.is_whole and (one.axes or one.elsewhere.any())
    ]
    if form is None or any(bool(one.elsewhere.any()) or len(one.axes) != 1 for one, _ in moved):
        return None
    renamed = {one.axes[0]: (axes[0], one.places[0]) for one, axes in moved}
    return select_entries(table, form, renamed, fixed)._replace(dims=dims)


def select_entries(
    table: AxisTable, form: ScoreForm, renamed: dict[int, tuple[int, Tensor]], fixed: dict[int, int]
) -> ScoreForm:
    """Return a form whose tensors have entries of some axes selected under a new axis, and one entry of fixed axes."""
    if not renamed and not fixed:
        return form

    def select(x: Tensor, dims: Dims) -> tuple[Tensor, Dims]:
        have = [axis for axes in table.expand_dims(dims) for axis in axes]
        x = x.reshape(table.get_sizes(tuple(have)))
        for n, axis in reversed([*enumerate(have)]):
            if axis in fixed:
                x = x.select(n, fixed[axis])
            elif axis in renamed:
                x = x.index_select(n, renamed[axis][1])
        return x, tuple((renamed[axis][0] if axis in renamed else axis,) for axis in have if axis not in fixed)

    steps = []
    for step in form.steps:
        if isinstance(step.operand, ScoreForm):
            step = step._replace(operand=select_entries(table, step.operand, renamed, fixed))
        elif isinstance(step.operand, Tensor):
            operand, own = select(step.operand, step.dims)
            step = step._replace(operand=operand, dims=own)
        steps.append(step)
    (a, a_dims), (b, b_dims) = select(form.a, form.a_dims), select(form.b, form.b_dims)
    scores = tuple(
        tuple(renamed[axis][0] if axis in renamed else axis for axis in axes if axis not in fixed)
        for axes in table.expand_dims(form.dims)
    )
    shared = tuple(
        renamed[axis][0] if axis in renamed else axis for axis in table.expand_axes(form.shared) if axis not in fixed
    )
    return ScoreForm(a, b, a_dims, b_dims, scores, tuple(steps), shared)


def add_sink(table: AxisTable, scores: Tensor, moved: MovedEntries | None, axis: Any) -> MovedEntries | None:
    """Return the places of scores that a softmax over an axis turns into weights, with a sink if some are from elsewhere."""
    if moved is None or moved.form is None or type(axis) is not int:
        return moved
    sources = find_sources(table, moved)
    if sources is None:
        return moved
    dim_sources, axis = sources[0], axis % scores.dim()
    dims_with_sinks = [n for n, one in enumerate(dim_sources) if bool(one.elsewhere.any())]
    if dims_with_sinks != [axis] or any(
        not one.is_whole and len(one.elsewhere) > 1 for n, one in enumerate(dim_sources) if n != axis
    ):
        return moved
    columns = scores.detach().index_select(axis, dim_sources[axis].elsewhere.nonzero().flatten())
    dims = tuple(one.axes if n != axis else () for n, one in enumerate(dim_sources))
    if moved.shift is not None and axis != scores.dim() - 1:
        return moved
    sinks = columns.logsumexp(axis, keepdim=True)
    form = moved.form.add_step(StepKind.SINK, sinks if moved.shift is None else sinks - moved.shift, dims)
    return moved._replace(form=form, is_owned=False)
