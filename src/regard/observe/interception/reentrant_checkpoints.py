"""Activation checkpoints: reentrant ones run as others while a watcher needs the graph of what is inside.

torch's reentrant checkpoint runs its function without gradients, so that no tensor inside has a graph, and its backward refuses
torch.autograd.grad. The other variant computes the same numbers and the same gradients, and has neither limit. What an
intervention changes is not changed again when a backward pass runs the function again, so that it runs without a checkpoint.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor

from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.thread_state import STATE

ReentrantCheckpoint = checkpoints.CheckpointFunction
start_checkpoint: Callable[..., Iterator[None]] = checkpoints._checkpoint_without_reentrant_generator


class DifferentiableCheckpoint(ReentrantCheckpoint):
    """torch's reentrant checkpoint, replaced by the other variant where the graph of what is inside is needed."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run function(*args) in a checkpoint.

        Without an argument that needs a gradient, a reentrant checkpoint has no gradient at all, and is left as it is.
        """
        has_gradient = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if has_gradient and is_changed():
            return function(*args)
        if has_gradient and STATE.is_active and any(watcher.needs_graph for watcher in STATE.watchers):
            return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return ReentrantCheckpoint.apply(function, preserve_rng_state, *args)


def is_changed() -> bool:
    """Return whether an intervention may change what runs now."""
    return STATE.is_active and any(watcher.can_change_calls for watcher in STATE.watchers)


def start_unless_changed(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Start a checkpoint that is not reentrant at the first step and end it at the second; do neither in an intervention."""
    if is_changed():
        yield
    else:
        yield from start_checkpoint(*args, **kwargs)


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches of the functions that checkpoints call."""
    return [
        (checkpoints, "CheckpointFunction", DifferentiableCheckpoint),
        (checkpoints, "_checkpoint_without_reentrant_generator", start_unless_changed),
    ]
