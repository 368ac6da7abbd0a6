"""What functions state of the entries that they picked and of the axes that they moved."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLAIN = (Tensor, torch.nn.Parameter)
SLICES = {int, slice, type(None), type(Ellipsis)}  # classes of the entries of an index that cuts
SEQUENCES = (tuple, list)
RUNNING = {"cumsum", "cumprod", "logcumsumexp"}  # all entries up to each along an axis
AXIS_PLACES = {"__getitem__": 1, "__iter__": 1, "select": 1, "unbind": 1, "split": 2} | dict.fromkeys(RUNNING, 1)  # by function
PERMUTES_AXES = {"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"}  # those that its arguments state
JOINS_PARTS = {"cat", "concat", "concatenate", "stack"}
SPLITS = {"chunk", "split", "tensor_split"}
REARRANGES = (
    PERMUTES_AXES | JOINS_PARTS | SPLITS | {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "mT"}
)  # functions whose layout is logged
PRODUCTS_OF_TWO = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"}
SHAPED = PRODUCTS_OF_TWO | {  # with logged shapes
    *("__getitem__", "select", "narrow", "pad", "topk", "sort", "view_as_complex", "view_as_real"),
}
Indices = tuple["weakref.ref[Tensor]", ...]
Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # shapes before and after, other arguments
IS_TENSOR = Tensor.__instancecheck__  # isinstance(x, Tensor) for filter(), which calls it without a frame of Python


class Shapes(NamedTuple):
    """The shapes of what an operation was given and of its result, and how it moved their axes.

    So do the equation of an einsum, the index of a slice, or the pattern of einops's layer Rearrange with the lengths of axes.
    """

    given: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    how: Any = None


def find_indices(name: str, args: Any, kwargs: Any) -> Indices | None:
    """Return the tensors by which a function of this name, one of those that gather entries, picks them; None without any."""
    entries = (*args[1:], *kwargs.values())
    if name == "__getitem__" and isinstance(args[1], tuple):
        entries = args[1]
    elif name == "embedding":
        entries = args[1:2]
    return tuple(map(weakref.ref, filter(IS_TENSOR, entries))) or None


def find_ids(child: nn.Module, args: Any) -> list[Tensor]:
    """Return the token ids that a module was given to look up embeddings of; empty if it looks up none."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_nested:
        return []
    return [x] if any(isinstance(part, nn.Embedding) for part in child.modules()) else []


def find_axis(name: str, x: Tensor, args: Any, kwargs: Any) -> tuple[int, tuple[int, ...]] | None:
    """Return the axis along which a function picks single entries, or sums up entries, and the shape of x, its first argument.

    The function is one of AXIS_PLACES. None if it does neither.
    """
    place = AXIS_PLACES[name]
    if x.is_nested:
        return None
    if name == "__getitem__":
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        axis = find_picked_axis(entries, x.dim())
    elif name == "split" and kwargs.get("split_size", args[1] if len(args) > 1 else None) != 1:
        return None
    else:
        axis = kwargs.get("dim", args[place] if len(args) > place else 0)
    return (axis % x.dim(), x.shape) if type(axis) is int and x.dim() else None


def find_layout(args: Any, kwargs: Any, result: Any) -> Layout | None:
    """Return the shapes of a function's first tensor and its first result, and its other arguments; None for other results."""
    first = args[0] if args else None
    first, result = (x[0] if isinstance(x, SEQUENCES) and x else x for x in (first, result))
    if type(first) is not Tensor or type(result) is not Tensor or first.is_nested:
        return None
    return first.shape, result.shape, args[1:], kwargs


def find_shapes(name: str, args: Any, result: Any) -> Shapes | None:
    """Return the shapes of a product, a slice or a module; None for tensors that are not plain, and other indices."""
    tensors = [x for x in args if type(x) in PLAIN]
    if name in ("topk", "sort") and isinstance(result, SEQUENCES):
        result = result[0]
    if type(result) is not Tensor or not tensors or result.is_nested or any(x.is_nested for x in tensors):
        return None
    how = args[0] if name == "einsum" else args[1] if name == "__getitem__" else None
    if name in ("select", "narrow"):
        how = args[1:] if len(args) == (3 if name == "select" else 4) and SLICES.issuperset(map(type, args[1:])) else None
    if name == "__getitem__":
        entries = how if isinstance(how, tuple) else (how,)
        if not SLICES.issuperset(map(type, entries)):
            return None
    return Shapes(tuple(x.shape for x in tensors), result.shape, how)


def find_picked_axis(entries: tuple[Any, ...], dims: int) -> int | None:
    """Return the axis that the first integer among the entries of `x[entries]` picks an entry of; None if there is none."""
    first = next((n for n, one in enumerate(entries) if type(one) is int), None)
    if first is None or any(isinstance(one, Tensor) for one in entries):
        return None
    if any(one is Ellipsis for one in entries[:first]):
        return dims - sum(one is not None for one in entries[first:])
    return sum(one is not None for one in entries[:first])


def put_table_first(args: Any) -> Any:
    """Return the arguments of an embedding with its table before the indices, as those of torch.embedding are."""
    is_swapped = len(args) > 1 and all(map(IS_TENSOR, args[:2])) and args[1].dim() == 2 and not args[0].is_floating_point()
    return (args[1], args[0], *args[2:]) if is_swapped else args


def read_version(x: Tensor) -> int:
    """Return how often a tensor or a view of it was written into; 0 if it does not count that."""
    return 0 if x.is_inference() else x._version
