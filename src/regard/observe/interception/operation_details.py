"""What is logged of an operation besides its tensors: what it looked up, and how it moved or summed axes."""

from functools import cache
from typing import Any

from regard.observe.interception.lookups import (
    AXIS_PLACES,
    REARRANGES,
    Indices,
    Layout,
    find_axis,
    find_indices,
    find_layout,
    put_table_first,
)
from regard.observe.interception.tensor_arguments import PLAIN

GATHERS = {"__getitem__", "index_select", "gather", "take_along_dim", "embedding"}  # entries of a tensor, by an index
OperationDetails = tuple[Indices | None, tuple[int, tuple[int, ...]] | None, Layout | None]
NO_DETAILS: OperationDetails = (None,) * 3


@cache
def has_details(name: str) -> bool:
    """Return whether more than its tensors may be logged of the function of this name."""
    return name in GATHERS | AXIS_PLACES.keys() | REARRANGES


def read_details(name: str, args: Any, kwargs: Any, result: Any) -> OperationDetails:
    """Return what is logged of a function of this name besides its tensors: its lookup, axis and layout."""
    lookup = None
    if name in GATHERS:
        lookup = find_indices(name, put_table_first(args) if name == "embedding" else args, kwargs)
    along = None
    if name in AXIS_PLACES and args and type(args[0]) in PLAIN:
        along = find_axis(name, args[0], args, kwargs)
    layout = find_layout(args, kwargs, result) if name in REARRANGES else None
    return lookup, along, layout
