"""ActivationTrace: what goes into and out of the modules of a model in one forward pass, at a few positions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism.scores import score_dtype

POSITIONS = 8  # at which inputs and outputs are compared
NEAR = 2e-3  # relative difference up to which two activations are the same: float32 sums in another order, or TF32
ROUNDINGS = 4  # of half precision between two activations that are the same: of each one's factors and of itself


@dataclass(frozen=True, eq=False)
class Activation:
    """What went into a module and came out of it at the first positions of the first row, (p, c_in) and (p, c_out).

    Both are widened to float32; tolerance is the relative difference up to which they equal others, from their own dtype.
    """

    module: nn.Module
    name: str
    x: Tensor
    y: Tensor
    tolerance: float = NEAR


class ActivationTrace:
    """Hooks that keep what goes into and out of the modules of one forward pass, at the first positions."""

    def __init__(self, positions: int = POSITIONS) -> None:
        self.positions = positions
        self.linear: list[Activation] = []
        self.norms: list[Activation] = []
        self.last: Tensor | None = None  # the whole input of the last norm
        self.tokens: Tensor | None = None  # what the model was called with, the first positions of the first row

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator["ActivationTrace"]:
        """Keep activations within the context."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                has_weight = isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() in (1, 2)
                if has_weight and not isinstance(module, nn.Embedding):
                    stack.callback(module.register_forward_hook(self.make_hook(name), with_kwargs=True).remove)
            stack.callback(model.register_forward_pre_hook(self.keep_tokens).remove)
            yield self

    def keep_tokens(self, model: nn.Module, args: Any) -> None:
        """Keep the tokens (1, p) that a model is called with."""
        self.tokens = args[0][:1, :POSITIONS]

    def make_hook(self, name: str) -> Any:
        """Return a hook that keeps the activation of a module."""

        def keep(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            x = find_input(args, kwargs)
            if x is None or not isinstance(result, Tensor) or x.dim() < 2:
                return
            given, outputs = (cut_positions(one, self.positions) for one in (x, result))
            found = Activation(module, name, given, outputs, get_tolerance(result.dtype))
            if module.weight.dim() == 2:  # type: ignore[operator]
                self.linear.append(found)
            elif x.shape == result.shape:
                self.norms.append(found)
                self.last = x.detach()

        return keep


def find_input(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first tensor that a module was called with."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


def cut_positions(x: Tensor, positions: int) -> Tensor:
    """Return the first positions of the first row of (b, t, c) or (t, c), in float32 at least."""
    row = x.detach().flatten(0, -3)[0] if x.dim() > 2 else x.detach()
    return widen(row[:positions]).clone()


def get_tolerance(dtype: torch.dtype, least: float = NEAR) -> float:
    """Return the relative difference up to which two activations are the same, for their dtype: `least`, or its roundings.

    A rounding changes a number by at most half of eps, relative to its size (Higham 2002, section 2.1).
    """
    return max(least, ROUNDINGS * torch.finfo(dtype).eps / 2) if dtype.is_floating_point else least


def widen(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is."""
    return x.to(score_dtype(x.dtype))


def is_near(one: Tensor, other: Tensor, tolerance: float = NEAR) -> bool:
    """Return whether two activations are the same up to rounding."""
    if one.shape != other.shape:
        return False
    return bool((one - other).norm() <= tolerance * other.norm()) and bool(other.norm() > 0)


def find_columns(y: Tensor, v: Tensor, tolerance: float = NEAR) -> int | None:
    """Return the first column of y (p, n) at which v (p, e) stands; None if it does not. Of zeros, every number must be 0."""
    p, e = v.shape
    if y.shape[0] != p or y.shape[1] < e:
        return None
    if not v.any():
        places = (y == 0).all(0).unfold(0, e, 1).all(-1).nonzero().flatten()
        return int(places[0]) if len(places) else None
    distance = (y[:, : y.shape[1] - e + 1] - v[:, :1]).norm(dim=0)
    for start in (distance <= tolerance * v[:, 0].norm().clamp(min=1e-9)).nonzero().flatten().tolist():
        if is_near(y[:, start : start + e], v, tolerance):
            return int(start)
    return None
