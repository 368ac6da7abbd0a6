"""Evaluation mode within a context, whatever the mode of a model and of its modules was."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluate_mode(model: nn.Module) -> Iterator[None]:
    """Put a model and its modules in evaluation mode within the context."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
