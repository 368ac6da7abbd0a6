"""Entries of scores or weights that functions moved: where each lay in the tensor whose axes are known.

A function that moves entries is repeated on a tensor of places, the flat index of every entry. Axes, and with them the formula,
come from the places when they are needed: an axis that kept its order is known again, another one is a selection of the rows of
queries or keys. A column from elsewhere beside the scores of a softmax is its sink.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.labelled_product import LabelledProduct
from regard.observe.interception.provenance import is_in_place, list_entries
from regard.observe.interception.score_form import CHOOSES_BY_VALUE, KEEPING, MOVERS, PERMUTES, VIEWS, ScoreForm, StepKind
from regard.observe.interception.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.traces import MovedEntries, Trace, Traced, TraceKind, Traces, is_followable

FRACTION = 0.3125  # of every place, so that a number which a function writes is none
MAX_PLACES = 2**26
SUMS = {"scatter_add", "index_add", "fold"}
REPLAYED = (MOVERS | VIEWS | PERMUTES | {"expand", "broadcast_to", "expand_as"}) - CHOOSES_BY_VALUE - SUMS


class DimSource(NamedTuple):
    """The axes of the base that vary along a dimension, the place of each entry on them, and whether all stand in order."""

    axes: Axes
    places: Tensor  # (axes, entries)
    is_whole: bool
    elsewhere: Tensor  # (entries of the dimension), True where its entries are from elsewhere


def is_replayed(name: str) -> bool:
    """Return whether a function of this name moves entries in a way that does not depend on their values."""
    return strip_affixes(name) in REPLAYED or name in REPLAYED


def fills_followed(name: str, args: Any, traced: list[Traced]) -> bool:
    """Return whether a function writes into a followed tensor whose axes are known, which moves none of its entries."""
    return name == "__setitem__" and any(x is args[0] and trace.dims is not None for x, trace in traced)


def follow_places(
    traces: Traces, func: Any, name: str, args: Any, kwargs: Any, traced: list[Traced], results: list[Tensor]
) -> None:
    """Follow the places of the entries that a function moved; nothing if they are of several bases."""
    base = find_base(traces, traced)
    followed = [(y, trace) for y in results if (trace := traces.find(y)) is not None]
    if base is None or not followed or kwargs.get("out") is not None:
        return
    places: dict[int, Tensor | None] = {id(x): trace.moved.places for x, trace in traced if trace.moved is not None}
    is_owner = is_in_place(name)
    owns = is_owner and traced[0][0] is args[0] and traced[0][1].moved is not None and traced[0][1].moved.is_owned
    made = replay_function(func, name, args, kwargs, places, copies=not owns, fills=True)
    dropped = [trace for _, trace in traced if trace.undropped is not None]
    undropped = []
    if dropped:
        kept = {id(x): trace.undropped[0] if trace.undropped is not None else x.detach() for x, trace in traced}
        undropped = replay_function(func, name, args, kwargs, kept, copies=True, fills=False)
    for n, (y, trace) in enumerate(followed):
        if len(made) != len(followed) or made[n].shape != y.shape:
            return
        before = (undropped[n], None) if len(undropped) == len(followed) else None
        moved = MovedEntries(made[n], *base, is_owned=is_owner)
        traces.put(y, trace._replace(dims=None, form=None, undropped=before, moved=moved))


def find_base(traces: Traces, traced: list[Traced]) -> tuple[Dims, ScoreForm | None] | None:
    """Return the axes and the form of the tensor that all of the tensors took their entries from; None if there is none.

    A tensor without places becomes a base of its own.
    """
    found: list[MovedEntries] = []
    for n, (x, trace) in enumerate(traced):
        if trace.moved is None and trace.dims is not None and x.numel() <= MAX_PLACES:
            places = torch.arange(x.numel(), dtype=torch.float64, device=x.device).add_(FRACTION).view(x.shape)
            traced[n] = x, trace._replace(moved=MovedEntries(places, trace.dims, trace.form))
            traces.put(*traced[n])
        moved = traced[n][1].moved
        if moved is None:
            return None
        found.append(moved)
    first, alike = found[0], {(trace.kind, trace.function) for _, trace in traced}
    same = all(one.form is first.form and one.dims == first.dims for one in found)
    return (first.dims, first.form) if same and len(alike) == 1 else None


def replay_function(
    func: Any, name: str, args: Any, kwargs: Any, given: dict[int, Any], copies: bool, fills: bool
) -> list[Tensor]:
    """Return the results of a function on other tensors in the place of those given by id; none if it fails.

    Other floating-point tensors are NaN if `fills`. What is written into is a copy if `copies`.
    """

    def substitute(x: Any, is_written: bool = False) -> Any:
        if isinstance(x, Tensor):
            other = given.get(id(x))
            if other is None:
                other = x.new_full((), torch.nan, dtype=torch.float64).expand(x.shape) if fills and x.is_floating_point() else x
            return other.clone() if is_written and copies else other
        if isinstance(x, list | tuple) and any(isinstance(one, Tensor | list | tuple) for one in x):
            return type(x)([substitute(one) for one in x])
        return x

    is_written = is_in_place(name)
    try:
        taken = [substitute(x, is_written and n == 0) for n, x in enumerate(args)]
        made = func(*taken, **{key: substitute(x) for key, x in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []
    made = taken[0] if made is None else made
    return [y.detach() for y in ([made] if isinstance(made, Tensor) else list_entries(made)) if is_followable(y)]


def keep_places(trace: Trace, name: str, args: Any, kwargs: Any, x: Tensor, results: list[Tensor]) -> MovedEntries | None:
    """Return the places of the result of a function of each entry; None if the formula does not hold for it.

    A shift of whole rows leaves their softmax as it is, but for a sink.
    """
    moved, core = trace.moved, strip_affixes(name)
    if moved is None or len(results) != 1 or results[0].shape != x.shape or core in MOVERS:
        return None
    other = args[1] if core in ("add", "sub") and len(args) == 2 and args[0] is x and not kwargs else None
    if isinstance(other, Tensor) and other.dim() == x.dim() and other.shape[-1] == 1 and trace.kind is TraceKind.SCORES:
        shift = other.detach() if core == "add" else -other.detach()
        return moved._replace(shift=shift if moved.shift is None else moved.shift + shift, is_owned=False)
    keeps = trace.kind is not TraceKind.SCORES or core in KEEPING
    return moved._replace(is_owned=False) if keeps else None


def settle_all(traces: Traces, traced: list[Traced]) -> list[Traced]:
    """Return followed tensors with axes and forms that come from their places; without places, with axes of their own."""
    settled = []
    for x, trace in traced:
        if trace.dims is None:
            trace = settle_trace(traces.table, x, trace)
            traces.put(x, trace)
        settled.append((x, trace))
    return settled


def settle_trace(table: AxisTable, x: Tensor, trace: Trace) -> Trace:
    """Return the trace of a tensor with the axes and the form of its entries."""
    sources = None if trace.moved is None else find_sources(table, trace.moved)
    if trace.moved is None or sources is None:
        return trace._replace(dims=table.add_dims(x.shape), form=None, keys=None, undropped=None, moved=None)
    found, fixed = sources
    dims = tuple(one.axes if one.is_whole else table.add_axis(n) for one, n in zip(found, x.shape, strict=True))
    form = select_form(table, trace.moved.form, found, fixed, dims)
    keys = trace.keys
    if keys is not None and not set(table.expand_axes(keys)) <= {axis for axes in dims for axis in axes}:
        keys = None
    undropped = None if trace.undropped is None else (trace.undropped[0], dims)
    changes = tuple(one for one in trace.changes if form is None or strip_affixes(one) not in REPLAYED)
    owned = trace.moved._replace(is_owned=False)
    return trace._replace(dims=dims, form=form, keys=keys, undropped=undropped, changes=changes, moved=owned)


def find_sources(table: AxisTable, moved: MovedEntries) -> tuple[list[DimSource], dict[int, int]] | None:
    """Return where the entries along each dimension come from, and the places of axes that none varies along.

    None unless each axis of the base varies along one dimension at most.
    """
    axes = tuple(axis for group in table.expand_dims(moved.dims) for axis in group)
    sizes = table.get_sizes(axes)
    places = moved.places - FRACTION
    known = (places >= 0) & (places == places.floor())
    ranks = range(places.dim())
    kept = [known.any(dim=[m for m in ranks if m != n]) if len(ranks) > 1 else known for n in ranks]
    counts = [int(one.sum()) for one in kept]
    if not known.any() or int(known.sum()) != torch.tensor(counts).prod():
        return None
    for n in ranks:
        if counts[n] < places.shape[n]:
            places = places.index_select(n, kept[n].nonzero().flatten())
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
    return [build_source(one, int(count), ~keep) for one, count, keep in zip(varying, counts, kept, strict=True)], fixed


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
    return replace(select_entries(table, form, renamed, fixed), dims=dims)


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
    return ScoreForm(a, b, a_dims, b_dims, scores, tuple(steps))


def add_sink(table: AxisTable, scores: Tensor, moved: MovedEntries | None, axis: Any) -> MovedEntries | None:
    """Return the places of scores that a softmax over an axis turns into weights, with a sink if some are from elsewhere."""
    if moved is None or moved.form is None or type(axis) is not int:
        return moved
    sources = find_sources(table, moved)
    if sources is None:
        return moved
    found, axis = sources[0], axis % scores.dim()
    apart = [n for n, one in enumerate(found) if bool(one.elsewhere.any())]
    if apart != [axis] or any(not one.is_whole and len(one.elsewhere) > 1 for n, one in enumerate(found) if n != axis):
        return moved
    columns = scores.detach().index_select(axis, found[axis].elsewhere.nonzero().flatten())
    dims = tuple(one.axes if n != axis else () for n, one in enumerate(found))
    if moved.shift is not None and axis != scores.dim() - 1:
        return moved
    sinks = columns.logsumexp(axis, keepdim=True)
    form = moved.form.add_step(StepKind.SINK, sinks if moved.shift is None else sinks - moved.shift, dims)
    return moved._replace(form=form, is_owned=False)


def drop_repeats(
    table: AxisTable, x: Tensor, trace: Trace, product: LabelledProduct | None
) -> tuple[Tensor, Trace, LabelledProduct | None]:
    """Return weights x, their trace and their product without the dimensions along which they were repeated."""
    sources = None if trace.moved is None or product is None else find_sources(table, trace.moved)
    if sources is None or product is None or trace.dims is None:
        return x, trace, product
    kept, dims = x, list(trace.dims)
    undropped = x if trace.undropped is None else trace.undropped[0]
    for n, one in enumerate(sources[0]):
        first = undropped.narrow(n, 0, 1)
        if (
            not one.axes
            and not one.elsewhere.any()
            and torch.equal(first.expand(undropped.shape).nan_to_num(), undropped.nan_to_num())
        ):
            kept, undropped, dims[n] = kept.narrow(n, 0, 1), first, ()
    before = None if trace.undropped is None else (undropped, tuple(dims))
    place = 0 if product.operands[0] is x else 1
    own = dict(zip(product.labels[place], kept.shape, strict=True))
    other = product.operands[1 - place]
    for n, label in enumerate(product.labels[1 - place]):
        if own.get(label, 1) > 1 and other.stride(n) == 0:  # the same values for every row
            other = other.narrow(n, 0, 1)
    operands = (kept, other) if place == 0 else (other, kept)
    return kept, trace._replace(dims=tuple(dims), undropped=before), product._replace(operands=operands)


def restore_keys(
    table: AxisTable, x: Tensor, trace: Trace, product: LabelledProduct | None
) -> tuple[Tensor, Trace, LabelledProduct | None]:
    """Return weights x, their trace and their product with the keys in the order that they had before they were moved.

    Keys that stand several times with the same values are joined. Nothing changes where a key is left out.
    """
    sources = None if trace.moved is None or product is None else find_sources(table, trace.moved)
    if sources is None or product is None or trace.dims is None:
        return x, trace, product
    place = 0 if product.operands[0] is x else 1
    x, values = x.detach(), product.operands[1 - place].detach()
    for n, (one, label) in enumerate(zip(sources[0], product.labels[place], strict=True)):
        if label in product.result or one.is_whole or len(one.axes) != 1 or bool(one.elsewhere.any()):
            continue
        index, size, along = one.places[0], table.get_sizes(one.axes)[0], product.labels[1 - place].index(label)
        first = torch.full((size,), len(index), device=index.device)
        first.scatter_reduce_(0, index, torch.arange(len(index), device=index.device), "amin")
        if bool((first == len(index)).any()) or values.shape[along] != len(index):
            continue
        chosen = values.index_select(along, first)
        if not torch.equal(chosen.index_select(along, index).nan_to_num(), values.nan_to_num()):
            continue
        x, values = join_entries(x, n, index, size), chosen
        dims = tuple(one.axes if m == n else axes for m, axes in enumerate(trace.dims))
        form, (moved,) = trace.form, trace.dims[n]
        if form is not None:
            form = select_entries(table, form, {moved: (one.axes[0], first)}, {})
        before = trace.undropped
        before = None if before is None else (join_entries(before[0], n, index, size), dims)
        trace = trace._replace(dims=dims, form=form, keys=None, undropped=before)
    return x, trace, product._replace(operands=(x, values) if place == 0 else (values, x))


def join_entries(x: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    """Return the entries of x along a dimension at the places of an index, added where several have the same place."""
    shape = [size if n == dim else length for n, length in enumerate(x.shape)]
    return x.new_zeros(shape).index_add_(dim, index, x.detach())
