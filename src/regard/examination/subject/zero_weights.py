"""Fill weights of zeros with random numbers, where they hide all attention: branches that start at zero show nothing."""

import torch
from torch import Tensor, nn

from regard.examination import dependency
from regard.examination.subject.adapters import SubjectAdapter
from regard.examination.subject.inputs import InputShapes

GATE = 0.5  # the number put in place of a gate of zero


def fill_hiding_zeros(subject: SubjectAdapter, shapes: InputShapes) -> list[str]:
    """Fill the zeros of a module in which no output depends on another token, and return the names of what was filled.

    Nothing is filled if outputs depend on other tokens already, or still do not; the caller restores the module.
    """
    zeros = {} if subject.module is None else find_zero_weights(subject.module)
    try:
        if not zeros or shapes.tokens < 2 or has_token_interaction(subject, shapes):
            return []
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in zeros.values():
                made = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
                weight.copy_(made / max(weight.shape[-1], 1) ** 0.5 if weight.dim() > 1 else GATE + 0.1 * made)
        if has_token_interaction(subject, shapes):
            return list(zeros)
    except Exception:  # a user's layer may raise anything: the probes report it
        pass
    with torch.no_grad():
        for weight in zeros.values():
            weight.zero_()
    return []


def find_zero_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are zero, by name, without biases."""
    weights = {name: one for name, one in module.named_parameters() if one.is_floating_point() and one.numel()}
    return {name: one for name, one in weights.items() if "bias" not in name.rpartition(".")[2] and not one.any()}


def has_token_interaction(subject: SubjectAdapter, shapes: InputShapes) -> bool:
    """Return whether an output moves with another token."""
    inputs, other = (shapes.make(None, shapes.batch, seed, 1.0, subject.dtype, subject.device) for seed in (0, 100))
    with torch.no_grad():
        before = subject.call(*inputs).context
        for j in (0, shapes.tokens - 1):
            after = subject.call(*dependency.replace_token(inputs, other, 0, j)).context
            moved = (after - before)[0].double().abs().amax(-1).nan_to_num()
            moved = moved.amax(0) if moved.dim() > 1 else moved  # over heads
            moved[j - shapes.gap] = 0
            if float(moved.max()) > dependency.estimate_rounding(subject.dtype) * float(
                before.double().abs().nan_to_num().max()
            ):
                return True
    return False
