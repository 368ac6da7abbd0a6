"""Compare tensors that are computed in two ways, and differ by rounding, or by factors that are solved for."""

import torch
from torch import Tensor

NEAR = 1e-3  # of the largest expected number


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of one shape are equal up to rounding; False if a number in them is not."""
    if found.shape != expected.shape:
        return False
    return not found.numel() or bool((found - expected).abs().max() <= NEAR * expected.abs().max())


def solve_least_squares(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the x (n,) with the least |a x - b|², of a (m, n) and b (m,); None if a number in them is not finite.

    Of such numbers MKL would print an error to standard output.
    """
    if not (a.isfinite().all() and b.isfinite().all()):
        return None
    solution: Tensor = torch.linalg.lstsq(a, b.unsqueeze(1)).solution
    return solution.flatten()
