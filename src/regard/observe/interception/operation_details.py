"""What is logged of an operation besides its tensors: what it looked up, and how it moved or summed axes."""

from functools import cache
from typing import Any

from torch import Tensor

from regard.observe.interception.lookups import (
    AXIS_PLACES,
    COPIES_ENTRIES,
    CUTS_OR_ROLLS,
    REARRANGES,
    Copy,
    Layout,
    Lookup,
    find_axis,
    find_copy,
    find_layout,
    find_lookup,
    moves_last_axis,
    put_table_first,
)
from regard.observe.interception.tensor_arguments import PLAIN

SUMS = {"sum", "mean", "amax", "max", "logsumexp", "special_logsumexp"}  # whose axis is logged
GATHERS = {"__getitem__", "index_select", "gather", "take_along_dim", "embedding"}  # entries of a tensor, by an index
OperationDetails = tuple[Lookup | None, Any, tuple[int, tuple[int, ...]] | None, Layout | None, Copy | None]
NO_DETAILS: OperationDetails = (None,) * 5


@cache
def has_details(name: str) -> bool:
    """Return whether more than its tensors may be logged of the function of this name."""
    return name == "unfold" or name in SUMS | CUTS_OR_ROLLS | GATHERS | AXIS_PLACES.keys() | REARRANGES | COPIES_ENTRIES


def read_details(name: str, args: Any, kwargs: Any, result: Any) -> OperationDetails:
    """Return what is logged of a function of this name besides its tensors: its lookup, `dim`, axis, layout and copy."""
    lookup, dim = None, None
    if name in SUMS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    elif name == "unfold" and has_more_axes(args, result):  # not that of images
        dim = kwargs.get("dimension", args[1] if len(args) > 1 else None)
        dim = dim if dim is None or dim < 0 else dim - args[0].dim()
    elif name in CUTS_OR_ROLLS and moves_last_axis(name, args, kwargs):
        dim = -1
    if name in GATHERS:
        lookup = find_lookup(name, put_table_first(args) if name == "embedding" else args, kwargs)
    along = None
    if name in AXIS_PLACES and args and type(args[0]) in PLAIN:
        along = find_axis(name, args[0], args, kwargs)
    layout = find_layout(args, kwargs, result) if name in REARRANGES else None
    copy = find_copy(args, result) if name in COPIES_ENTRIES else None
    return lookup, dim, along, layout, copy


def has_more_axes(args: Any, result: Any) -> bool:
    """Return whether a result has more axes than the first of a function's arguments."""
    return bool(args) and all(isinstance(x, Tensor) for x in (args[0], result)) and result.dim() > args[0].dim()
