"""The matrices of a module, found by shape: each as x W + b in float64, with its name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DOUBLE = torch.float64


@dataclass(frozen=True, eq=False)
class Affine:
    """x weight + bias: weight (c_in, c_out), bias (c_out,) or None; `heads` if the parameter's shape gives their number."""

    name: str
    weight: Tensor
    bias: Tensor | None = None
    heads: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x weight + bias: (..., c_in) to (..., c_out)."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias

    @property
    def in_features(self) -> int:
        """The input width, c_in."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        """The output width, c_out."""
        return self.weight.shape[1]


def concatenate_outputs(parts: list[Affine]) -> Affine:
    """Concatenate matrices, their outputs side by side."""
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    return Affine(parts[0].name, torch.cat([part.weight for part in parts], 1), torch.cat(biases))


def find_matrices(module: nn.Module, width: int) -> Iterator[Affine]:
    """Yield every matrix of a module, in the order in which it holds them; `width` is that of the input."""
    for path, part in module.named_modules():
        own = {name: one.detach().to("cpu", DOUBLE) for name, one in part.named_parameters(recurse=False)}
        if isinstance(part, nn.Embedding) or not own:
            continue
        if is_linear_layer(part, own):
            yield Affine(path or "linear", orient_weight(part, own["weight"], own.get("bias")), own.get("bias"))
        else:
            yield from find_parameter_matrices(path, own, width)


def is_linear_layer(part: nn.Module, own: dict[str, Tensor]) -> bool:
    """Return whether a part of a module is one matrix and its bias, as nn.Linear is."""
    return (
        set(own) <= {"weight", "bias"} and "weight" in own and is_matrix(own["weight"]) and not isinstance(part, nn.LayerNorm)
    )


def is_matrix(weight: Tensor) -> bool:
    """Return whether a weight is a matrix: nn.Linear's, or that of a convolution over one token."""
    return weight.dim() == 2 or (weight.dim() in (3, 4) and all(size == 1 for size in weight.shape[2:]))


def orient_weight(part: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a layer's weight as (c_in, c_out): nn.Linear stores its transpose, transformers' Conv1D does not."""
    weight = weight.flatten(1)
    as_is = type(part).__name__ == "Conv1D" or (
        not isinstance(part, nn.Linear) and bias is not None and len(bias) == weight.shape[1] != weight.shape[0]
    )
    return weight if as_is else weight.T


def find_parameter_matrices(path: str, own: dict[str, Tensor], width: int) -> Iterator[Affine]:
    """Yield the matrices among plain parameters, with the biases whose names match."""
    biases = {id(bias) for name in own if (bias := find_bias(name, own)) is not None}
    for name, one in own.items():
        if id(one) in biases:
            continue
        full, bias = f"{path}.{name}".lstrip("."), find_bias(name, own)
        bias = None if bias is None else bias.flatten()
        if one.dim() == 2:
            stored_turned = name.endswith("_weight") or one.shape[0] != width  # as in torch.nn.functional
            weight = one.T if stored_turned and one.shape[1] == width else one
            yield Affine(full, weight, match_bias(bias, weight.shape[1]))
        elif one.dim() == 3:
            yield from flatten_head_axis(full, one, bias, width)
        elif one.dim() == 4 and list(one.shape).count(width) == 1 and 3 in one.shape[:2]:
            place = list(one.shape).index(width)  # (3, c, h, d), (c, 3, h, d) or (3, h, c, d)
            yield Affine(full, one.movedim(place, 0).flatten(1))


def flatten_head_axis(name: str, one: Tensor, bias: Tensor | None, width: int) -> Iterator[Affine]:
    """Yield the matrix of a parameter with a head axis: (h, c, d), (c, h, d), or of an output projection (h, d, c)."""
    h, middle, last = one.shape
    if middle == width and h != width:
        yield Affine(name, one.permute(1, 0, 2).flatten(1), match_bias(bias, h * last), h)
    elif h == width:
        yield Affine(name, one.flatten(1), match_bias(bias, middle * last), middle)
    else:
        yield Affine(name, one.flatten(0, 1), match_bias(bias, last), h)


def find_bias(name: str, own: dict[str, Tensor]) -> Tensor | None:
    """Return the bias of a plain parameter, by name: in_proj_bias for in_proj_weight, b_Q for W_Q, bq for wq; else None."""
    for pattern, instead in ((r"weight", "bias"), (r"^W", "b"), (r"^w", "b"), (r"$", "_bias"), (r"$", ".bias")):
        found = own.get(re.sub(pattern, instead, name, count=1))
        if found is not None and found is not own[name] and (found.dim() == 1 or own[name].dim() == 3):
            return found
    return None


def match_bias(bias: Tensor | None, width: int) -> Tensor | None:
    """Return a bias if it has this width, else None."""
    return bias if bias is not None and len(bias) == width else None


def is_norm(part: nn.Module) -> bool:
    """Return whether a module without parts may be a norm: its weights are vectors, or it has none and is named after one.

    A module that multiplies by a vector, such as PReLU or LayerScale, counts too.
    """
    own = list(part.parameters(recurse=False))
    if list(part.children()) or any(weight.dim() != 1 for weight in own):
        return False
    return bool(own) or "norm" in type(part).__name__.lower()
