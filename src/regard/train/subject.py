"""The interface of a training task: its data, model, loss, and what is printed and saved of them."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, device, nn

from regard.text import BytePair, Letters
from regard.train.alone import Engine
from regard.train.config import TrainConfig


class Reader(Protocol):
    """Batches by their index."""

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""

    def read(self, n: int) -> Any:
        """Return batch n, independently of what was read before."""


class Subject(Protocol):
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

    def identity(self) -> dict[str, int | str]:
        """Return values that identify the training data, wherever it is stored."""

    def readers(self, engine: Engine) -> tuple[Reader, Reader | None]:
        """Return the readers of the training batches and of the held-out batches, None if there are none."""

    def model(self) -> Any:
        """Create the model with its initial weights."""

    def placed(self, batch: Any, where: device) -> Any:
        """Move a batch to a device; its targets are batch.targets, -100 where there is none."""

    def tokens(self, batch: Any, world: int) -> int:
        """Return the number of tokens that all processes read in their shares of a batch."""

    def loss(self, model: nn.Module, batch: Any, count: float) -> Tensor:
        """Compute the training objective: its sum over the batch's targets, divided by count."""

    def nats(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute Σ -log p(target) over the batch's targets."""

    def sampled(self, model: Any, reader: Reader, step: int) -> str:
        """Generate a sample text at a step; reader is the held-out one if there is one."""

    def save(self, folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
        """Write the model with these weights into a folder that its `load` reads."""

    def about(self, reader: Reader) -> str:
        """Describe the amount of training data in one line."""
