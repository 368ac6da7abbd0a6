"""Biases that depend on the distance from query to key alone, as T5's: stored by their diagonals, a vector for each head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

STATED = ("__len__", "dim", "size", "numel", "is_floating_point", "element_size", "stride")  # what the shape and dtype tell
PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_nested", "is_sparse", "is_cuda", "is_meta", "requires_grad")
ENTRYWISE = ("to", "float", "double", "half", "bfloat16", "cpu", "detach", "clone", "contiguous", "__deepcopy__")
METHODS = (*ENTRYWISE, "__getitem__", "expand", "to_dense", "data_ptr")
SMALLER = 4  # times as many entries as its diagonals must a bias have


class RelativeBias(Tensor):
    """A bias (..., q, k) of which only the diagonals (..., q + k - 1) are stored.

    The entry of query i and key j is diagonals[j - i + q - 1]. Its slices, rows, entries and heads are found by the diagonals;
    any other function of torch takes it as an ordinary tensor.
    """

    diagonals: Tensor

    @staticmethod
    def __new__(cls, diagonals: Tensor, queries: int) -> "RelativeBias":
        """Build the bias of `queries` queries."""
        shape = *diagonals.shape[:-1], queries, diagonals.shape[-1] - queries + 1
        found: RelativeBias = Tensor._make_wrapper_subclass(cls, shape, dtype=diagonals.dtype, device=diagonals.device)
        found.diagonals = diagonals
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of torch by the method of its name, or by the whole bias."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if isinstance(args[0] if args else None, cls):
            if name in STATED or (name == "__get__" and func.__self__.__name__ in PROPERTIES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in METHODS:
                return getattr(cls, name)(*args, **kwargs)
        return func(*tree_map_only(cls, cls.to_dense, args), **tree_map_only(cls, cls.to_dense, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute an operator of torch, where functions of torch are not overridden, by the whole bias."""
        return func(*tree_map_only(cls, cls.to_dense, args), **tree_map_only(cls, cls.to_dense, kwargs or {}))

    def __getitem__(self, index: Any) -> Tensor:
        """Return what is at an index, as of a tensor."""
        found = self.index_diagonals(index)
        return self.to_dense()[index] if found is None else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RelativeBias{tuple(self.shape)}"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the diagonals."""
        return self.diagonals.nbytes

    def data_ptr(self) -> int:
        """Return the address of the diagonals."""
        return self.diagonals.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the diagonals."""
        return self.diagonals.untyped_storage()

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """Return the whole bias."""
        return self.diagonals.unfold(-1, self.shape[-1], 1).flip(-2)

    def expand(self, *sizes: Any, **_: Any) -> "RelativeBias":
        """Return the bias expanded along axes before those of queries and keys."""
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        return RelativeBias(self.diagonals.expand(*shape[:-2], -1), self.shape[-2])

    def index_diagonals(self, index: Any) -> Tensor | None:
        """Return the entries of an index, as of a tensor; None if they do not follow from the diagonals alone."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(one is None or (isinstance(one, Tensor) and one.dtype == torch.bool) for one in parts):
            return None
        if any(one is Ellipsis for one in parts):
            at = next(n for n, one in enumerate(parts) if one is Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.dim() - len(parts) + 1)
        parts += [slice(None)] * (self.dim() - len(parts))
        *leading, rows, columns = parts
        queries, keys = self.shape[-2:]
        if isinstance(rows, slice) and isinstance(columns, slice):
            (i, m, down), (j, n, right) = rows.indices(queries), columns.indices(keys)
            if down != 1 or right != 1 or i >= m or j >= n:
                return None
            return RelativeBias(self.diagonals[(*leading, slice(j - m + queries, n - i + queries - 1))], m - i)
        if isinstance(rows, Tensor) and isinstance(columns, slice) and self.dim() == 2 and rows.dim() == 1:
            rows, columns = rows.unsqueeze(-1), torch.arange(keys, device=rows.device)[columns]
        if not (isinstance(rows, Tensor) and isinstance(columns, Tensor)):
            return None
        rows, columns = rows + queries * (rows < 0), columns + keys * (columns < 0)
        return self.diagonals[(*leading, columns - rows + queries - 1)]


def apply_to_diagonals(name: str) -> Callable[..., RelativeBias]:
    """Return the method of a tensor that treats its entries one by one, for a relative bias."""

    def compute(self: RelativeBias, *args: Any, **kwargs: Any) -> RelativeBias:
        return RelativeBias(getattr(self.diagonals, name)(*args, **kwargs), self.shape[-2])

    return compute


for name in ENTRYWISE:
    setattr(RelativeBias, name, apply_to_diagonals(name))


def compress_bias(bias: Tensor) -> Tensor:
    """Return a bias (..., q, k) as a RelativeBias if its entries are equal along every diagonal, else as it is."""
    queries, keys = bias.shape[-2:]
    if queries * keys < SMALLER * (queries + keys) or not torch.equal(bias[..., 1, 1:], bias[..., 0, :-1]):
        return bias
    if not torch.equal(bias[..., 1:, 1:], bias[..., :-1, :-1]):
        return bias
    return RelativeBias(torch.cat([bias[..., 1:, 0].flip(-1), bias[..., 0, :]], -1), queries)
