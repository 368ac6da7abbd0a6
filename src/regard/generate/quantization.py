"""Quantization for generation: matrices in fewer bits, read from memory in less time."""

import copy
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor, nn

from regard.errors import ConfigError
from regard.matmul import QuantizedLinear
from regard.matmul.quantized_linear import WEIGHTS
from regard.mechanism.arguments import check_choice, check_instance


class TiedModel(Protocol):
    """A model whose head may be its token embedding."""

    tokens: nn.Module
    head: nn.Module | None


M = TypeVar("M", bound=nn.Module)


class QuantizedEmbedding(nn.Module):
    """A quantized matrix as an embedding."""

    def __init__(self, matrix: QuantizedLinear) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, index: Tensor) -> Tensor:
        """Return the vectors of these tokens."""
        return self.matrix.dequantize_rows(index)


def quantise(model: M, to: str = "int8") -> M:
    """Copy a model in evaluation mode, with its linear layers and token embedding in "bfloat16", "float16", "int8" or "int4".

    int8 has 16 scales for each 768 numbers of a row, int4 a scale and an offset for each 32.
    The copy is called, generates and is recorded like the model; the other weights are shared with it. Its outputs differ by
    the rounding of the weights, and it cannot be trained. Raises ConfigError for a model without linear layers.
    """
    check_instance("model", model, nn.Module)
    check_choice("to", to, tuple(WEIGHTS))
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise ConfigError(f"{type(model).__name__} has no linear layers to quantize, or is quantized already.")
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    memo |= {id(text): text for text in [getattr(model, "text", None)] if text is not None}
    prepared = copy.deepcopy(model, memo)
    for module in list(prepared.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear):
                setattr(module, name, QuantizedLinear.from_weight(part.weight, part.bias, to))
    tied = cast(TiedModel, prepared)
    tokens = getattr(prepared, "tokens", None)
    if isinstance(tokens, nn.Embedding):
        matrix = QuantizedLinear.from_weight(tokens.weight, to=to)
        tied.tokens = QuantizedEmbedding(matrix)
        if getattr(prepared, "head", matrix) is None:
            tied.head = matrix
    return prepared.eval()
