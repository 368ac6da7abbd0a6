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

    def run_main_process_first(self) -> AbstractContextManager[object]:
        """Return a context that the first process leaves before any other process enters it."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model as training calls it: wrapped, sharded or compiled. Call it before the optimizer is created."""

    def sum_over_processes(self, number: float) -> float:
        """Return the sum of a number over all processes."""

    def make_autocast_context(self, precision: str) -> AbstractContextManager[object]:
        """Return a context in which matrix products are rounded to bfloat16 if that is the precision."""

    def make_gradient_sync_context(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one backward pass; gradients need to be exchanged only in the last one of a step."""

    def gather_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which submodules may be called on their own, such as a translator's encoder."""

    def compute_gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients as one vector."""

    def collect_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full state dict, to be written to a file; empty in all processes but the first."""


class SingleProcess:
    """Run training in a single process."""

    rank, world = 0, 1

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def run_main_process_first(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def sum_over_processes(self, number: float) -> float:
        return number

    def make_autocast_context(self, precision: str) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16")

    def make_gradient_sync_context(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def gather_weights(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def compute_gradient_norm(self, model: nn.Module) -> Tensor:
        return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])

    def collect_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()
