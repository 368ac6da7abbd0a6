"""Activation checkpoints: reentrant ones run as others while a watcher needs the graph of what is inside.

torch's reentrant checkpoint runs its function without gradients, so that no tensor inside has a graph, and its backward refuses
torch.autograd.grad. The other variant computes the same numbers and the same gradients, and has neither limit. What an
intervention changes is not changed again when a backward pass runs the function again, so that it runs without a checkpoint.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor

from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.thread_state import STATE

ReentrantCheckpoint = checkpoints.CheckpointFunction
GENERATORS = (  # of torch, the second from 2.14 on
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)


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


def start_unless_changed(start: Callable[..., Iterator[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Start a checkpoint that is not reentrant at the first step and end it at the second; do neither in an intervention."""
    if is_changed():
        yield
    else:
        yield from start(*args, **kwargs)


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches of the functions that checkpoints call."""
    starts = ((name, getattr(checkpoints, name)) for name in GENERATORS if hasattr(checkpoints, name))
    return [
        (checkpoints, "CheckpointFunction", DifferentiableCheckpoint),
        *((checkpoints, name, partial(start_unless_changed, start)) for name, start in starts),
    ]
