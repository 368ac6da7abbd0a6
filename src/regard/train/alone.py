"""The interface between the training loop and its engine, and the engine of a single process on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn


class Engine(Protocol):
    """The interface of an engine: the device of the model, and the `world` processes that each read a share of every batch."""

    rank: int
    world: int
    device: torch.device

    def in_turn(self) -> AbstractContextManager[object]:
        """Return a context that the first process leaves before any other process enters it."""

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the model as training calls it: wrapped, sharded or compiled. Call it before the optimizer is created."""

    def total(self, number: float) -> float:
        """Return the sum of a number over all processes."""

    def products(self, precision: str) -> AbstractContextManager[object]:
        """Return a context in which matrix products are rounded to bfloat16 if that is the precision."""

    def exchanging(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one backward pass; gradients need to be exchanged only in the last one of a step."""

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which submodules may be called on their own, such as a translator's encoder."""

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients as one vector."""

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full state dict, to be written to a file; empty in all processes but the first."""


class Alone:
    """Run training in a single process."""

    rank, world = 0, 1

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def in_turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepared(self, model: nn.Module) -> nn.Module:
        return model

    def total(self, number: float) -> float:
        return number

    def products(self, precision: str) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def exchanging(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def gradient_norm(self, model: nn.Module) -> Tensor:
        return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()
