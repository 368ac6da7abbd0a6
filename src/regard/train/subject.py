"""What a run learns, as the loop sees it: its data, its model, its loss, and what is told and kept of both."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, device, nn

from regard.text import BytePair, Letters
from regard.train.alone import Engine
from regard.train.config import TrainConfig


class Reader(Protocol):
    """Batches by their number."""

    @property
    def batches(self) -> int:
        """How many an epoch has."""

    def read(self, n: int) -> Any:
        """Batch n, whatever was read before."""


class Subject(Protocol):
    """A language, or translation from one into another."""

    @property
    def config(self) -> TrainConfig:
        """The config, with what the data says of it."""

    @property
    def text(self) -> BytePair | Letters:
        """The vocabulary."""

    @property
    def flops(self) -> float:
        """Floating-point operations to train on one token; 0 where they are not counted."""

    def identity(self) -> dict[str, int | str]:
        """What tells the data from others, wherever it lies."""

    def readers(self, engine: Engine) -> tuple[Reader, Reader | None]:
        """The batches that are trained on, and the held-out ones where there are any."""

    def model(self) -> Any:
        """The model with its first weights."""

    def placed(self, batch: Any, where: device) -> Any:
        """A batch on a device; its targets, -100 where there is none, are batch.targets."""

    def tokens(self, batch: Any, world: int) -> int:
        """How many tokens all processes read in their shares of a batch."""

    def loss(self, model: nn.Module, batch: Any, count: float) -> Tensor:
        """What training makes small: its sum over the batch's targets, divided by count."""

    def nats(self, model: nn.Module, batch: Any) -> Tensor:
        """Σ -log p(target) over the batch's targets."""

    def sampled(self, model: Any, reader: Reader, step: int) -> str:
        """What the model writes at a step; reader is the held-out one, where there is one."""

    def save(self, folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
        """Writes the model with these weights into a folder, which its `load` reads."""

    def about(self, reader: Reader) -> str:
        """How much there is to train on, in a line."""
