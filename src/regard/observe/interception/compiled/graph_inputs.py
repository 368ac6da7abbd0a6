"""The inputs of a graph that runs again: copies of them, what modules hold of them, and a guard against writes elsewhere."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.observe.interception.plain_tensors import UnreadableError

STATISTICS = ("running_mean", "running_var")  # of batch_norm, whose schema does not state that training writes them
WRITES = "{} writes into a tensor that has no copy, such as a parameter, so that the model itself would change"


def copy_inputs(args: Sequence[Any], written: Collection[int] = ()) -> list[Any]:
    """Return the inputs of a graph with copies of its tensors, but for parameters; of these only the ones in `written`.

    The copies share memory as the originals do.
    """
    memo: dict[int, Any] = {}

    def is_copied(n: int, x: Any) -> bool:
        return isinstance(x, Tensor) and (n in written or not isinstance(x, nn.Parameter))

    return [deepcopy(x.detach(), memo) if is_copied(n, x) else x for n, x in enumerate(args)]


def list_held(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the buffers and of the tensors that modules have as attributes."""
    return {id(x) for one in modules for x in (*one._buffers.values(), *vars(one).values()) if isinstance(x, Tensor)}


class WriteGuard(TorchDispatchMode):
    """A context in which a function raises UnreadableError if it would write into memory that is not free to be written.

    Free is the memory of the given tensors, and what functions allocate in the context.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.free = set(map(find_memory, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {find_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        written = tree_leaves(list_written(func, args, kwargs))
        if not self.free.issuperset(find_memory(x) for x in written if isinstance(x, Tensor)):
            raise UnreadableError(WRITES.format(func))
        result = func(*args, **kwargs)
        self.free |= {find_memory(x) for x in tree_leaves(result) if isinstance(x, Tensor)} - given
        return result


def find_memory(x: Tensor) -> int:
    """Return a number that tensors with the same memory have in common."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def list_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a function may write into."""
    if isinstance(func, HigherOrderOperator):
        return [args, kwargs] if "mutation" in func.name() else []  # kernels of Triton
    names = [one.name for one in func._schema.arguments if one.is_write]
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [given.get(name) for name in (*names, *(STATISTICS if given.get("training") else ()))]
