"""The weight of a quantized layer as a tensor, for code that reads the weights of its layers, as T5 of transformers does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from regard.errors import ConfigError

Dequantize = Callable[[slice, torch.dtype], Tensor]  # rows and a dtype to these rows of the matrix


class DequantizedWeight(Tensor):
    """A matrix whose numbers each operation computes anew; shape, dtype and device cost nothing. It cannot be changed."""

    dequantize_rows: Dequantize
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @staticmethod
    def __new__(
        cls, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, dequantize_rows: Dequantize
    ) -> "DequantizedWeight":
        """Make a tensor without memory of its own."""
        found: DequantizedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        found.dequantize_rows = dequantize_rows
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation with the numbers. Raises ConfigError if it would write to them."""
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise ConfigError("the weight of a quantized layer cannot be changed: change the model, then quantise it again.")

        def read(x: Any) -> Any:
            return x.dequantize_rows(slice(None), x.dtype) if isinstance(x, cls) else x

        return func(*tree_map(read, args), **tree_map(read, dict(kwargs or {})))
