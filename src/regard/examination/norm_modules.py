"""Tell which modules are norms, by their weights and names."""

from torch import nn


def is_norm(part: nn.Module) -> bool:
    """Return whether a module is a norm: without parts, all its weights are vectors; without weights, it is named after one."""
    own = list(part.parameters(recurse=False))
    if list(part.children()) or any(weight.dim() != 1 for weight in own):
        return False
    return bool(own) or "norm" in type(part).__name__.lower()
