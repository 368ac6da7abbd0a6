"""The weight of a quantized layer as a tensor, for code that reads the weights of its layers, as T5 of transformers does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from regard.errors import ConfigError


class DequantizedWeight(Tensor):
    """A matrix, or a view of one, whose numbers each operation computes anew; shape, dtype and device cost nothing.

    It cannot be changed: operations that would write into it, or into a view of it, raise ConfigError.
    """

    compute: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, compute: Callable[[], Tensor]) -> "DequantizedWeight":
        """Make a tensor without memory of its own, of the shape, strides and dtype of another."""
        found: DequantizedWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
        )
        found.compute = compute
        return found

    def __deepcopy__(self, memo: Any) -> "DequantizedWeight":
        """Return the same tensor, which cannot be changed."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation with the numbers. Raises ConfigError if it would write to them."""
        kwargs = dict(kwargs or {})
        if any(isinstance(x, cls) for x in tree_leaves(list_written(func, args, kwargs))):
            raise ConfigError("the weight of a quantized layer cannot be changed: change the model, then quantise it again.")

        def run(read: Callable[["DequantizedWeight"], Tensor]) -> Any:
            here = [tree_map(lambda x: read(x) if isinstance(x, cls) else x, part) for part in (args, kwargs)]
            return func(*here[0], **here[1])

        if not func.is_view:
            return run(cls.compute_numbers)
        outline, device = run(cls.make_outline), args[0].device
        if isinstance(outline, Tensor):
            return cls(outline, device, lambda: run(cls.compute_numbers))

        def compute_part(n: int) -> Tensor:
            part: Tensor = run(cls.compute_numbers)[n]
            return part

        return [cls(one, device, partial(compute_part, n)) for n, one in enumerate(outline)]

    def compute_numbers(self) -> Tensor:
        """Return a plain tensor with the numbers."""
        return self.compute()

    def make_outline(self) -> Tensor:
        """Return a tensor without numbers, on the meta device, of the same shape and strides."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")


def list_written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes into."""
    stated = func._schema.arguments
    by_name = dict(zip((one.name for one in stated), args, strict=False)) | dict(kwargs)
    return [by_name.get(one.name) for one in stated if one.alias_info is not None and one.alias_info.is_write]
