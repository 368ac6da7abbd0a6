"""AdamW with weight decay of matrices only."""

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
