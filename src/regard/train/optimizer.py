"""AdamW with weight decay of matrices only, and its learning rate schedule."""

import math
from typing import Any

import torch
from torch import nn

from regard.train.config import TrainConfig

EPSILON = 1e-6  # added by torch to a norm before it divides by it


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Create the optimizer of a model's parameters."""
    return torch.optim.AdamW(
        make_parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas, fused=True
    )


def make_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and embeddings, which decay, and biases and norm scales, which do not."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in parameters if one.dim() >= 2]
    vectors = [one for one in parameters if one.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def update_parameters(optimiser: torch.optim.Optimizer, rate: float, norm: float, clip: float) -> None:
    """Do an optimizer step at a learning rate, with gradients scaled down to the norm clip, as by nn.utils.clip_grad_norm_.

    A clip of 0 scales none. The fused step scales gradients as it reads them: a separate pass takes half as long as the step.
    """
    for group in optimiser.param_groups:
        group["lr"] = rate
    longer = (norm + EPSILON) / clip if clip else 1.0
    optimiser.grad_scale = torch.tensor(longer) if longer > 1 else None  # type: ignore[attr-defined]
    try:
        optimiser.step()
    finally:
        optimiser.grad_scale = None  # type: ignore[attr-defined]


def compute_learning_rate(step: int, config: TrainConfig) -> float:
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
