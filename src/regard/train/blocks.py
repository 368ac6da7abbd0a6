"""What is applied to a model's blocks from outside: activations computed again instead of kept, and compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.models import GPT2

Forward = Callable[..., Tensor]


def applied(model: GPT2, *, activation_checkpointing: bool, compiled: bool) -> GPT2:
    """The model, each of whose blocks is called so where it learns; names, weights and hooks stay as they are.

    With activation_checkpointing only a block's input is kept for the gradient, and the rest is computed once more, with the
    same dice. Source: Chen et al. 2016, Training deep nets with sublinear memory cost.
    """
    for block in model.blocks:
        plain = forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not plain:
            block.forward = learning(forward, plain)
    return model


def learning(forward: Forward, plain: Forward) -> Forward:
    """The first function where gradients are wanted, else the second: samples and looks at heads find the block as it was."""

    def either(*x: Any, **settings: Any) -> Tensor:
        return (forward if torch.is_grad_enabled() else plain)(*x, **settings)

    return either
