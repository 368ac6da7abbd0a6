"""Entries that a function looked up in a tensor by an index, as a graph's edges look up the nodes that they connect."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MASKS = (torch.bool, torch.uint8)
FULL = slice(None)
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
Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # shapes before and after, other arguments
COPIES_ENTRIES = {"reshape", "flatten", "contiguous", "clone", "repeat", "repeat_interleave", "tile"}  # often in another order
CUTS_OR_ROLLS = {"__getitem__", "narrow", "roll"}
IS_TENSOR = Tensor.__instancecheck__  # isinstance(x, Tensor) for filter(), which calls it without a frame of Python


class Copy(NamedTuple):
    """The shapes and strides of a tensor and of its copy."""

    given_shape: tuple[int, ...]
    given_strides: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of what an operation was given and of its result, and how it moved their axes.

    So do the equation of an einsum, the index of a slice, or the pattern of einops's layer Rearrange with the lengths of axes.
    """

    given: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    how: Any = None


class Lookup(NamedTuple):
    """The indices of a look-up along one axis of `size` entries, 0 if unknown, kept alive until the module returns.

    Several indices together look up single entries. `axis` is that of the index along which look-ups follow each other.
    """

    indices: tuple[Tensor, ...]
    axis: int
    size: int
    given: "tuple[weakref.ref[Tensor], ...]"  # the indices that the function was given, of which some may be copied
    dim: int | None  # the axis of what was looked up, from the last; None if unknown

    @property
    def key(self) -> tuple[int, ...]:
        """The identity of the indices."""
        return tuple(map(id, self.indices))

    def read_index(self) -> Tensor | None:
        """Return the index along the axis (n,) or (b, n) in int64; None if it is a mask, several, or not of whole entries."""
        if len(self.indices) > 1 or not self.size or self.indices[0].dtype in MASKS:
            return None
        return read_rows(self.indices[0], self.axis)

    def count_picks(self) -> int:
        """Return how many entries were looked up, in each sample if the indices of each are of whole entries."""
        rows = self.read_index()
        return torch.broadcast_shapes(*(one.shape for one in self.indices)).numel() if rows is None else rows.shape[-1]

    def has_repeats(self) -> bool:
        """Return whether an entry was looked up more than once; False for a mask."""
        if any(one.dtype in MASKS for one in self.indices):
            return False
        if len(self.indices) > 1:
            rows = torch.stack(torch.broadcast_tensors(*self.indices), -1).flatten(0, -2)
        elif not self.indices[0].dim():
            return False
        else:
            rows = self.indices[0].movedim(self.axis, 0)
        return len(rows.unique(dim=0)) < len(rows)


def find_lookup(name: str, args: Any, kwargs: Any) -> Lookup | None:
    """Return the look-up of a function of this name, one of those that gather entries; None if it has no tensor as an index."""
    if not args:
        return None
    x, along = args[0], 0
    if name == "__getitem__":
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        indices = (*filter(IS_TENSOR, entries),)
        axis = find_indexed_axis(entries, x.dim()) if indices else None
    elif name == "embedding":
        indices, axis = (*filter(IS_TENSOR, args[1:2]),), 0
    else:
        places = ("indices", "dim") if name == "take_along_dim" else ("dim", "index")
        named = {**dict(zip(places, args[1:], strict=False)), **kwargs}
        axis, index = named.get("dim"), named.get("index", named.get("indices"))
        indices = (index,) if isinstance(index, Tensor) else ()
        axis = axis % x.dim() if type(axis) is int and x.dim() else None
        along = axis if indices and axis is not None and axis < indices[0].dim() else 0
    if not indices:
        return None
    size = 0 if axis is None else x.shape[axis]
    given, dim = tuple(map(weakref.ref, indices)), None if axis is None else axis - x.dim()
    return Lookup(tuple(map(copy_if_unversioned, indices)), along, size, given, dim)


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


def find_copy(args: Any, result: Any) -> Copy | None:
    """Return the shapes and strides of a function's first tensor and of its result; None for tensors that are not plain."""
    first = args[0] if args else None
    if type(first) is not Tensor or type(result) is not Tensor or first.is_nested or first.layout is not torch.strided:
        return None
    return Copy(first.shape, first.stride(), result.shape, result.stride())


def find_picked_axis(entries: tuple[Any, ...], dims: int) -> int | None:
    """Return the axis that the first integer among the entries of `x[entries]` picks an entry of; None if there is none."""
    first = next((n for n, one in enumerate(entries) if type(one) is int), None)
    if first is None or any(isinstance(one, Tensor) for one in entries):
        return None
    if any(one is Ellipsis for one in entries[:first]):
        return dims - sum(one is not None for one in entries[first:])
    return sum(one is not None for one in entries[:first])


def moves_last_axis(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function, one of CUTS_OR_ROLLS, cuts or rolls its first argument along the last axis."""
    x = args[0]
    if name == "__getitem__":
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_last = any(one is Ellipsis for one in entries) or sum(one is not None for one in entries) == x.dim()
        return is_last and bool(entries) and isinstance(entries[-1], slice) and entries[-1] != FULL
    key, place = ("dims", 2) if name == "roll" else ("dim", 1)
    dims = kwargs.get(key, args[place] if len(args) > place else ())
    return not {-1, x.dim() - 1}.isdisjoint(dims if isinstance(dims, list | tuple) else (dims,))


def put_table_first(args: Any) -> Any:
    """Return the arguments of an embedding with its table before the indices, as those of torch.embedding are."""
    is_swapped = len(args) > 1 and all(map(IS_TENSOR, args[:2])) and args[1].dim() == 2 and not args[0].is_floating_point()
    return (args[1], args[0], *args[2:]) if is_swapped else args


def find_indexed_axis(entries: tuple[Any, ...], dims: int) -> int | None:
    """Return the axis that the first tensor among the entries of `x[entries]` is an index of; None if that is not known."""
    sized = [one for one in entries if one is not None]
    first = next(n for n, one in enumerate(sized) if isinstance(one, Tensor))
    if not all(isinstance(one, Tensor | slice) or one is Ellipsis or type(one) is int for one in sized):
        return None
    axis = dims - len(sized) + first if any(one is Ellipsis for one in sized[:first]) else first
    return axis if 0 <= axis < dims else None


def copy_if_unversioned(index: Tensor) -> Tensor:
    """Return a copy of an index that does not count how often it was written into, in the memory of its own entries."""
    if type(index) is not Tensor or not index.is_inference() or index.dtype in MASKS:
        return index
    own = index[tuple(FULL if step else slice(1) for step in index.stride())]
    return own.clone().expand_as(index)


def read_rows(index: Tensor, axis: int) -> Tensor | None:
    """Return an index of whole entries along an axis in int64: (n,), or (b, n) if it differs along the axes before.

    None if it differs from column to column.
    """
    if not index.numel():
        return None
    batch = index.flatten(0, axis - 1) if axis else index.reshape(1, -1, *index.shape[1:])
    rows = batch.flatten(2) if batch.dim() > 2 else batch.unsqueeze(2)
    if not bool((rows == rows[:, :, :1]).all()):
        return None
    first = rows[:, :, 0].long()
    return first[0] if bool((first == first[:1]).all()) else first


def read_version(x: Tensor) -> int:
    """Return how often a tensor or a view of it was written into; 0 if it does not count that."""
    return 0 if x.is_inference() else x._version
