"""Attentions: a map where a program expects a tensor of weights."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map import AttentionMap
from regard.mechanism.scores import wide

OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "rpow", "rmatmul"),
    *("neg", "abs", "gt", "lt", "ge", "le", "eq", "ne"),
)


class Attentions(AttentionMap):
    """A map that answers like the tensor (b, h, q, k) it stands for: its methods, and torch's functions, see its dense form.

    Where that is past the limit of dense, TooLargeError names the bytes and what to ask the map for instead. A method
    that maps and tensors both have is the tensor's where it is called as only a tensor's can be: select(axis, index),
    diagonal(dim1=, dim2=), logsumexp(axis), tile(2, 1).
    """

    requires_grad = False
    grad = grad_fn = None

    def __init__(self, of: AttentionMap) -> None:
        self.__dict__.update(of.__dict__)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """(b, h, q, k)."""
        return torch.Size(super().shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return wide(self._request.q.dtype)

    @property
    def is_cuda(self) -> bool:
        """Whether its answers lie on a GPU."""
        return self.device.type == "cuda"

    @property
    def ndim(self) -> int:
        """The number of its axes, 4."""
        return 4

    def dim(self) -> int:
        """The number of its axes, 4."""
        return 4

    def size(self, axis: int | None = None) -> Any:
        """Its shape, or the length of one axis."""
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> int:
        """How many weights it has."""
        return self.shape.numel()

    def detach(self) -> "Attentions":
        """Itself: it has no gradient."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        """Weights, by what a map takes; by None and a bool of several axes too, from its dense form."""
        try:
            return super().__getitem__(index)
        except ShapeError:
            return self.dense()[index]

    def select(self, *args: Any, **named: Any) -> Any:
        """A smaller map, by batch= and heads=; or one index of an axis, as a tensor's select(axis, index)."""
        if named.keys() & {"dim", "index"} or (len(args) == 2 and all(isinstance(x, int) for x in args)):
            return self.dense().select(*args, **named)
        return Attentions(super().select(*args, **named))

    def diagonal(self, *args: Any, **named: Any) -> Tensor:
        """The weight of each query on the key `back` before it; or a tensor's diagonal(offset, dim1, dim2)."""
        if named.keys() & {"offset", "dim1", "dim2"} or len(args) > 1:
            return self.dense().diagonal(*args, **named)
        return super().diagonal(*args, **named)

    def logsumexp(self, *args: Any, **named: Any) -> Tensor:
        """Of each row's scores, (b, h, q); or of the weights along axes, as a tensor's logsumexp(dim)."""
        return self.dense().logsumexp(*args, **named) if args or named else super().logsumexp()

    def tile(self, *args: Any, **named: Any) -> Tensor:
        """The part of it that two slices name, in bins; or the weights repeated, as a tensor's tile(dims)."""
        return super().tile(*args, **named) if named or isinstance(args[0], slice) else self.dense().tile(*args)

    def __matmul__(self, v: Any) -> Tensor:
        """A v, block by block; with v of another shape than values have, as a tensor's."""
        v = weighed(v)
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"a map has no {name}.")
        return getattr(self.dense(), name)

    __hash__ = AttentionMap.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*weighed(args), **weighed(kwargs or {}))


def weighed(x: Any) -> Any:
    """Arguments with every map among them as its dense form."""
    if isinstance(x, Attentions):
        return x.dense()
    if isinstance(x, list | tuple):
        return type(x)(weighed(one) for one in x)
    return {key: weighed(value) for key, value in x.items()} if isinstance(x, dict) else x


def operator(name: str) -> Callable[..., Any]:
    """An operator of tensors on the dense form."""

    def apply(self: Attentions, *args: Any) -> Any:
        return getattr(self.dense(), name)(*weighed(args))

    return apply


for _name in OPERATORS:
    setattr(Attentions, f"__{_name}__", operator(f"__{_name}__"))
