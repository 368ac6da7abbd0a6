"""Compare tensors that are computed in two ways, and differ by rounding."""

from torch import Tensor

NEAR = 1e-3  # of the largest expected number


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of one shape are equal up to rounding; False if a number in them is not."""
    if found.shape != expected.shape:
        return False
    return not found.numel() or bool((found - expected).abs().max() <= NEAR * expected.abs().max())
