"""How many floating-point operations training needs."""

from regard.models import GPT2Config


def flops_of(config: GPT2Config) -> float:
    """Floating-point operations to train on one token: two for a multiply-add, forward once, backward twice."""
    return 6 * sum(config.multiply_adds(config.context).values()) / config.context
