"""Quantization for generation: matrices in fewer bits, read from memory in less time."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from regard.errors import ConfigError
from regard.matmul import Linear, QuantizedLinear
from regard.matmul.quantized_linear import WEIGHTS
from regard.mechanism.arguments import check_choice, check_instance

KINDS = (nn.Linear, Linear)  # a subclass may compute something else
WEIGHT_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # they read the weights of their parts
CONV1D = ("transformers.pytorch_utils", "Conv1D")
COARSE = (torch.bfloat16, torch.int8, torch.uint8)  # dtypes of weights that round by as much as bfloat16, or by more
SHOWN = 4  # layers that a message names


class LinearPart(NamedTuple):
    """A linear layer of a model: the module it is a part of, its attribute there, its path, and whether it can be replaced."""

    owner: nn.Module
    name: str
    path: str
    layer: nn.Module
    is_replaceable: bool


class TiedModel(Protocol):
    """A model whose head may be its token embedding."""

    tokens: nn.Module
    head: nn.Module | None


M = TypeVar("M", bound=nn.Module)


class QuantizedEmbedding(nn.Module):
    """A quantized matrix as an embedding, whose vectors are of a dtype that `to` changes as that of a weight."""

    def __init__(self, matrix: QuantizedLinear, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.matrix = matrix
        self.like: Tensor
        self.register_buffer("like", matrix.values.new_empty(0, dtype=dtype), persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        """Return the vectors of these tokens."""
        like = self._buffers.get("like")  # one that an older version pickled has none
        return self.matrix.dequantize_rows(index, torch.float32 if like is None else like.dtype)


def quantise(model: M, to: str = "int8") -> M:
    """Copy a model in evaluation mode, with its linear layers and token embedding in "bfloat16", "float16", "int8" or "int4".

    int8 has 16 scales for each 768 numbers of a row, int4 a scale and an offset for each 32.
    The copy is called, generates and is recorded like the model; the other weights are shared with it. Its outputs have the
    model's dtype, and differ by the rounding of the weights; it cannot be trained. A linear layer given itself is returned as
    a QuantizedLinear.

    Subclasses of nn.Linear and nn.Embedding, transformers' Conv1D, layers with hooks, and those of nn.MultiheadAttention and
    nn.TransformerEncoderLayer, which read their weights, stay as they are; a warning names such linear layers. Raises
    ConfigError for a model in which no linear layer can be replaced. Other code that reads the weight of a layer, as T5's does,
    gets its numbers after rounding, computed by each operation.
    """
    check_instance("model", model, nn.Module)
    check_choice("to", to, tuple(WEIGHTS))
    if is_replaceable(model, KINDS):
        return cast(M, quantize_layer(cast(nn.Linear, model), to).eval())
    check_replaceable(model)
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    memo |= {id(text): text for text in [getattr(model, "text", None)] if text is not None}
    prepared = copy.deepcopy(model, memo)
    replacements: dict[int, QuantizedLinear] = {}  # a layer may be a part of several modules
    for part in list(list_linear_parts(prepared)):
        if part.is_replaceable:
            matrix = replacements.get(id(part.layer)) or quantize_layer(cast(nn.Linear, part.layer), to)
            replacements[id(part.layer)] = matrix
            setattr(part.owner, part.name, matrix)
    quantize_tokens(prepared, to)
    return prepared.eval()


def choose_cache_dtype(projections: list[nn.Module | None], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which to cache what projections to keys and values give in a dtype; None if none is quantized.

    float32 is cached as bfloat16 where the weights of all projections round by as much or more. Only compiled code reads such
    a cache without widening it first, so that the keys stay float32 on other devices.
    """
    matrices = [one for one in projections if isinstance(one, QuantizedLinear)]
    if not matrices:
        return None
    are_coarse = len(matrices) == len(projections) and all(one.values.dtype in COARSE for one in matrices)
    is_read = are_coarse and dtype == torch.float32 and matrices[0].values.device.type == "cpu"
    return torch.bfloat16 if is_read else dtype


def quantize_layer(layer: nn.Linear, to: str) -> QuantizedLinear:
    """Return a linear layer with its weight in fewer bits."""
    return QuantizedLinear.from_weight(layer.weight, layer.bias, to)


def quantize_tokens(model: nn.Module, to: str) -> None:
    """Replace a model's token embedding, and the head that shares its weight."""
    tokens = getattr(model, "tokens", None)
    if tokens is None or not is_replaceable(tokens, (nn.Embedding,)) or tokens.max_norm is not None:
        return
    tied = cast(TiedModel, model)
    matrix = QuantizedLinear.from_weight(tokens.weight, to=to)
    tied.tokens = QuantizedEmbedding(matrix, tokens.weight.dtype)
    if getattr(model, "head", matrix) is None:
        tied.head = matrix


def check_replaceable(model: nn.Module) -> None:
    """Warn of linear layers that stay as they are; raise ConfigError if there are no others."""
    parts = list(list_linear_parts(model))
    left = [part for part in parts if not part.is_replaceable]
    if not parts:
        raise ConfigError(f"{type(model).__name__} has no linear layers to quantize, or is quantized already.")
    shown = [f"{part.path} ({type(part.layer).__name__} of {type(part.owner).__name__})" for part in left[:SHOWN]]
    names = ", ".join(shown) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
    why = "only a plain nn.Linear without hooks can be, in a module that does not read its weight. Replace them by such layers"
    if len(left) == len(parts):
        raise ConfigError(f"no linear layer of {type(model).__name__} can be quantized, not {names}: {why}.")
    if left:
        warnings.warn(f"not quantized: {names}: {why}, or keep these as they are.", stacklevel=3)


def list_linear_parts(model: nn.Module) -> Iterator[LinearPart]:
    """List the linear layers of a model, subclasses too; one that is a part of several modules with each of them."""
    if is_linear(model):
        yield LinearPart(model, "", "the model", model, is_replaceable(model, KINDS))
    for path, owner in model.named_modules():
        for name, layer in owner._modules.items():  # named_children leaves out a second name
            if layer is not None and is_linear(layer):
                can_replace = is_replaceable(layer, KINDS) and not isinstance(owner, WEIGHT_READERS)
                yield LinearPart(owner, name, f"{path}.{name}".lstrip("."), layer, can_replace)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear, a subclass, or the Conv1D of transformers' GPT-2, (in, out)."""
    return isinstance(module, nn.Linear) or (type(module).__module__, type(module).__name__) == CONV1D


def is_replaceable(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of one of these classes exactly, and neither a hook nor a new forward changes what it does."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return parametrize.type_before_parametrizations(module) in kinds and not has_hooks
