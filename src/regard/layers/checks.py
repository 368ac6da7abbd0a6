"""What every layer asks of its settings and of its input."""

from typing import Any

from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import FLOATS, check_count, check_floating, check_instance
from regard.mechanism.request import autocasts

WIDEST = 2**31  # of a layer, in numbers


def positive(**sizes: int) -> None:
    """Raises ConfigError where a size is not a whole number above 0."""
    for name, size in sizes.items():
        check_count(name, size, most=WIDEST)


def has_bias(qkv_bias: bool) -> bool:
    """Whether projections add a bias, or ConfigError."""
    return check_instance("qkv_bias", qkv_bias, bool)


def fits(
    x: Tensor,
    width: int | None = None,
    context_length: int | None = None,
    name: str = "x",
    like: Tensor | nn.Module | None = None,
) -> None:
    """Raise where x is not (t, width) or (b, t, width) with at most context_length tokens, of the dtype of what projects it."""
    check_floating(name, x)
    weight = getattr(like, "weight", like)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS or weight.is_meta:
        weight = x  # in bytes, or not there yet: what it is says nothing of x
    if (x.dtype != weight.dtype or x.device != weight.device) and not autocasts(x.device):
        came = f"{x.dtype} on {x.device}, and its weights are {weight.dtype} on {weight.device}"
        raise ConfigError(f"{name} must have the dtype and device of the layer; got {came}. Use {name}.to(weight).")
    if x.dim() not in (2, 3):
        raise ShapeError(f"{name} must be (t, d_in) or (b, t, d_in), got {tuple(x.shape)}.")
    if width is not None and x.shape[-1] != width:
        raise ShapeError(f"{name} is (..., t, d_in) = {tuple(x.shape)}: its d_in is {x.shape[-1]}, but the layer's is {width}.")
    if context_length is not None and x.shape[-2] > context_length:
        raise ShapeError(
            f"{name} has {x.shape[-2]} tokens, but the layer's context_length is {context_length}. "
            "Pass fewer tokens, or make the layer with a greater context_length."
        )


def same_rank(**tensors: Tensor) -> None:
    """Raises ShapeError where some are batched and some are not."""
    if len({x.dim() for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ShapeError(f"all are (b, t, width) or all are (t, width); got {shapes}.")


def without_masks(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """Takes out of a state dict the rule that the lectures keep as a buffer; a pre-hook of load_state_dict."""
    state.pop(f"{prefix}mask", None)
