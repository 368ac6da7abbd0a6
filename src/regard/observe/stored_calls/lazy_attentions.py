"""Attentions: a map that can stand in for the tensor of weights that a program expects."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap
from regard.mechanism.scores import score_dtype

FIELDS = ("dtype", "device", "layout", "ndim", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse", "requires_grad")
KNOWN = {  # functions that do not need the weights
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(getattr(Tensor, name).__get__ for name in (*FIELDS, "grad", "grad_fn")),
}
WRITES = ("__setitem__", "__delitem__", "__set__")


class Attentions(AttentionMap, Tensor):  # type: ignore[misc,override]
    """A map that is also the tensor (b, h, q, k) it represents: tensor methods and functions use its dense form.

    Shape, dtype and device cost nothing. If the dense form is past its limit, TooLargeError states the bytes and what to ask
    the map for instead. A method that maps and tensors both have is the tensor's if its arguments are a tensor's: select(axis,
    index), diagonal(dim1=, dim2=), logsumexp(axis), tile(2, 1). Writing to it raises ConfigError.
    """

    @staticmethod
    def __new__(cls, of: AttentionMap) -> "Attentions":
        dtype = score_dtype(of.planes.request.q.dtype)
        made: Attentions = Tensor._make_wrapper_subclass(cls, of.shape, dtype=dtype, device=of.device)
        return made

    def __init__(self, of: AttentionMap) -> None:
        self.__dict__.update(of.__dict__)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """(b, h, q, k)."""
        return torch.Size(super().shape)

    def detach(self) -> "Attentions":
        """Return itself: it has no gradient."""
        return self

    def to(self, *args: Any, **named: Any) -> Tensor:
        """Return itself if it has that device and dtype; else its dense form there."""
        device, dtype, *_ = (None, None) if "copy" in named else torch._C._nn._parse_to(*args, **named)
        same = (device is None or device == self.device) and (dtype is None or dtype == self.dtype)
        return self if same and "copy" not in named else self.dense().to(*args, **named)

    def __getitem__(self, index: Any) -> Tensor:
        """Return weights by a map's indices; None and a bool of several axes index the dense form."""
        try:
            return super().__getitem__(index)
        except ShapeError:
            return self.dense()[index]

    def select(self, *args: Any, **named: Any) -> Any:
        """Return a smaller map, by batch= and heads=; or one index of an axis, as a tensor's select(axis, index)."""
        if named.keys() & {"dim", "index"} or (len(args) == 2 and all(isinstance(x, int) for x in args)):
            return self.dense().select(*args, **named)
        return Attentions(super().select(*args, **named))

    def diagonal(self, *args: Any, **named: Any) -> Tensor:
        """Return the weight of each query on the key `back` before it; or a tensor's diagonal(offset, dim1, dim2)."""
        if named.keys() & {"offset", "dim1", "dim2"} or len(args) > 1:
            return self.dense().diagonal(*args, **named)
        return super().diagonal(*args, **named)

    def logsumexp(self, *args: Any, **named: Any) -> Tensor:
        """Return the logsumexp of each row's scores, (b, h, q); or of the weights along axes, as a tensor's logsumexp(dim)."""
        return self.dense().logsumexp(*args, **named) if args or named else super().logsumexp()

    def tile(self, *args: Any, **named: Any) -> Tensor:
        """Return the part that two slices select, in bins; or the weights repeated, as a tensor's tile(dims)."""
        return super().tile(*args, **named) if named or isinstance(args[0], slice) else self.dense().tile(*args)

    def __matmul__(self, v: Any) -> Tensor:
        """Return A v, computed block by block; from the dense form if v has not the shape of values."""
        v = materialize_maps(v)
        try:
            return super().__matmul__(v)
        except ShapeError:
            found: Tensor = self.dense() @ v
            return found

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.dense())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        found = self.dense().cpu().numpy()
        return found if dtype is None else found.astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attentions":
        other = object.__new__(AttentionMap)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return Attentions(other)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return AttentionMap.__repr__(self).replace(str(self.shape), str(tuple(self.shape)))

    __hash__ = AttentionMap.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(isinstance(x, cls) for x in find_written(str(func.__name__), args, kwargs)):
            raise ConfigError(f"{func.__name__} writes to attentions, which are computed on access: write to .dense() instead.")
        return func(*materialize_maps(args), **materialize_maps(kwargs))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def find_written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a function of torch writes to."""
    out = kwargs.get("out")
    inplace = name in WRITES or (name.endswith("_") and not name.endswith("__"))
    return [*(args[:1] if inplace else ()), *(out if isinstance(out, tuple | list) else [out])]


def materialize_maps(x: Any) -> Any:
    """Return arguments with every map among them replaced by its dense form."""
    if isinstance(x, Attentions):
        return x.dense()
    if isinstance(x, list | tuple):
        return type(x)(materialize_maps(one) for one in x)
    return {key: materialize_maps(value) for key, value in x.items()} if isinstance(x, dict) else x


def make_operator(name: str) -> Callable[..., Tensor]:
    """Return an operator of augmented assignment, whose result is a new tensor."""

    def apply_operator(self: Attentions, other: Any) -> Tensor:
        found: Tensor = getattr(self.dense(), f"__{name}__")(materialize_maps(other))
        return found

    return apply_operator


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(Attentions, f"__i{_name}__", make_operator(_name))
