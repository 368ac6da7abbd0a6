"""Changes to a model's blocks from outside: activation checkpointing and compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.models import GPT2

Forward = Callable[..., Tensor]


def wrap_blocks(model: GPT2, *, activation_checkpointing: bool, compiled: bool) -> GPT2:
    """Wrap the forward methods of a model's blocks for training; names, weights and hooks stay unchanged.

    With activation_checkpointing only a block's input is saved for the gradient, and the rest is computed again with the same
    random numbers. Source: Chen et al. 2016, Training deep nets with sublinear memory cost.
    """
    for block in model.blocks:
        plain = forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if forward is not plain:
            block.forward = select_by_grad_mode(forward, plain)
    return model


def select_by_grad_mode(forward: Forward, plain: Forward) -> Forward:
    """Return a function that calls `forward` if gradients are enabled, else `plain`, as for samples and head observations."""

    def call_selected(*x: Any, **settings: Any) -> Tensor:
        return (forward if torch.is_grad_enabled() else plain)(*x, **settings)

    return call_selected
