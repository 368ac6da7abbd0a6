"""Checks of the settings and the input of every layer."""

from typing import Any

from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.matmul import QuantizedLinear
from regard.mechanism.arguments import FLOATS, check_count, check_floating, check_instance
from regard.mechanism.request import is_autocast_on

WIDEST = 2**31  # largest size of a layer


def check_sizes(**sizes: int) -> None:
    """Raise ConfigError unless every size is an integer from 1 to WIDEST."""
    for name, size in sizes.items():
        check_count(name, size, most=WIDEST)


def check_bias_flag(qkv_bias: bool) -> bool:
    """Return whether projections add a bias, or raise ConfigError."""
    return check_instance("qkv_bias", qkv_bias, bool)


def check_input(
    x: Tensor,
    width: int | None = None,
    context_length: int | None = None,
    name: str = "x",
    like: Tensor | nn.Module | None = None,
) -> None:
    """Raise an error unless x is (t, width) or (b, t, width) with at most context_length tokens, in the dtype of `like`.

    Raises ConfigError for a dtype or device other than those of the weight that projects x, ShapeError for the shape.
    """
    check_floating(name, x)
    weight = None if isinstance(like, QuantizedLinear) else getattr(like, "weight", like)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS or weight.is_meta:
        weight = x  # quantized, or on the meta device: x need not match it
    if (x.dtype != weight.dtype or x.device != weight.device) and not is_autocast_on(x.device):
        came = f"{x.dtype} on {x.device}, but its weights are {weight.dtype} on {weight.device}"
        raise ConfigError(f"{name} must have the dtype and device of the layer; got {came}. Use {name}.to(weight).")
    if x.dim() not in (2, 3):
        raise ShapeError(f"{name} must be (t, d_in) or (b, t, d_in), got {tuple(x.shape)}.")
    if width is not None and x.shape[-1] != width:
        raise ShapeError(f"{name} is (..., t, d_in) = {tuple(x.shape)}: its d_in is {x.shape[-1]}, but the layer's is {width}.")
    if context_length is not None and x.shape[-2] > context_length:
        raise ShapeError(
            f"{name} has {x.shape[-2]} tokens, but the layer's context_length is {context_length}. "
            "Pass fewer tokens, or create the layer with a larger context_length."
        )


def check_same_rank(**tensors: Tensor) -> None:
    """Raise ShapeError if some tensors are batched and some are not."""
    if len({x.dim() for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ShapeError(f"the inputs must all be (b, t, width) or all (t, width); got {shapes}.")


def drop_mask_buffer(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """Remove the lectures' `mask` buffer from a state dict; a pre-hook of load_state_dict."""
    state.pop(f"{prefix}mask", None)
