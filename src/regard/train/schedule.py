"""The learning rate schedule: a warm-up, then a cosine decay, a constant and a linear decay, or an inverse square root."""

import math

from regard.train.config import TrainConfig


def rate(step: int, config: TrainConfig) -> float:
    """Compute the learning rate of a step, from 1 to steps: learning_rate * min(step / warmup, fall(step)).

    It reaches learning_rate in the last step of the warm-up, and final_rate of it in the last step of all. With the inverse
    square root it is learning_rate √(warmup / step), whatever the last step is (Vaswani et al. 2017, equation 3).
    """
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    if config.schedule == "inverse square root":
        return config.learning_rate * math.sqrt(max(config.warmup, 1) / step)
    fall = cosine_decay(step, config) if config.schedule == "cosine" else linear_decay(step, config)
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * fall)


def cosine_decay(step: int, config: TrainConfig) -> float:
    """Compute (1 + cos(π p)) / 2, p the completed share of the steps after the warm-up (Loshchilov and Hutter 2017)."""
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return (1 + math.cos(math.pi * min(done, 1))) / 2


def linear_decay(step: int, config: TrainConfig) -> float:
    """Compute the linear decay: 1, and within the last decay_share of all steps linearly down to 0."""
    length = min(config.decay_share * config.steps, config.steps - config.warmup)
    left = config.steps - step
    return min(left / length, 1.0) if length else 1.0
