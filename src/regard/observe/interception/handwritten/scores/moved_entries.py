"""Entries of scores or weights that functions moved: where each lay in the tensor whose axes are known.

A function that moves entries is repeated on a tensor of places, the flat index of every entry. Axes, and with them the formula,
come from the places when they are needed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.score_form import (
    CHOOSES_BY_VALUE,
    KEEPING,
    MOVERS,
    PERMUTES,
    VIEWS,
    ScoreForm,
)
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import (
    MovedEntries,
    Trace,
    Traced,
    TraceKind,
    Traces,
    is_followable,
)
from regard.observe.interception.handwritten.scores.distance_terms import follow_distances
from regard.observe.interception.handwritten.scores.entry_sources import FRACTION, find_sources, select_form
from regard.observe.interception.plain_tensors import is_distributed
from regard.observe.interception.provenance import is_in_place
from regard.observe.interception.tensor_arguments import list_entries

MAX_PLACES = 2**26
SUMS = {"scatter_add", "index_add", "fold"}
REPLAYED = (MOVERS | VIEWS | PERMUTES | {"expand", "broadcast_to", "expand_as"}) - CHOOSES_BY_VALUE - SUMS


@cache
def is_replayed(name: str) -> bool:
    """Return whether a function of this name moves entries in a way that does not depend on their values. Cached per name."""
    return strip_affixes(name) in REPLAYED or name in REPLAYED


def fills_followed(name: str, args: Any, arguments: list[Traced]) -> bool:
    """Return whether a function writes into a followed tensor whose axes are known, which moves none of its entries."""
    return name == "__setitem__" and any(x is args[0] and trace.dims is not None for x, trace in arguments)


def follow_places(
    traces: Traces, func: Any, name: str, args: Any, kwargs: Any, traced: list[Traced], results: list[Tensor]
) -> None:
    """Follow the places of the entries that a function moved; they are not known if they are of several bases."""
    followed = [(y, trace) for y in results if (trace := traces.find(y)) is not None]
    base = find_base(traces, traced)  # puts back the trace of an argument, which may also be a result
    for y, trace in followed:
        traces.put(y, trace._replace(moved=None))
    if base is None or not followed or kwargs.get("out") is not None:
        return
    places: dict[int, Tensor | None] = {id(x): trace.moved.places for x, trace in traced if trace.moved is not None}
    is_owner = is_in_place(name)
    owns = is_owner and traced[0][0] is args[0] and traced[0][1].moved is not None and traced[0][1].moved.is_owned
    new_places = replay_function(func, name, args, kwargs, places, copies=not owns, fills=True)
    dropout_traces = [trace for _, trace in traced if trace.undropped is not None]
    undropped = []
    if dropout_traces:
        undropped_weights = {id(x): trace.undropped[0] if trace.undropped is not None else x.detach() for x, trace in traced}
        undropped = replay_function(func, name, args, kwargs, undropped_weights, copies=True, fills=False)
    for n, (y, trace) in enumerate(followed):
        if len(new_places) != len(followed) or new_places[n].shape != y.shape:
            return
        before = (undropped[n], None) if len(undropped) == len(followed) else None
        moved = MovedEntries(new_places[n], *base, is_owned=is_owner)
        traces.put(y, trace._replace(dims=None, form=None, relative=None, undropped=before, moved=moved))


def find_base(traces: Traces, traced: list[Traced]) -> tuple[Dims, ScoreForm | None] | None:
    """Return the axes and the form of the tensor that all of the tensors took their entries from; None if there is none.

    A tensor without places becomes a base of its own.
    """
    if any(is_distributed(x) for x, _ in traced):
        return None  # places are of one rank
    entries: list[MovedEntries] = []
    for n, (x, trace) in enumerate(traced):
        if trace.moved is None and x.numel() <= MAX_PLACES:
            if trace.dims is None:
                trace = settle_trace(traces.table, x, trace)
            assert trace.dims is not None
            places = torch.arange(x.numel(), dtype=torch.float64, device=x.device).add_(FRACTION).view(x.shape)
            traced[n] = x, trace._replace(moved=MovedEntries(places, trace.dims, trace.form))
            traces.put(*traced[n])
        moved = traced[n][1].moved
        if moved is None:
            return None
        entries.append(moved)
    first, alike = entries[0], {(trace.kind, trace.function) for _, trace in traced}
    same = all(one.form is first.form and one.dims == first.dims for one in entries)
    return (first.dims, first.form) if same and len(alike) == 1 else None


def replay_function(
    func: Any, name: str, args: Any, kwargs: Any, substitutes: dict[int, Any], copies: bool, fills: bool
) -> list[Tensor]:
    """Return the results of a function on other tensors in the place of those given by id; none if it fails.

    Other floating-point tensors are NaN if `fills`. What is written into is a copy if `copies`.
    """

    def substitute(x: Any, is_written: bool = False) -> Any:
        if isinstance(x, Tensor):
            other = substitutes.get(id(x))
            if other is None:
                other = x.new_full((), torch.nan, dtype=torch.float64).expand(x.shape) if fills and x.is_floating_point() else x
            return other.clone() if is_written and copies else other
        if isinstance(x, list | tuple) and any(isinstance(one, Tensor | list | tuple) for one in x):
            return type(x)([substitute(one) for one in x])
        return x

    is_written = is_in_place(name)
    try:
        arguments = [substitute(x, is_written and n == 0) for n, x in enumerate(args)]
        output = func(*arguments, **{key: substitute(x) for key, x in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []
    output = arguments[0] if output is None else output
    return [y.detach() for y in ([output] if isinstance(output, Tensor) else list_entries(output)) if is_followable(y)]


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
    traces_with_axes = []
    for x, trace in traced:
        if trace.dims is None:
            trace = settle_trace(traces.table, x, trace)
            traces.put(x, trace)
        traces_with_axes.append((x, trace))
    return traces_with_axes


def settle_trace(table: AxisTable, x: Tensor, trace: Trace) -> Trace:
    """Return the trace of a tensor with the axes and the form of its entries."""
    sources = None if trace.moved is None else find_sources(table, trace.moved)
    if trace.moved is None or sources is None:
        relative = None if trace.moved is None or trace.kind is not TraceKind.SCORES else follow_distances(table, trace.moved)
        dims = table.add_dims(x.shape) if relative is None else relative.dims
        return trace._replace(dims=dims, form=None, relative=relative, keys=None, undropped=None, moved=None)
    dim_sources, fixed = sources
    dims = tuple(one.axes if one.is_whole else table.add_axis(n) for one, n in zip(dim_sources, x.shape, strict=True))
    form = select_form(table, trace.moved.form, dim_sources, fixed, dims)
    keys = trace.keys
    if keys is not None and not set(table.expand_axes(keys)) <= {axis for axes in dims for axis in axes}:
        keys = None
    undropped = None if trace.undropped is None else (trace.undropped[0], dims)
    changes = tuple(one for one in trace.changes if form is None or strip_affixes(one) not in REPLAYED)
    owned = trace.moved._replace(is_owned=False)
    return trace._replace(dims=dims, form=form, keys=keys, undropped=undropped, changes=changes, moved=owned)
