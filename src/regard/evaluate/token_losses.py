"""The loss of given tokens, computed from logits a block at a time, and the mode in which a model is scored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, DataError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sampling import widen_logits
from regard.generate.sequence_reader import sees_ahead
from regard.mechanism.arguments import describe_value

Model = Callable[[Tensor], Any]  # tokens (b, t) to logits (b, t, n), or to an object that has them as .logits
BLOCK = 1 << 24  # logits converted to float32 and summed at a time


def check_callable(name: str, value: Any) -> None:
    """Raise ConfigError if a value is not callable."""
    if not callable(value):
        raise ConfigError(f"{name} must be a module or a function, got {describe_value(value)}.")


@contextmanager
def evaluation_mode(model: Model) -> Iterator[torch.device]:
    """Put a model in evaluation mode without gradients and yield its device; restore the mode afterwards."""
    module = model if isinstance(model, nn.Module) else nn.Module()
    first = next(module.parameters(), None)
    with evaluate_mode(module), torch.no_grad():
        yield torch.device("cpu") if first is None else first.device


def refuse_lookahead(model: Model, tokens: Tensor, logits: Tensor) -> None:
    """Raise ConfigError if the logits (b, t, n) of tokens (b, t) change with later tokens, among them those to be predicted."""
    if sees_ahead(model, tokens, logits):
        raise ConfigError(
            "the logits change with later tokens, as those of a model of masked words do: a loss needs a model that predicts "
            "each token from those before it."
        )


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute -log softmax(logits) at the targets, in nats, float64: logits (r, n), targets (r,), the loss (r,)."""
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        wrong = int(targets.min()) if int(targets.min()) < 0 else int(targets.max())
        raise DataError(f"token {wrong} is out of range: the model has tokens 0 to {logits.shape[-1] - 1}.")
    rows = max(1, BLOCK // max(logits.shape[-1], 1))
    found = []
    for block, right in zip(logits.split(rows), targets.split(rows), strict=True):
        block = widen_logits(block)
        found.append((block.logsumexp(-1) - block.gather(-1, right[:, None])[:, 0]).double())
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)
