"""Reentrant activation checkpoints, run as non-reentrant ones while a watcher needs the graph of what is inside.

torch's reentrant checkpoint runs its function without gradients, so that no tensor inside has a graph, and its backward refuses
torch.autograd.grad. The other variant computes the same numbers and the same gradients, and has neither limit.
"""

from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor

from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.thread_state import STATE

ReentrantCheckpoint = checkpoints.CheckpointFunction


class DifferentiableCheckpoint(ReentrantCheckpoint):
    """torch's reentrant checkpoint, replaced by the other variant where the graph of what is inside is needed."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run function(*args) in a checkpoint.

        Without an argument that needs a gradient, a reentrant checkpoint has no gradient at all, and is left as it is.
        """
        has_gradient = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if has_gradient and STATE.is_active and any(watcher.needs_graph for watcher in STATE.watchers):
            return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return ReentrantCheckpoint.apply(function, preserve_rng_state, *args)


def build_patches() -> list[AttributePatch]:
    """Return the attribute patch of the function that reentrant checkpoints call."""
    return [(checkpoints, "CheckpointFunction", DifferentiableCheckpoint)]
