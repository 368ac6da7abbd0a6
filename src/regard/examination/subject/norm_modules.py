"""Tell which modules may be norms, by their weights and names."""

from torch import nn


def is_norm(part: nn.Module) -> bool:
    """Return whether a module without parts may be a norm: its weights are vectors, or it has none and is named after one.

    A module that multiplies by a vector, such as PReLU or LayerScale, counts too.
    """
    own = list(part.parameters(recurse=False))
    if list(part.children()) or any(weight.dim() != 1 for weight in own):
        return False
    return bool(own) or "norm" in type(part).__name__.lower()
