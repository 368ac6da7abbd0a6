"""AdamW, with decay of the matrices alone."""

from typing import Any

import torch
from torch import nn

from regard.train.config import TrainConfig


def made(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The optimiser of a model's parameters."""
    return torch.optim.AdamW(groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas, fused=True)


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, embeddings among them, which decay; and vectors, biases and the scales of norms, which do not."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in parameters if one.dim() >= 2]
    vectors = [one for one in parameters if one.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimiser.param_groups:
        group["lr"] = rate
