"""The floating-point operations that training needs."""

from regard.models import GPT2Config


def count_flops_per_token(config: GPT2Config) -> float:
    """Return the floating-point operations to train on one token: two for a multiply-add, forward once, backward twice."""
    return 6 * sum(config.multiply_adds(config.context).values()) / config.context
