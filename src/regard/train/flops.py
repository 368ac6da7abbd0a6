"""How fast this machine multiplies at best, and how many multiplications training needs: what share of the peak is reached."""

import time

import torch

from regard.models import GPT2Config

SIDE, SECONDS = 1024, 0.3


def flops_of(config: GPT2Config) -> float:
    """Floating-point operations to train on one token: two for a multiply-add, forward once, backward twice."""
    return 6 * sum(config.multiply_adds(config.context).values()) / config.context


def measured(precision: str, device: torch.device) -> float:
    """Operations a second of the fastest of some products of two matrices of 1,024 x 1,024, taken for a third of a second."""
    dtype = getattr(torch, precision)
    a, b = (torch.ones(SIDE, SIDE, dtype=dtype, device=device) for _ in range(2))
    fastest, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        start = time.perf_counter()
        float((a @ b)[0, 0])  # waits for it
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * SIDE**3 / fastest
