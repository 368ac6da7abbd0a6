"""Report: what one step of training came to."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """One step: a look at `accumulate` batches and, where nothing is wrong with them, an update of the weights."""

    step: int  # from 1
    loss_nats: float  # a token, before the update
    rate: float
    gradient_norm: float  # before it is clipped
    tokens: int  # read in this step, by all processes
    seconds: float  # that they took
    batch: int  # the number of the step's first batch, as Reader.read takes it
    skipped: str | None = None  # why there was no update
    held_out_nats: float | None = None  # a token of the held-out text, after the update
    best: bool = False  # whether that is the least so far
    sample: str | None = None  # what the model writes now

    def row(self) -> dict[str, Any]:
        """What is known, by name, as JSON has it: a number that is none is left out, and `skipped` tells of it."""
        return {name: value for name, value in asdict(self).items() if told(value)}


def told(value: Any) -> bool:
    """Whether a value says something."""
    return math.isfinite(value) if isinstance(value, float) else value is not None and value is not False
