"""A forward of a model with the activations of its modules, its recording and its logits."""

from torch import Tensor, nn

from regard.attribution.model_parts import POSITIONS, ActivationTrace
from regard.errors import ConfigError
from regard.observe import Recording, record


def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (b, t, n) of a model. Raises ConfigError if it returns none."""
    found = model(tokens)
    logits = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise ConfigError(
            f"the model must return logits (b, t, n) for tokens {tuple(tokens.shape)}, as a tensor or as .logits; load it with "
            "its head, e.g. AutoModelForCausalLM."
        )
    return logits.detach()


def trace_forward(model: nn.Module, tokens: Tensor, positions: int = POSITIONS) -> tuple[ActivationTrace, Recording, Tensor]:
    """Run a model on tokens (b, t): return its modules' activations at the first positions, its recording and its logits."""
    trace = ActivationTrace(positions)
    with trace.watch(model), record(model, keep="values") as recording:
        logits = compute_logits(model, tokens)
    return trace, recording, logits
