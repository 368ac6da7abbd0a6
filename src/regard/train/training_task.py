"""The interface of a training task: its data, model, loss, and what is printed and saved of them."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.text import BytePair, Letters
from regard.train.config import TrainConfig
from regard.train.single_process import Engine


class BatchReader(Protocol):
    """Batches by their index."""

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""

    def read(self, n: int) -> Any:
        """Return batch n, independently of what was read before."""


class Task(Protocol):
    """A training task: language modeling, or translation from one language into another."""

    @property
    def config(self) -> TrainConfig:
        """The config, completed by what the data determines."""

    @property
    def text(self) -> BytePair | Letters:
        """The vocabulary."""

    @property
    def flops(self) -> float:
        """Floating-point operations to train on one token; 0 if they are not counted."""

    def identify_data(self) -> dict[str, int | str]:
        """Return values that identify the training data, wherever it is stored."""

    def make_readers(self, engine: Engine) -> tuple[BatchReader, BatchReader | None]:
        """Return the readers of the training batches and of the held-out batches, None if there are none."""

    def make_model(self) -> Any:
        """Create the model with its initial weights."""

    def move_batch(self, batch: Any, device: torch.device) -> Any:
        """Move a batch to a device; its targets are batch.targets, -100 where there is none."""

    def count_tokens(self, batch: Any, world: int) -> int:
        """Return the number of tokens that all processes read in their shares of a batch."""

    def compute_loss(self, model: nn.Module, batch: Any, count: float) -> Tensor:
        """Compute the training objective: its sum over the batch's targets, divided by count."""

    def compute_nats(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute Σ -log p(target) over the batch's targets."""

    def generate_sample(self, model: Any, reader: BatchReader, step: int) -> str:
        """Generate a sample text at a step; reader is the held-out one if there is one."""

    def save_model(self, folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
        """Write the model with these weights into a folder that its `load` reads."""

    def describe_data(self, reader: BatchReader) -> str:
        """Describe the amount of training data in one line."""
