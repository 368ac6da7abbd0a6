"""Biases of which less is stored than their entries: those that are read are computed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.mechanism.scores import score_dtype

STATED = ("__len__", "dim", "size", "numel", "is_floating_point", "element_size", "stride")  # what the shape and dtype tell
PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_nested", "is_sparse", "is_cuda", "is_meta", "requires_grad")
ENTRYWISE = ("to", "float", "double", "half", "bfloat16", "cpu", "detach", "clone", "contiguous", "__deepcopy__")
CASTS = ("to", "half", "bfloat16")  # perhaps to a precision in which the entries are not computed
METHODS = (*ENTRYWISE, "__getitem__", "expand", "to_dense", "data_ptr", "index_select")


class MatrixIndex(NamedTuple):
    """An index of a bias (..., q, k): what it says of the leading axes, of the queries, and of the keys."""

    leading: tuple[Any, ...]
    rows: Any
    columns: Any

    def find_spans(self, queries: int, keys: int) -> tuple[slice, slice] | None:
        """Return the queries and keys of an index that takes a span of each; None if it does not, or if one is empty."""
        if not (isinstance(self.rows, slice) and isinstance(self.columns, slice)):
            return None
        (i, m, down), (j, n, right) = self.rows.indices(queries), self.columns.indices(keys)
        return (slice(i, m), slice(j, n)) if down == right == 1 and i < m and j < n else None

    def find_entries(self, queries: int, keys: int) -> tuple[Tensor, Tensor] | None:
        """Return the queries and keys of an index of single entries, or of rows, as numbers that broadcast; else None."""
        rows, columns = self.rows, self.columns
        if isinstance(rows, Tensor) and isinstance(columns, slice) and rows.dim() == 1 and self.has_spans_alone:
            rows, columns = rows.unsqueeze(-1), torch.arange(keys, device=rows.device)[columns]
        if not (isinstance(rows, Tensor) and isinstance(columns, Tensor)):
            return None
        return rows + queries * (rows < 0), columns + keys * (columns < 0)

    @property
    def has_spans_alone(self) -> bool:
        """Whether the index takes spans or single entries of all leading axes."""
        return all(isinstance(one, slice | int) for one in self.leading)


class ComputedBias(Tensor):
    """A bias (..., q, k) whose class computes the entries that are read, and whatever else it knows of; torch gets them all."""

    has_sums = True  # whether its entries are computed by sums, and so in no lower precision

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch by the method of its name, or by the whole bias."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if isinstance(args[0] if args else None, ComputedBias):
            if name in STATED or (name == "__get__" and func.__self__.__name__ in PROPERTIES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in METHODS:
                return getattr(type(args[0]), name)(*args, **kwargs)
        return func(*make_dense(args), **make_dense(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute an operator of torch, where functions of torch are not overridden, by the whole bias."""
        return func(*make_dense(args), **make_dense(kwargs or {}))

    def __getitem__(self, index: Any) -> Tensor:
        """Return what is at an index, as of a tensor."""
        parts = parse_index(index, self.dim())
        found = None if parts is None else self.read(parts)
        return self.to_dense()[index] if found is None else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}{tuple(self.shape)}"

    def read(self, index: MatrixIndex) -> Tensor | None:
        """Return the entries of an index; None if they need the whole bias."""
        is_list = (list, tuple)
        leading = tuple(torch.tensor(x, device=self.device) if isinstance(x, is_list) else x for x in index.leading)
        spans = index.find_spans(*self.shape[-2:])
        if spans is not None:
            return self.select_spans(leading, *spans)
        entries = index.find_entries(*self.shape[-2:])
        return None if entries is None else self.read_entries(leading, *entries)

    def select_spans(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> Tensor:
        """Return the bias of a span of queries, a span of keys, and what an index of the leading axes says."""
        raise NotImplementedError

    def read_entries(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return the entries of queries and keys by index, which broadcast; None if they need the whole bias."""
        raise NotImplementedError

    def apply(self, function: Callable[[Tensor], Tensor]) -> "ComputedBias":
        """Return the bias with a function of what it stores, which may move it to another device."""
        raise NotImplementedError

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """Return the whole bias."""
        raise NotImplementedError

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return the entries along an axis at some places (n,)."""
        along = dim % self.dim()
        return self[(*(slice(None),) * along, index)]


class NumberedBias(ComputedBias):
    """A bias whose entries are `numbers` (..., n), or sums of some of them, by their places."""

    numbers: Tensor
    has_sums = False

    def copy_with(self, numbers: Tensor) -> "NumberedBias":
        """Return the bias with other numbers."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the numbers, without repeats along axes that are expanded."""
        return drop_repeated_axes(self.numbers).nbytes

    def data_ptr(self) -> int:
        """Return the address of the numbers."""
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the numbers."""
        return self.numbers.untyped_storage()

    def bound(self) -> float:
        """Return a bound of the size of the numbers."""
        return float(self.numbers.abs().amax()) if self.numbers.numel() else 0.0

    def apply(self, function: Callable[[Tensor], Tensor]) -> "NumberedBias":
        """Return the bias with a function of its numbers, which may move it to another device."""
        return self.copy_with(function(self.numbers)).expand(self.shape)

    def expand(self, *sizes: Any, **_: Any) -> "NumberedBias":
        """Return the bias expanded along axes before those of queries and keys."""
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        own = self.numbers.shape[self.dim() - 2 :]
        return self.copy_with(self.numbers.expand(*shape[:-2], *own))


def make_dense(x: Any) -> Any:
    """Return arguments with every computed bias among them as a tensor of all its entries."""
    return tree_map_only(ComputedBias, lambda one: one.to_dense(), x)


def parse_index(index: Any, dims: int) -> MatrixIndex | None:
    """Return the parts of an index of a bias with this number of axes; None if it adds axes or holds a bool tensor."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(one is None or (isinstance(one, Tensor) and one.dtype == torch.bool) for one in parts):
        return None
    if any(one is Ellipsis for one in parts):
        at = next(n for n, one in enumerate(parts) if one is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (dims - len(parts) + 1)
    parts += [slice(None)] * (dims - len(parts))
    return MatrixIndex(tuple(parts[:-2]), *parts[-2:])


def define_entrywise(name: str) -> Callable[..., Tensor]:
    """Return the method of a bias that treats its entries one by one, as the method of this name of a tensor does."""

    def compute(self: ComputedBias, *args: Any, **kwargs: Any) -> Tensor:
        def change(x: Tensor) -> Tensor:
            changed: Tensor = getattr(x, name)(*args, **kwargs)
            return changed

        wanted = change(torch.empty(0, dtype=self.dtype)).dtype if name in CASTS and self.has_sums else self.dtype
        return self.apply(change) if score_dtype(wanted) == wanted or not self.has_sums else change(self.to_dense())

    return compute


for _name in ENTRYWISE:
    setattr(ComputedBias, _name, define_entrywise(_name))


def drop_repeated_axes(x: Tensor) -> Tensor:
    """Return a tensor, or a bias of numbers, with size 1 for each axis along which it is expanded."""
    if isinstance(x, NumberedBias):
        return x.copy_with(drop_repeated_axes(x.numbers))
    strides = x.stride()
    return x if all(strides) else x[tuple(slice(None) if stride else slice(1) for stride in strides)]
