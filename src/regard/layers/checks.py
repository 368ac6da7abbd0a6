"""What every layer asks of its settings and of its input."""

from numbers import Integral
from typing import Any

from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError


def positive(**sizes: int) -> None:
    """Raises ConfigError where a size is not a whole number above 0."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {size!r}.")


def fits(x: Tensor, width: int | None = None, context_length: int | None = None, name: str = "x") -> None:
    """Raises ShapeError where x is not (t, width) or (b, t, width) with at most context_length tokens."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{name} must be a floating tensor, got {came}.")
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
