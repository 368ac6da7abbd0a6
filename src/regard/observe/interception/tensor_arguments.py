"""The tensors among the arguments and results of functions."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.interception.lookups import IS_TENSOR

PLACES = ("condition", "tensors", "input", "other", "tensor1", "tensor2")  # the first arguments of functions, in order
ALIASES = {"axis": "dim", "keepdims": "keepdim"}  # of arguments, as NumPy names them
PLAIN = frozenset((Tensor, nn.Parameter))  # classes of most tensors, which need no inspection
SINGLE = PLAIN | {int, float, bool, slice, type(None), str, torch.dtype, torch.device}  # classes of arguments without entries
COLLECTIONS = (list, tuple, dict)


def list_objects(args: Any, kwargs: Any) -> Any:
    """Return the arguments if all are of classes without entries, which is quick to see, else the tensors among them."""
    return args if not kwargs and SINGLE.issuperset(map(type, args)) else find_tensors(args, kwargs)


def find_tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments, including those in lists and dictionaries of positional arguments."""
    tensors: list[Tensor] = [*filter(IS_TENSOR, args)]
    if len(tensors) < len(args) and not SINGLE.issuperset(map(type, args)):
        for x in args:
            if isinstance(x, COLLECTIONS):
                tensors += filter(IS_TENSOR, list_entries(x))
    if kwargs:
        tensors += filter(IS_TENSOR, kwargs.values())
    return tensors


def list_tensors_by_place(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a function of this name as it is usually called: tensors by place, operands in no list, `dim`."""
    if name == "einsum" and len(args) == 2 and isinstance(args[1], list | tuple):
        return (args[0], *args[1]), kwargs
    if not ALIASES.keys().isdisjoint(kwargs):
        kwargs = {ALIASES.get(key, key): value for key, value in kwargs.items()}
    places = [key for key in PLACES if key in kwargs] if kwargs else []
    if not places:
        return args, kwargs
    return (*args, *(kwargs[key] for key in places)), {key: value for key, value in kwargs.items() if key not in PLACES}


def list_entries(x: Any) -> Any:
    """Return the entries of a list, tuple or dictionary; none for anything else."""
    return () if not isinstance(x, COLLECTIONS) else x.values() if isinstance(x, dict) else x
