"""Solve for factors by least squares; of numbers that are not finite MKL would print an error to standard output."""

import torch
from torch import Tensor


def solve_least_squares(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the x (n,) with the least |a x - b|², of a (m, n) and b (m,); None if a number in them is not finite."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return None
    solution: Tensor = torch.linalg.lstsq(a, b.unsqueeze(1)).solution
    return solution.flatten()
