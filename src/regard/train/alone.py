"""What the loop asks of the machinery under it, and the simplest there is: one process, on one device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn


class Engine(Protocol):
    """Where the model lies and who else trains it; each of `world` processes reads its own share of every batch."""

    rank: int
    world: int
    device: torch.device

    def in_turn(self) -> AbstractContextManager[object]:
        """A context that the first process has left before another enters it."""

    def prepared(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training: wrapped, sharded or compiled; before the optimiser is made of it."""

    def total(self, number: float) -> float:
        """The sum of a number over all processes."""

    def products(self, precision: str) -> AbstractContextManager[object]:
        """A context in which products are rounded to bfloat16, where that is the precision."""

    def exchanging(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """A context of one backward; gradients need to be exchanged in the last of a step alone."""

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context in which parts of the model may be called, as a translator's encoder is, and not it as a whole alone."""

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The norm of all gradients as one vector."""

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole state dict, for a file; empty in all processes but the first."""


class Alone:
    """One process: there is nobody to share with."""

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
