"""The projections of attention from named tensors: the lectures' state dicts, or plain matrices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import WeightsError

NAMES = ("W_query", "W_key", "W_value")


@dataclass(frozen=True, eq=False)
class Projection:
    """x weight + bias; the weight is (d_in, d_out)."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        projected = x @ self.weight
        return projected if self.bias is None else projected + self.bias


@dataclass(frozen=True, eq=False, kw_only=True)
class Projections:
    """W_query, W_key and W_value, with those of all heads side by side, and out_proj if there is one.

    heads is the number of heads in the names, None if there are none; causal, whether the lectures' mask is present.
    """

    query: Projection
    key: Projection
    value: Projection
    out: Projection | None = None
    heads: int | None = None
    causal: bool = False

    @property
    def d_in(self) -> int:
        """The width of x."""
        return self.query.weight.shape[0]


def find_projections(tensors: Mapping[str, Tensor]) -> Projections:
    """Return the projections in a file.

    Names: `W_query.weight` (d_out, d_in) with `W_query.bias`, as nn.Linear writes them; `W_query` (d_in, d_out), a plain
    parameter; `heads.0.W_query.weight`, ..., stacked heads. The lectures' `mask` buffers mark the layer as causal. Raises
    WeightsError if a tensor is missing, of another shape, or unknown.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] != "mask"}
    causal = len(rest) < len(tensors)
    count = count_stacked_heads(rest)
    query, key, value = (take_projection(rest, name, count) for name in NAMES)
    out = take_linear(rest, "out_proj") if any(name.split(".")[0] == "out_proj" for name in rest) else None
    if rest:
        raise WeightsError(f"the file of weights holds {sorted(rest)[0]!r}, which is not part of this attention.")
    check_shapes(query, key, value, out)
    return Projections(query=query, key=key, value=value, out=out, heads=count, causal=causal)


def count_stacked_heads(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the number of stacked heads in the names, None if there are none."""
    numbers = [int(found[1]) for name in tensors if (found := re.match(r"heads\.(\d{1,4})\.", name))]
    return max(numbers) + 1 if numbers else None


def take_projection(tensors: dict[str, Tensor], name: str, count: int | None) -> Projection:
    """Return a projection, with those of stacked heads side by side."""
    if count is None:
        return take_linear(tensors, name)
    parts = [take_linear(tensors, f"heads.{head}.{name}") for head in range(count)]
    if len({part.weight.shape for part in parts}) > 1 or len({part.bias is None for part in parts}) > 1:
        raise WeightsError(f"the heads' {name} differ in shape: {[tuple(part.weight.shape) for part in parts]}.")
    biases = [part.bias for part in parts if part.bias is not None]
    return Projection(torch.cat([part.weight for part in parts], -1), torch.cat(biases) if biases else None)


def take_linear(tensors: dict[str, Tensor], name: str) -> Projection:
    """Remove a projection from the tensors and return it as (d_in, d_out), whichever way it is stored."""
    if name in tensors:
        weight = check_matrix(tensors.pop(name), name)
    elif f"{name}.weight" in tensors:
        weight = check_matrix(tensors.pop(f"{name}.weight"), f"{name}.weight").T
    else:
        names = ", ".join(map(repr, sorted(tensors)[:6])) or "nothing else"
        raise WeightsError(f"the file of weights has no {name} and no {name}.weight; it holds {names}.")
    bias = tensors.pop(f"{name}.bias", None)
    if bias is not None and bias.shape != weight.shape[1:]:
        raise WeightsError(f"{name}.bias is {tuple(bias.shape)}, but {name} gives {weight.shape[1]} numbers.")
    return Projection(weight, bias)


def check_matrix(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor; raise WeightsError if it does not have two axes."""
    if tensor.dim() != 2:
        raise WeightsError(f"{name} must have two axes, got {tuple(tensor.shape)}.")
    return tensor


def check_shapes(query: Projection, key: Projection, value: Projection, out: Projection | None) -> None:
    """Raise WeightsError if the shapes of the projections do not match."""
    shapes = {name: tuple(one.weight.shape) for name, one in zip(NAMES, (query, key, value), strict=True)}
    if len({d_in for d_in, _ in shapes.values()}) > 1 or query.weight.shape != key.weight.shape:
        laid_out = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise WeightsError(f"as (d_in, d_out) the shapes of the weights do not match: {laid_out}.")
    if out is not None and out.weight.shape[0] != value.weight.shape[1]:
        raise WeightsError(f"out_proj takes {out.weight.shape[0]} numbers, but W_value gives {value.weight.shape[1]}.")
